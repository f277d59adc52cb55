"""LoRA with target_parameters works on experts in 4 bits; a merge into them is refused.

Symptom: silent: a LoRA with ``target_parameters`` on experts quantized to 4 bits is created for the packed bytes:
its ``lora_A`` takes one value, and its ``lora_B`` returns as many as there are bytes. The first forward then raises
``ValueError: Registering a parametrization may not change the dtype of the tensor`` or ``RuntimeError: Expected
mat_a to be Float32, BFloat16 or Float16 matrix, got Byte``.

Cause: ``ParamWrapper`` reads shape and dtype off the parameter and adds to its stored contents.

Fix: For experts that this package quantized, PEFT gets the shape and dtype of their values. Its own code then adds the
LoRA delta to the dequantized values, also if the experts are offloaded; in a step of few tokens without gradients,
only to those of the experts that are hit. A merge into such experts raises an error, before anything is changed, that
says how to merge without loss. Other parameters are left to PEFT.

Remove when: PEFT adapts parameters that bitsandbytes has quantized.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.quantization import expert_forward, expert_storage, experts
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F21",
    severity="wrong_result",
    affected=">=0.18.0",
    requires="transformers>=5.5 bitsandbytes",
    needs="transformers-quantized-experts",
)


@PATCH.replaces("peft.tuners.lora.layer", "ParamWrapper.get_param")
def get_param(original: Original, self: Any) -> Any:
    module = self.get_base_layer()
    if experts.quantized_parameter(module, self.parameter_name) is None:
        return original(self)
    return expert_forward.logical(module, self.parameter_name)


@PATCH.replaces("peft.tuners.lora.layer", "ParamWrapper._activate_lora")
def activate_lora(original: Original, self: Any, active_adapters: list[str]) -> Any:
    if experts.quantized_parameter(self.get_base_layer(), self.parameter_name) is None:
        return original(self, active_adapters)
    return _activated(original, self, active_adapters)


@contextlib.contextmanager
def _activated(original: Original, wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
    """PEFT activates its adapters on a stand-in for the experts; what they add there is then added to the values."""
    import torch

    module, name = wrapper.get_base_layer(), wrapper.parameter_name
    holder: Any = torch.nn.Module()
    values = expert_forward.logical(module, name)
    holder.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_place.replaced(wrapper, "get_base_layer", lambda *_args, **_kwargs: holder))
        stack.enter_context(original(wrapper, active_adapters))
        if torch.nn.utils.parametrize.is_parametrized(holder, name):  # otherwise no adapter is active
            for add in holder.parametrizations[name]:
                stack.enter_context(expert_forward.adding(module, name, add))
        yield


@PATCH.replaces("peft.tuners.lora.layer", "ParamWrapper.merge")
def merge(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    experts.refuse_merge(self)
    original(self, *args, **kwargs)


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.merge_adapter")
def merge_adapter(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    experts.refuse_merge(self.model)
    return original(self, *args, **kwargs)


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner._unload_and_optionally_merge")
def unload_and_optionally_merge(original: Original, self: Any, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
    if merge:
        experts.refuse_merge(self.model)
    return original(self, merge, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import LoraConfig, get_peft_model

    from gemma4_compat._lab import tiny, tiny_models

    checkpoint = workspace.cached(tiny_models.build_moe_checkpoint)
    config = tiny.quantization_config("4bit-double")
    found = []
    for dequantize in (True, False):
        model = tiny.load(checkpoint, device=workspace.main)
        for module in experts.all_experts(model).values():
            expert_storage.quantize_module(module, config)
            if dequantize:
                expert_storage.dequantize_module(module)
        torch.manual_seed(0)
        lora = LoraConfig(
            r=2,
            target_modules=[],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            init_lora_weights=False,
        )
        model = get_peft_model(model, lora).eval()
        widths = {part.in_features for name, part in model.named_modules() if name.endswith("lora_A.default")}
        if 1 in widths:
            return Outcome(True, "lora_A takes one value: the adapter is made for the packed bytes of the experts")
        # A forward needs what transformers-quantized-experts replaces, which may be off here.
        layers = [part for part in model.modules() if getattr(part, "parameter_name", None) in experts.NAMES]
        found.append([(part.get_delta_weight("default"), _values(part)) for part in layers])
    differences = [float((a - b).abs().max()) for one, other in zip(*found) for a, b in zip(one[:2], other[:2])]
    return Outcome.of_parity(max(differences), "LoRA on experts in 4 bits: what is added, and the sums")


def _values(wrapper: Any) -> Any:
    """The values that the experts compute with in a forward of ``wrapper``."""
    import torch

    module, name = wrapper.get_base_layer(), wrapper.parameter_name
    with torch.no_grad(), wrapper._activate_lora(["default"]):
        return expert_forward.current(module, name)
