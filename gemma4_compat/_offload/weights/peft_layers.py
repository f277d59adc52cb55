"""PEFT on offloaded layers, whose weights are on meta between two forwards; accelerate onloads them for each.

Replacements for the patch peft-keep-dispatch. It keeps the base model dispatched, and PEFT reads ``base_layer.weight``
at any time:

* Code that only reads the weight's device (to put an adapter there) finds the execution device.
* Code that reads, copies or changes the weight while it creates an adapter finds the weight, and its changes are kept.
* Layers that read the weight in their own forward, outside the base layer's, have it for the whole forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat._offload.weights import stored_weights, tied_pairs

#: Fields of a LoRA config with which a layer only adds to the output of its base layer. Any other field that differs
#: from its default may make the layer read the base weight.
_ADDITIVE_FIELDS = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_bias", "lora_dropout"),
    *("modules_to_save", "peft_type", "peft_version", "r", "rank_pattern", "revision", "runtime_config"),
    *("target_modules", "task_type", "trainable_token_indices", "use_rslora"),
}
_ADDITIVE_INITS = (True, False, "gaussian", "orthogonal")
_ONLOADED, _REGISTERED = attached.ONLOADED, attached.ONLOADS


def replace_module(
    original: Callable[..., None], self: Any, parent: Any, child_name: str, new_module: Any, child: Any
) -> None:
    with module_hooks.seen_on_execution_device(walk.innermost(child)):
        original(self, parent, child_name, new_module, child)


def move_adapter_to_device_of_base_layer(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    with module_hooks.seen_on_execution_device(self.get_base_layer()):
        original(self, *args, **kwargs)


def modules_to_save_update(
    original: Callable[..., None], self: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    for module in self.original_module.modules():
        module_hooks.offload_tied(module)
    offloaded = [module for module in self.original_module.modules() if module_hooks.is_offloaded(module)]
    if not offloaded or adapter_name in self.modules_to_save:
        original(self, adapter_name, *args, **kwargs)
        return
    # The copy must hold real values and must not be offloaded itself, because it is trained. So upstream copies a
    # module with its weights and without hooks; the copy gets a hook that only moves inputs.
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    devices = {module: module_hooks.execution_device(module) for module in offloaded}
    with contextlib.ExitStack() as stack:
        for module in offloaded:
            stack.enter_context(module_hooks.weights_brought_in(module))
        stack.enter_context(module_hooks.hooks_off(self.original_module.modules()))
        original(self, adapter_name, *args, **kwargs)
    pairs = zip(self.original_module.modules(), self.modules_to_save[adapter_name].modules())
    for module, copied in list(pairs):
        if module in devices:
            add_hook_to_module(copied, AlignDevicesHook(execution_device=devices[module]))


def trainable_tokens_update_layer(
    original: Callable[..., None], self: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    base = self.get_base_layer()
    module_hooks.offload_tied(base)
    with module_hooks.weights_brought_in(base):  # its rows are copied
        original(self, adapter_name, *args, **kwargs)
    if module_hooks.offload_hook(base) is not None:
        keep_onloaded_for_whole_forward(self)  # it computes with the weight, not with the base layer


def trainable_tokens_mixed_batch(
    original: Callable[..., Any], self: Any, x: Any, active_adapter: str, *args: Any, **kwargs: Any
) -> Any:
    """The part of a batch with an adapter; upstream does not call the layer's forward here, so no hook of it runs."""
    base = self.token_adapter.get_base_layer()
    hook = module_hooks.offload_hook(base)
    if hook is None or not module_hooks.is_offloaded(base):
        return original(self, x, active_adapter, *args, **kwargs)
    hook.pre_forward(base)
    try:
        return original(self, x, active_adapter, *args, **kwargs)
    finally:
        hook.post_forward(base, None)


def inject_adapter(
    original: Callable[..., Any], self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    config = self.peft_config[adapter_name]
    _refuse_offloaded_biases(config, model)
    # Not `is_offloaded`: accelerate leaves one of two tied weights on the device until the first forward of its
    # module.
    if _is_additive(config) or not any(module_hooks.offload_hook(module) for module in walk.modules(model)):
        return original(self, model, adapter_name, *args, **kwargs)
    # This adapter may read (DoRA), copy (LN tuning) or change (PiSSA) the base weight, on creation and later.

    def create_with_weights(
        create: Any, config: Any, name: str, target: Any, target_name: str, parent: Any, *rest: Any, **kw: Any
    ) -> None:
        base = walk.innermost(target)
        module_hooks.offload_tied(base)
        offloaded = module_hooks.offload_hook(base) is not None
        with _tied_weights_changed_too(model, base), module_hooks.weights_brought_in(base):
            create(config, name, target, target_name, parent, *rest, **kw)
        if offloaded:
            keep_onloaded_for_whole_forward(getattr(parent, target_name))

    with in_place.replaced(self, "_create_and_replace", create_with_weights):
        return original(self, model, adapter_name, *args, **kwargs)


@contextlib.contextmanager
def _tied_weights_changed_too(model: Any, base: Any) -> Iterator[None]:
    """Inside, the weights of ``base`` may get other values; afterwards weights tied to them also have these.

    On one device they are one parameter, which PEFT changes (OLoRA and PiSSA on the head, for example).
    """
    mine = [
        place for pair in tied_pairs.tied(model) if stored_weights.is_same(*pair) for place in pair if place[0] is base
    ]
    yield
    for place in dict.fromkeys(mine):
        tied_pairs.pass_on(model, place)


def _is_additive(config: Any) -> bool:
    """Whether this adapter neither reads nor changes base weights, so that nothing has to be onloaded for it."""
    if type(config).__name__ != "LoraConfig" or config.init_lora_weights not in _ADDITIVE_INITS:
        return False
    for field in dataclasses.fields(config):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(config, field.name)
        if field.name not in _ADDITIVE_FIELDS and field.name != "init_lora_weights" and value and value != default:
            return False
    return True


def are_additive(model: Any) -> bool:
    """Whether no adapter of a model reads base weights, in a forward of its layer or elsewhere."""
    return all(_is_additive(config) for config in (getattr(model, "peft_config", None) or {}).values())


def keep_onloaded_for_whole_forward(layer: Any) -> None:
    """Keep the weights of the offloaded base layer onloaded as long as the forward of ``layer`` runs."""
    if not vars(layer).get(_REGISTERED):
        layer.register_forward_pre_hook(_onload)
        layer.register_forward_hook(_offload, always_call=True)
        vars(layer)[_REGISTERED] = True


def _onload(layer: Any, _inputs: Any) -> None:
    base = walk.innermost(layer)
    hook = module_hooks.offload_hook(base)
    # Otherwise it is not offloaded any more, or has been onloaded by a layer around this one or by its module group.
    if hook is not None and module_hooks.is_offloaded(base):
        hook.pre_forward(base)
        hook.offload = False  # the base layer's own forward leaves the weights in place
        vars(layer)[_ONLOADED] = hook


def _offload(layer: Any, _inputs: Any, _output: Any) -> None:
    hook = vars(layer).pop(_ONLOADED, None)
    if hook is not None:
        hook.offload = True
        hook.post_forward(walk.innermost(layer), None)


def _refuse_offloaded_biases(config: Any, model: Any) -> None:
    if getattr(config, "bias", "none") in ("none", None):
        return
    for name, module in model.named_modules():
        if module_hooks.is_offloaded(module) and vars(module)["_parameters"].get("bias") is not None:
            raise Gemma4CompatError(
                f"bias={config.bias!r} trains biases of the base model, and that of {name!r} is offloaded: it would "
                "neither learn nor load. Use bias='none', or a device_map that keeps the module on its device."
            )
