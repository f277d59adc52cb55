"""Weights on disk are not mistaken for each other when the embedding and its tied head are among them.

Symptom: silent: with a tied embedding and head on disk, modules compute with each other's weights. Where the shapes
differ, the forward raises ``RuntimeError: mat1 and mat2 shapes cannot be multiplied``, or from
``get_per_layer_inputs`` ``RuntimeError: shape '[1, 24, 6, 64]' is invalid for input of size 1536``.

Cause: accelerate recognizes tied weights by the address of their data (the ``tied_params_map`` that
``attach_align_device_hook_on_blocks`` passes on), even after that memory has been freed. This includes weights that
were written to disk, weights that were read from there for a forward, and (before 1.15) address 0, which every
tensor on meta has. Whatever is later loaded to such an address is taken for the tied weight.

Fix: Only addresses that stay valid are registered: those in the model and in the host's copy of its weights. A tied
weight on disk is then read once for each of its modules, like every other weight.

Remove when: accelerate forgets the address of a tied weight when its memory is freed.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from gemma4_compat._gemma4.accelerate.module_hooks import offload_hook
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F15", severity="wrong_result", affected=">=1.12", acts_on="every model", after="accelerate-nested-map")


@PATCH.replaces("accelerate.hooks", "attach_align_device_hook_on_blocks")
def attach_align_device_hook_on_blocks(original: Original, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    tied, on_host = given.get("tied_params_map"), getattr(given.get("weights_map"), "state_dict", {})
    if not tied or given.get("module_name"):
        original(*args, **kwargs)
        return
    tied.pop(0, None)
    original(*args, **kwargs)
    for address in tied.keys() - _addresses(given["module"], on_host):
        del tied[address]
    for name, module in given["module"].named_modules():
        hook = offload_hook(module)
        if hook is not None:
            hook.tied_params_names = {weight for weight in hook.tied_params_names if f"{name}.{weight}" in on_host}


def _addresses(model: Any, on_host: Mapping[str, Any]) -> set[int]:
    """Addresses of the data of the model's parameters and of the host's copies of them."""
    tensors = [*model.parameters(), *on_host.values()]
    return {tensor.data_ptr() for tensor in tensors if tensor.device.type != "meta"}


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from transformers import Gemma4ForCausalLM

    from gemma4_compat._lab import tiny_models

    checkpoint = workspace.cached(tiny_models.build_text_checkpoint)

    def load(placement: dict[str, Any]) -> Any:
        folder = workspace.new_folder()
        return Gemma4ForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16, device_map=placement, offload_folder=folder
        ).eval()

    on_disk = dict.fromkeys(["model.embed_tokens", "model.embed_tokens_per_layer", "lm_head"], "disk")
    rest = ["model.layers", "model.norm", "model.rotary_emb"]
    rest += ["model.per_layer_model_projection", "model.per_layer_projection_norm"]
    placement = {**on_disk, **dict.fromkeys(rest, workspace.main)}
    reference = workspace.outputs(load({"": workspace.main}), text_only=True)
    found = workspace.difference(reference, load(placement), text_only=True)
    if found == 0.0:
        model = workspace.dispatch_map(load({"": workspace.main}), placement)
        found = workspace.difference(reference, model, text_only=True)
        freed = model.lm_head._hf_hook.tied_params_map.keys() - _addresses(model, {})
        if freed:
            return Outcome(True, f"{len(freed)} addresses of freed memory pass for those of tied weights")
    return Outcome.of_parity(found, "embeddings and tied head on disk")
