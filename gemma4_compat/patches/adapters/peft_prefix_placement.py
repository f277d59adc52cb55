"""Prefix tuning works on a model with several devices.

Symptom: ``AttributeError: 'Gemma4Config' object has no attribute 'num_hidden_layers'`` from a forward of a model with
prefix tuning whose device map has several entries.

Cause: PEFT moves the prefix of each layer to the device of that layer. It reads ``num_hidden_layers``, which a
multimodal config lacks, and matches map entries by layer number, which also matches the towers' layers. A text model
whose layers share keys and values raises ``AttributeError`` or ``IndexError``, because these layers have none in the
cache; a map without a GPU raises ``StopIteration``.

Fix: The prefix of each layer goes to where that layer's attention computes.

Remove when: PEFT finds the layers of a Gemma 4, and those without a prefix, in all supported releases.
"""

from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F76", severity="crash", affected=">=0.20.0")


@PATCH.replaces("peft.utils.integrations", "map_cache_to_layer_device_map")
def map_cache(original: Original, model: Any, cache: Any) -> None:
    import transformers

    known = family.is_gemma4(model) and isinstance(cache, transformers.DynamicCache)
    if not known or not hasattr(model, "hf_device_map"):
        original(model, cache)
        return
    # Layers that share an earlier layer's keys and values are at the end; a cache may leave them out.
    for layer, kept in zip(model.get_decoder().layers, cache.layers):
        if getattr(kept, "keys", None) is not None:
            kept.device = _attention_device(layer)
            kept.keys, kept.values = kept.keys.to(kept.device), kept.values.to(kept.device)


def _attention_device(layer: Any) -> Any:
    projection = layer.self_attn.q_proj  # every layer has this one
    device = module_hooks.hook_device(projection)
    return projection.weight.device if device is None else device


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import PrefixTuningConfig, get_peft_model

    from gemma4_compat._lab import tiny

    def tuned(*, split: bool) -> Any:
        model = workspace.load()
        if split:  # a CPU named like this in a map computes, as a GPU does
            main = torch.device(workspace.main)
            placement = tiny.device_map(model, "both", main=main, offloaded=workspace.offloaded)
            model = workspace.dispatch_map(model, placement)
        torch.manual_seed(0)
        return get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()

    try:
        expected = workspace.outputs(tuned(split=False), text_only=True)
    except RuntimeError as error:  # a PEFT that does not support layers of several widths
        return Outcome(False, f"this release of PEFT has no prefix for such layers: {error}", applicable=False)
    found = workspace.outputs(tuned(split=True), text_only=True)
    return Outcome.of_parity(workspace.difference(expected, found), "prefix tuning on a split model")
