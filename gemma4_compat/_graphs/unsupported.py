"""Why the step of a model cannot be captured: where its Python has to run for every token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.attention import flash
from gemma4_compat._gemma4.models import walk
from gemma4_compat._gemma4.state import checkpointing
from gemma4_compat._graphs.guards import torch_hooks
from gemma4_compat._offload import host_memory
from gemma4_compat._offload.transfer import row_lookup, streaming

#: Parts that a step without images or audio does not run.
_MEDIA = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder", "audio_embedder")
#: Arguments of PEFT's hooks that choose adapters for one call.
_CHOSEN = {"adapter_names", "alora_offsets"}
#: Libraries whose hooks do the same for every token.
_LIBRARIES = ("gemma4_compat", "transformers", "accelerate", "peft", "bitsandbytes", "torch", "trl")


def modules_of_a_step(model: Any) -> list[Any]:
    """The model and every module in it that may run in a step, outside towers and their embedders."""
    found: list[Any] = []

    def visit(module: Any) -> None:
        found.append(module)
        for name, child in module.named_children():
            if name not in _MEDIA:
                visit(child)

    visit(model)
    return list(dict.fromkeys(found))


def unsupported_reason(model: Any, modules: list[Any], rows: int = 0) -> str | None:
    """The first reason why this model cannot replay its steps; None if nothing is known to be in the way.

    Args:
        model: a transformers model that has run a forward.
        modules: from :func:`modules_of_a_step`.
        rows: that the head computes, if that is known.
    """
    found = (
        training_reasons(model, modules),
        _lasting_reasons(modules),
        _offload_reasons(model, modules, rows),
        hook_reasons(model, modules),
    )
    return next(itertools.chain(*found), None)


def training_reasons(model: Any, modules: list[Any]) -> Iterator[str]:
    """What modules in training mode would compute otherwise: rollouts of a trainer usually have nothing of it."""
    for module in modules:
        if module.training:
            found = only_in_training(module)
            if found:
                yield f"{_name(model, module)} is in training mode (model.eval() ends it), {found}"


def only_in_training(module: Any, *, decodes: bool = True) -> str:
    """What a module does in training mode only; empty if nothing.

    Args:
        module: to look at.
        decodes: with a cache, which checkpointing drops before transformers 5.24.
    """
    import torch

    kind = type(module)
    library, *parts = kind.__module__.split(".")
    if library not in _LIBRARIES:
        return f"which {kind.__qualname__} may heed"
    if library == "peft" and parts[0] == "tuners" and parts[1:2] not in (["lora"], ["tuners_utils"]):
        return f"which {kind.__qualname__} of PEFT may heed"
    if isinstance(module, (torch.nn.modules.batchnorm._BatchNorm, torch.nn.RReLU)):
        return f"where {kind.__qualname__} computes otherwise"
    for name, value in vars(module).items():
        if decodes and name == checkpointing.FLAG and value and checkpointing.drops_cache(module):
            return "with gradient checkpointing, which drops the cache before transformers 5.24"
        if _draws(name, value) or (name == "p" and isinstance(module, torch.nn.modules.dropout._DropoutNd) and value):
            return f"and {name} is {value}: tokens are drawn with dropout"
    variants = getattr(module, "lora_variant", None) or {}
    unknown = [type(one).__name__ for one in variants.values() if not type(one).__name__.startswith("Dora")]
    return f"which {unknown[0]} of PEFT may heed" if unknown else ""


def _draws(name: str, value: Any) -> bool:
    """Whether an attribute is a probability or a strength of noise that is not 0."""
    return ("dropout" in name or "jitter" in name) and isinstance(value, (int, float)) and value > 0


def prompt_reasons(model: Any) -> Iterator[str]:
    """Why a prompt is not to be read in buckets: somebody may look at what its forwards compute."""
    modules = modules_of_a_step(model)
    for module in modules:
        if has_own_forward(module):
            yield f"{_name(model, module)} has a forward of its own"
    yield from training_reasons(model, modules)
    yield from hook_reasons(model, modules)


def lasting_reason(model: Any) -> str | None:
    """The first lasting reason that is known before a forward: 8-bit weights, weights on disk, devices."""
    modules = modules_of_a_step(model)
    return next(itertools.chain(_lasting_reasons(modules), _disk_reasons(model, modules)), None)


def virtual_tokens_reason(model: Any) -> str | None:
    """Why PEFT refuses a static cache in the ``generate`` that is running; None if it does not."""
    caller = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", model)
    config = None if caller is model else getattr(caller, "active_peft_config", None)
    if config is None or not config.is_prompt_learning:
        return None
    return f"PEFT takes no static cache with virtual tokens ({config.peft_type.value})"


def chooses_adapters(model: Any) -> bool:
    """Whether PEFT has put hooks there for one ``generate``, which choose the adapters of its rows or tokens."""
    hooks = (hook for module in walk.modules(model) for hook in vars(module)["_forward_pre_hooks"].values())
    return any(not _CHOSEN.isdisjoint(getattr(hook, "keywords", ())) for hook in hooks)


def _lasting_reasons(modules: list[Any]) -> Iterator[str]:
    if any(map(is_8_bit, modules)):
        yield "8-bit layers of bitsandbytes synchronize with the host for every token"
    devices = _devices(modules)
    if len(devices) > 1:
        yield f"it computes on several devices ({', '.join(sorted(map(str, devices)))})"


def hook_reasons(model: Any, modules: list[Any], *, backward: bool = False) -> Iterator[str]:
    """The hooks on these modules, or on all, that are not a library's own: their Python is to run in every step."""
    for hooks in torch_hooks.on_every_module(backward=backward):
        for function in itertools.filterfalse(_is_known, hooks.values()):
            yield f"a hook on every module has to run for every token ({_text(function)})"
    for module in modules:
        for function in users_hooks(module):
            yield f"a hook on {_name(model, module)} has to run for every token ({_text(function)})"


def users_hooks(module: Any) -> Iterator[Callable[..., Any]]:
    """The hooks of a module that are not a library's own."""
    return itertools.filterfalse(_is_known, _hooks(module))


def is_8_bit(module: Any) -> bool:
    """Whether bitsandbytes computes a module in 8 bits, for which it waits for the device."""
    if type(module).__name__ == "Linear8bitLt":
        return True
    return any(type(parameter).__name__ == "Int8Params" for parameter in module._parameters.values())


def _devices(modules: list[Any]) -> dict[Any, None]:
    found: dict[Any, None] = {}
    for module in modules:
        where = module_hooks.execution_device(module)
        if where is not None:
            found[where] = None
            continue
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.device.type != "meta":
                found[tensor.device] = None
    return found


def _disk_reasons(model: Any, modules: list[Any]) -> Iterator[str]:
    for module in modules:
        hook = module_hooks.offload_hook(module)
        for name, parameter in module._parameters.items() if hook is not None else ():
            if parameter is not None and host_memory.stored(hook.weights_map, name).on_disk:
                yield _reads_disk(model, module)


def _reads_disk(model: Any, module: Any) -> str:
    return f"{_name(model, module)} is on disk, and the host reads it for every token"


def _offload_reasons(model: Any, modules: list[Any], rows: int) -> Iterator[str]:
    streamed = streaming.streamed_modules(model)
    for module in modules:
        if not _are_there(module._parameters):
            kind = type(module._parameters).__name__
            yield f"the weights of {_name(model, module)} come out of a {kind} for every token"
        hook = module_hooks.offload_hook(module)
        if hook is None or not any(tensor is not None for tensor in module._parameters.values()):
            continue
        where = streamed.get(module)
        lookup = row_lookup.known(hook, rows)
        if where is None and lookup is not None:
            where = "in place" if lookup.in_place else "rows"
        if where == "disk":
            yield _reads_disk(model, module)
        elif where == "rows":
            yield f"the rows of {_name(model, module)} are gathered by the host, since its memory is not pinned"
        elif where is None:
            yield f"{_name(model, module)} is offloaded as a whole and copied by accelerate's hook for every token"


def _are_there(tensors: Any) -> bool:
    """Whether a module's own tensors are used where they are. A cache of compressed-tensors may copy them."""
    here = getattr(tensors, "onload_device", None)
    return isinstance(tensors, dict) or (here is not None and here == getattr(tensors, "offload_device", None))


def _hooks(module: Any) -> Iterator[Callable[..., Any]]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def has_own_forward(module: Any) -> bool:
    """Whether a module of a model has a ``forward`` of its own that is not a library's: a spy, a replacement."""
    own = in_place.own(module, "forward")
    found = [*in_place.replacements(vars(module).get("forward")), *([] if own is in_place.ABSENT else [own])]
    return not all(map(_is_of_a_library, found))


def foreign_reason(layer: Any) -> str | None:
    """Why kernels may read tensors of a layer unseen, by their addresses, in training; None if only libraries' Python
    computes it.
    """
    implementation = layer.self_attn.config._attn_implementation
    if implementation not in flash.PLAIN:
        return f"kernels of {implementation} attention read tensors unseen"
    for module in layer.modules():
        if not _is_of_a_library(type(module).forward):
            return f"{_text(type(module).forward)} is not of a library"
    return None


def _is_of_a_library(forward: Any) -> bool:
    function = getattr(forward, "func", forward)  # of a functools.partial
    function = getattr(function, "__func__", function)
    origin = getattr(function, "__globals__", {}).get(
        "__name__", type(function).__module__
    )  # ``wraps`` copies __module__
    return str(origin).partition(".")[0] in _LIBRARIES


def _is_known(function: Any) -> bool:
    return str(_origin(function)).partition(".")[0] in _LIBRARIES


def _origin(function: Any) -> str:
    inner = getattr(function, "func", function)  # of a functools.partial
    inner = getattr(inner, "__wrapped__", inner)
    return getattr(inner, "__module__", None) or type(inner).__module__


def _text(function: Any) -> str:
    inner = getattr(function, "func", function)
    return f"{_origin(function)}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def _name(model: Any, module: Any) -> str:
    return next((name for name, other in model.named_modules() if other is module), "") or type(module).__name__
