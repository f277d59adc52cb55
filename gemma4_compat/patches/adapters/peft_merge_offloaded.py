"""Merging into offloaded layers, and undoing it, gives the same outputs as on one device.

Symptom: silent: after ``merge_adapter()`` with an offloaded layer, ``disable_adapter()``, ``set_adapter`` and
``load_adapter`` leave the adapter in the base weights; from then on its change is applied twice. With quantized layers
an error is raised after some of the layers have already been unmerged. A LoRA on ``embed_tokens`` or ``lm_head`` is
merged into only one of the two tied weights if they are separate. A layer's own ``merge()`` changes nothing, or fails,
and a later ``unmerge`` subtracts a change that was never added.

Cause: ``BaseTuner.merge_adapter`` and ``unmerge_adapter`` onload a layer (``onload_layer``). ``set_adapter``, and the
forward of a layer with disabled adapters, call its ``unmerge`` with the base weight on meta, or with a copy that the
next forward replaces. A layer's own ``merge`` also gets a weight on meta. Weights that are one parameter on one device
are two if a device map separates them, and ``onload_layer`` handles only one. ``merge_and_unload`` also calls it for
every module that only contains others, which puts the whole model on the device at once.

Fix: Every merge or unmerge, whatever calls it, onloads the layer and stores its new weight; every weight tied to it
gets the same value. Only adapter layers are onloaded, one at a time. Layers with disabled adapters are unmerged before
the model's next forward. ``merge_and_unload`` leaves ``tie_word_embeddings`` on if the two weights are still equal.

Remove when: PEFT onloads a layer, and stores its new weight, in ``merge`` and ``unmerge`` themselves, and changes tied
weights together.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma4_compat._offload.weights import merged_layers
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

if TYPE_CHECKING:
    from gemma4_compat._lab.workspace import Outputs

PATCH = Patch(
    "F39 F41",
    severity="wrong_result",
    affected=">=0.18.0",
    acts_on="every model",
    requires="accelerate",
    needs="accelerate-tied-on-disk accelerate-load-offloaded",
)

_NO_LONGER_TIED = "Input and output embeddings are no longer tied after merging"


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.merge_adapter")
def merge_adapter(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    with merged_layers.merging(self.model):
        return original(self, *args, **kwargs)


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner._unload_and_optionally_merge")
def unload_and_optionally_merge(original: Original, self: Any, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
    with merged_layers.merging(self.model, merge=merge) as pairs, warnings.catch_warnings():
        config: Any = getattr(self.model, "config", None)
        tied = merged_layers.are_tied(self.model, pairs)
        before = getattr(config, "tie_word_embeddings", None)
        if tied:  # PEFT compares the addresses of the two weights
            warnings.filterwarnings("ignore", message=_NO_LONGER_TIED)
        unloaded = original(self, merge, *args, **kwargs)
        if tied and before is not None:
            config.tie_word_embeddings = before
    return unloaded


@PATCH.replaces("peft.tuners.mixed.model", "MixedModel._unload_and_optionally_merge")
def unload_mixed_and_optionally_merge(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A mixed model has a method of its own."""
    with merged_layers.merging(self.model):
        return original(self, *args, **kwargs)


@PATCH.replaces("peft.tuners.tuners_utils", "onload_layer")
def onload_layer(original: Original, layer: Any) -> contextlib.AbstractContextManager[None]:
    onloaded = merged_layers.onload_layer(layer)
    found: contextlib.AbstractContextManager[None] = original(layer) if onloaded is None else onloaded
    return found


@PATCH.replaces("peft.tuners.tuners_utils", "check_adapters_to_merge")
def check_adapters_to_merge(original: Original, module: Any, adapter_names: list[str] | None = None) -> list[str]:
    """The first function that ``merge`` calls; it returns when no adapter is left to merge."""
    if merged_layers.is_merged_alone(module):
        frame: Any = sys._getframe(1)
        while frame and (frame.f_locals.get("self") is not module or "safe_merge" not in frame.f_locals):
            frame = frame.f_back
        if frame:  # otherwise the caller is not a merge
            merged_layers.merge_alone(module, safe_merge=frame.f_locals["safe_merge"], adapter_names=adapter_names)
            return []
    found: list[str] = original(module, adapter_names)
    return found


@PATCH.replaces("peft.tuners.osf.layer", "OSFLayer.merge", group="osf")
def merge_osf(original: Original, self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
    """Merge here, because this tuner does not call that function."""
    if merged_layers.is_merged_alone(self):
        merged_layers.merge_alone(self, safe_merge=safe_merge, adapter_names=adapter_names)
    else:
        original(self, safe_merge, adapter_names)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny_adapters

    adapter = workspace.adapter_on("language-head", rf"({tiny_adapters.TARGETS['language']}|lm_head)")
    whole = _merged(workspace, adapter)
    split = _merged(workspace, adapter, "model.language_model.layers.0", "lm_head")
    found = max(workspace.difference(first, second) for first, second in zip(whole, split))
    return Outcome.of_parity(found, "a layer and the head, offloaded, merged and unmerged")


def _merged(workspace: Workspace, adapter: Path, *offloaded: str) -> list[Outputs]:
    """Outputs with the adapter merged, then without it, then with it again."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.load(), adapter)
    if offloaded:  # after PEFT's load, which without other patches undoes a split
        placement = {"": workspace.main} | {f"base_model.model.{name}": workspace.offloaded for name in offloaded}
        model = workspace.dispatch_map(model, placement)
    model.merge_adapter()
    found = [workspace.outputs(model, text_only=True)]
    with model.disable_adapter():
        found.append(workspace.outputs(model, text_only=True))
    return [*found, workspace.outputs(model, text_only=True)]
