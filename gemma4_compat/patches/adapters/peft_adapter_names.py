"""A call with ``adapter_names`` ends with the call, also if it fails, and gives each row its own adapter.

Symptom: silent: after a call with ``adapter_names`` that raised (no memory, Ctrl-C), every
later call computes with these names, or raises ``ValueError: Length of `adapter_names` should be the same as the
number of inputs, but got 2 and 1 respectively``. The same with ``num_return_sequences``, with beams from a generation
config, and in the 26B-A4B if its router is adapted; adapted experts are ``ValueError: lora.ParamWrapper does not
support mixed adapter batches yet``. Two threads in one model get each other's adapters. Tuners without this feature,
such as IA3, give all rows the active adapter.

Cause: ``_enable_peft_forward_hooks`` puts hooks on the layers and removes them after a ``yield`` without ``finally``.
Every thread runs these hooks. They give each layer one name per row that the caller passed, whatever the layer gets.

Fix: The hooks are removed however the call ends, and act in its own thread only. In a Gemma 4 they repeat the names
as ``generate`` repeats the rows, and for the tokens of a row in router and experts. Experts compute the rows of each
adapter by themselves. A row whose adapter has no part in ``modules_to_save`` gets the base's. Where a tuner has no
such feature, names other than the active adapter's are an error. `transformers-adapter-names` does the same for
towers.

Remove when: PEFT removes these hooks in ``finally`` and gives each layer the names of what it gets.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.adapters import rows
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F119 F120", severity="wrong_result", affected=">=0.18.0", acts_on="every model", bug="issues/3475")

_NAMES, _OFFSETS = "adapter_names", "alora_offsets"
_CHECKPOINTED = "_peft_gradient_checkpointing_forward_hooks"


@PATCH.replaces("peft.tuners.lora.model", "LoraModel._enable_peft_forward_hooks")
@PATCH.replaces("peft.tuners.road.model", "RoadModel._enable_peft_forward_hooks")
@PATCH.replaces("peft.tuners.glora.model", "GloraModel._enable_peft_forward_hooks", optional=True)
def enable_hooks(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get(_NAMES) is None and kwargs.get(_OFFSETS) is None:
        return original(self, *args, **kwargs) if rows.current() is None else rows.entered(None)
    return _hooked(original, self, args, kwargs)


@contextlib.contextmanager
def _hooked(original: Original, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    names, call = kwargs.get(_NAMES), None
    if isinstance(names, (list, tuple)):
        call = rows.Call(tuner, names, args, kwargs)
        kwargs = {**kwargs, _NAMES: call.names}
        if call.model is not None:
            kwargs.pop("num_beams", None)  # PEFT would repeat the names for it
    context = original(tuner, *args, **kwargs)
    with contextlib.ExitStack() as stack:
        try:
            context.__enter__()
            stack.callback(context.__exit__, None, None, None)
            if call is not None and call.model is not None:
                stack.callback(call.model.register_forward_pre_hook(call.read, with_kwargs=True).remove)
            stack.enter_context(rows.entered(call))
            yield
        except BaseException:
            _remove(tuner, kwargs)
            raise


def _remove(tuner: Any, given: dict[str, Any]) -> None:
    """The hooks of a call that failed, and those that aLoRA keeps for a backward pass."""
    for module in tuner.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            known = getattr(hook, "keywords", None) or {}
            if any(name in known and known[name] is given.get(name) for name in (_NAMES, _OFFSETS)):
                module._forward_pre_hooks.pop(key, None)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        kept = vars(module).get(_CHECKPOINTED) if given.get(_OFFSETS) is not None else None
        while kept:
            kept.pop().remove()


@PATCH.replaces("peft.tuners.lora.model", "_adapter_names_pre_forward_hook")
@PATCH.replaces("peft.tuners.road.model", "_adapter_names_pre_forward_hook")
@PATCH.replaces("peft.tuners.glora.model", "_adapter_names_pre_forward_hook", optional=True)
def give_names(original: Original, target: Any, args: Any, kwargs: Any = None, *, adapter_names: Any) -> Any:
    call: rows.Call | None = getattr(adapter_names, "call", None)
    if call is None:
        return original(target, args, kwargs, adapter_names=adapter_names)
    if kwargs is None or rows.current() is not call:
        return None  # another thread's; torch leaves ``kwargs`` out while that thread adds or removes the hook
    names = call.of(target, args)
    known = vars(target).get("_adapters")  # of `modules_to_save` and trainable tokens
    if known is not None:
        names = [name if name in known else rows.BASE for name in names]
    return original(target, args, kwargs, adapter_names=names)


@PATCH.replaces("peft.tuners.lora.layer", "ParamWrapper.forward")
def adapted_parameter(original: Original, self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """``ParamWrapper.forward``: the experts of a Gemma 4 compute the tokens of one adapter after those of another."""
    names, call = kwargs.get(_NAMES), rows.current()
    if not names or call is None or call.model is None or len(names) != len(x) or self.disable_adapters or self.merged:
        return original(self, x, *args, **kwargs)

    others = {name: value for name, value in kwargs.items() if name != _NAMES}

    def run(places: list[int]) -> Any:
        whole = len(places) == len(x)
        own = [one if whole or not hasattr(one, "shape") else one[places] for one in (x, *args)]
        layer = copy.copy(self)  # no other thread sees which adapter is active
        layer._active_adapter = [] if call.alone == rows.BASE else [call.alone]
        return original(layer, *own, **others)

    return rows.by_adapter(call, names, run, rows.joined)


@PATCH.replaces("peft.peft_model", "PeftModel._enable_peft_forward_hooks")
def of_any_tuner(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``PeftModel._enable_peft_forward_hooks``, which tuners without ``adapter_names`` never hear of."""
    known = hasattr(self.base_model, "_enable_peft_forward_hooks") or not self.has_active_enabled_adapter
    if kwargs.get(_NAMES) is not None and not known:
        _refuse(self, kwargs[_NAMES])
    return original(self, *args, **kwargs)


@PATCH.replaces("peft.mixed_model", "PeftMixedModel.forward")
def mixed_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``PeftMixedModel.forward``, which hands the names on to a model that ignores them."""
    if kwargs.get(_NAMES) is not None:
        _refuse(self, kwargs[_NAMES])
    return original(self, *args, **kwargs)


def _refuse(model: Any, names: Any) -> None:
    active = list(model.active_adapters)
    if any([name] != active for name in names):
        raise ValueError(
            f"{type(model.base_model).__name__} takes no `adapter_names`: every row would get {active}, the active "
            "adapter. Call `set_adapter` and pass the rows of each adapter by themselves."
        )


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.load(), workspace.adapter("language"), adapter_name="one")
    expected = workspace.outputs(model)

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = model.get_output_embeddings().register_forward_pre_hook(fail)
    with contextlib.suppress(MemoryError), torch.no_grad():
        model(**workspace.inputs(), adapter_names=["__base__"])
    handle.remove()
    return Outcome.of_parity(workspace.difference(expected, model), "after a call for the base model that failed")
