"""Adapters of a model with offloaded layers can be prepared for hot swapping.

Symptom: ``RuntimeError: Tensor on device meta is not on the expected device cpu!`` (or the GPU) from the first forward
after ``prepare_model_for_compiled_hotswap`` of a model with offloaded layers.

Cause: PEFT turns the scaling of each LoRA into a tensor on the device of the layer's weight. For an offloaded layer
that is meta, so the number is lost.

Fix: During that call, the weights of offloaded layers report the device where their layers compute.

Remove when: in all supported releases PEFT puts these tensors on the device of the adapter's own weights.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat.patches.api import Outcome, Patch, Workspace

PATCH = Patch("F103", severity="crash", affected=">=0.18.0", acts_on="every model")


@PATCH.replaces("peft.utils.hotswap", "_convert_scalings_to_tensor")
def convert_scalings(original: Callable[..., bool], model: Any) -> bool:
    with contextlib.ExitStack() as stack:
        for module in walk.modules(model):
            if module_hooks.is_offloaded(module):
                stack.enter_context(module_hooks.seen_on_execution_device(module))
        return original(model)


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap

    from gemma4_compat._lab import tiny_adapters

    def prepared(model: Any) -> Any:
        torch.manual_seed(0)
        tuned = get_peft_model(model, LoraConfig(target_modules=tiny_adapters.SOME_LINEARS, init_lora_weights=False))
        prepare_model_for_compiled_hotswap(tuned, target_rank=8)
        return workspace.outputs(tuned)

    found = workspace.difference(prepared(workspace.load()), prepared(workspace.split()))
    return Outcome.of_parity(found, "a split model prepared for hot swaps")
