"""Adapters that are disabled and enabled again are as trainable as before.

Symptom: silent: after ``with model.disable_adapter()``, or transformers' ``disable_adapters()`` and
``enable_adapters()``, the weights of an adapter loaded for inference have ``requires_grad=True``. An
optimizer that is made then trains them: the reference of DPO, or an adapter that was frozen on purpose.

Cause: ``BaseTunerLayer.enable_adapters(True)`` calls ``set_adapter``, which makes every weight of the active adapters
trainable. What was trainable before they were disabled is not remembered.

Fix: A layer that is disabled remembers ``requires_grad`` of each of its adapter's weights, and has it back when it is
enabled, also if an error came in between. If ``set_adapter`` was called meanwhile, what that says holds.

Remove when: PEFT keeps ``requires_grad`` while adapters are disabled.
"""

import functools
import weakref
from collections.abc import Iterator
from typing import Any

from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F121", severity="wrong_result", affected=">=0.18.0", acts_on="every model", bug="issues/3447")

#: Disabled layer, or one that was enabled again -> whether each weight was trainable, by name.
_before: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], bool]] = weakref.WeakKeyDictionary()


@functools.cache
def _disabled() -> Any:
    """The trainable weights that a layer has disabled. Another layer may share them."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTunerLayer.enable_adapters")
@PATCH.replaces("peft.tuners.ln_tuning.layer", "LNTuningLayer.enable_adapters")
@PATCH.replaces("peft.utils.other", "ModulesToSaveWrapper.enable_adapters")
def enable_adapters(original: Original, self: Any, enabled: bool) -> None:
    flags = _before.get(self)
    if not enabled:
        if flags is None or not self._disable_adapters:
            disabled = _disabled()
            _before[self] = {name: weight.requires_grad or weight in disabled for name, weight in _weights(self)}
            disabled.update((weight, True) for _, weight in _weights(self) if weight.requires_grad)
        original(self, enabled)
        return
    if flags is not None and not self._disable_adapters:  # enabled twice, as PEFT's wrappers do
        flags = {name: weight.requires_grad for name, weight in _weights(self)}
    original(self, enabled)
    if flags is None:
        return
    _before[self] = flags  # `set_adapter` has removed it
    for name, weight in _weights(self):
        _disabled().pop(weight, None)
        if name in flags and weight.is_leaf:
            weight.requires_grad_(flags[name])


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTunerLayer.set_adapter")
@PATCH.replaces("peft.utils.other", "ModulesToSaveWrapper.set_adapter")
def set_adapter(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """From here on, what this call says holds."""
    if _before.pop(self, None) is not None:
        for _, weight in _weights(self):
            _disabled().pop(weight, None)
    original(self, *args, **kwargs)


def _weights(layer: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The weights of a layer's adapters, with their names: the attribute, the adapter, and the name in its module."""
    import torch

    for attribute in layer.adapter_layer_names:
        for adapter, value in getattr(layer, attribute).items():
            if isinstance(value, torch.Tensor):
                yield (attribute, adapter), value
            else:
                yield from (((attribute, adapter, name), weight) for name, weight in value.named_parameters())


def reproduce(workspace: Workspace) -> Outcome:
    from peft import PeftModel

    found = {}
    for trainable in (False, True):
        model = PeftModel.from_pretrained(workspace.load(), workspace.adapter("language"), is_trainable=trainable)
        before = {name: weight.requires_grad for name, weight in model.named_parameters()}
        with model.disable_adapter():
            pass
        found[trainable] = [name for name, weight in model.named_parameters() if weight.requires_grad != before[name]]
    changed = found[False] + found[True]
    if not changed:
        return Outcome(False, "after disable_adapter() the same weights are trainable as before")
    return Outcome(True, f"after disable_adapter() {len(found[False])} weights of a frozen adapter are trainable")
