"""Experts can be quantized to 4 bits while loading; a load that leaves them in bf16 reports their size.

Symptom: silent: a 26B-A4B loaded "in 4 bits" takes 48.5 GB of memory; 45.7 GB of this are experts in bf16.

Cause: bitsandbytes quantizes ``nn.Linear`` modules. The experts of a layer (``Gemma4TextExperts``) are two
parameters with three dimensions.

Fix: Every load of a Gemma 4 model with bitsandbytes that leaves experts unquantized logs one line with their size.
Inside ``gemma4_compat.quantize(experts=True)``, or with ``GEMMA4_COMPAT_ENABLE=transformers-quantized-experts``, a
4-bit load also quantizes them. It quantizes each expert's matrix separately, one parameter of one layer at a time: the
bf16 values are freed before the next parameter is read. The weights are offloaded, streamed, saved and loaded like
other 4-bit weights.

Upstream's own code computes with dequantized weights: with few tokens, those of the experts that the tokens are routed
to; otherwise, those of all experts of a layer. A backward pass dequantizes them again.

The default stays. The patch is always applied, because the log line, ``quantize(experts=True)`` and a saved model with
such experts need it.

Remove when: transformers can quantize experts with bitsandbytes.
"""

import logging
from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.quantization import config as quantization_config
from gemma4_compat._gemma4.quantization import expert_forward, expert_storage, opt_in
from gemma4_compat._gemma4.quantization.bytes import stored_bytes_of
from gemma4_compat._gemma4.quantization.experts import (
    NAMES,
    all_experts,
    is_moe,
    owner_of,
    quantized_parameter,
    report,
    tail_of,
)
from gemma4_compat.patches.api import MODELING_DIFFUSION, MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F21", severity="memory", affected=">=5.5", requires="accelerate bitsandbytes")

_LOGGER = logging.getLogger("gemma4_compat")
_STORED = attached.STORED_EXPERTS


@PATCH.replaces(
    "transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer._process_model_before_weight_loading"
)
def process_model_before_weight_loading(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, model, *args, **kwargs)
    if not is_moe(model):
        if opt_in.EXPERTS.is_enabled() and not family.has_parts(model):
            _LOGGER.warning("gemma4_compat: quantize(experts=True) is not for %s", type(model).__name__)
        return result
    config = self.quantization_config
    if self.pre_quantized:
        stored = expert_storage.in_checkpoint(kwargs.get("checkpoint_files") or ())
        vars(self)[_STORED] = stored
        expert_storage.prepare(model, config, lambda name: tail_of(name) in stored, prequantized=True)
    elif opt_in.EXPERTS.is_enabled():
        chosen = quantization_config.converts(self.modules_to_not_convert)
        expert_storage.prepare(model, config, chosen, prequantized=False)
    return result


@PATCH.replaces("transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer.param_needs_quantization")
def param_needs_quantization(
    original: Callable[..., bool], self: Any, model: Any, param_name: str, **kwargs: Any
) -> bool:
    module = owner_of(model, param_name)
    if module is not None:
        return quantized_parameter(module, param_name.rpartition(".")[2]) is not None
    return original(self, model, param_name, **kwargs)


# Imported by the first load that quantizes.
@PATCH.replaces("transformers.integrations.bitsandbytes", "Bnb4bitQuantize.convert", optional=True)
def quantize(
    original: Callable[..., dict[str, Any]], self: Any, input_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    name = next(iter(input_dict))
    module = owner_of(kwargs["model"], name) if kwargs.get("model") is not None else None
    if module is None:
        return original(self, input_dict, *args, **kwargs)
    value = input_dict[name]
    value = value[0] if isinstance(value, list) else value
    like = quantized_parameter(module, name.rpartition(".")[2])
    module._is_hf_initialized = True
    return {name: expert_storage.quantized(value, like)}


@PATCH.replaces("transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer.get_weight_conversions")
def get_weight_conversions(original: Callable[..., list[Any]], self: Any) -> list[Any]:
    conversions = original(self)
    stored = vars(self).get(_STORED)
    if not stored:
        return conversions
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.bitsandbytes import Bnb4bitDeserialize

    for name in NAMES:
        if any(tail.endswith(f".{name}") for tail in stored):
            target = f"experts.{name}"
            beside = [f"{target}.{key}" for key in (*expert_storage.STORED, *expert_storage.STORED_STATES)]
            # The longest first, because older releases take the first that matches the beginning of a key.
            sources = [*sorted(beside, key=len, reverse=True), target]
            conversions.append(WeightConverter(sources, target, operations=[Bnb4bitDeserialize(self)]))
    return conversions


# Imported by the first load that quantizes.
@PATCH.replaces("transformers.integrations.bitsandbytes", "Bnb4bitDeserialize.convert", optional=True)
def deserialize(
    original: Callable[..., dict[str, Any]], self: Any, input_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    name, model = kwargs.get("full_layer_name") or "", kwargs.get("model")
    module = None if model is None else owner_of(model, name)
    if module is None or len(input_dict) == 1:
        return original(self, input_dict, *args, **kwargs)
    target = f"experts.{name.rpartition('.')[2]}"
    tensors = {
        key.removeprefix(target).removeprefix("."): value[0] if isinstance(value, list) else value
        for key, value in input_dict.items()
    }
    module._is_hf_initialized = True
    return {target: expert_storage.from_checkpoint(tensors)}


@PATCH.replaces("transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer._process_model_after_weight_loading")
@PATCH.replaces("transformers.quantizers.quantizer_bnb_8bit", "Bnb8BitHfQuantizer._process_model_after_weight_loading")
def process_model_after_weight_loading(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if family.has_parts(model):
        report(model, 4 if type(self).__name__ == "Bnb4BitHfQuantizer" else 8)
    return original(self, model, *args, **kwargs)


@PATCH.replaces("transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer._dequantize")
def dequantize(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    model = original(self, model, *args, **kwargs)
    for module in all_experts(model).values():
        expert_storage.dequantize_module(module, kwargs.get("dtype"))
    return model


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextExperts.forward")
@PATCH.replaces(MODELING_DIFFUSION, "DiffusionGemmaTextExperts.forward", group="diffusion_gemma")
def experts_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    return expert_forward.forward(original, self, *args, **kwargs)


def by_hand(model: Any, quantization: str) -> Any:
    """``model``, after each matrix of its unquantized experts was quantized separately and dequantized again."""
    import torch
    from bitsandbytes import functional

    parameters = [module.get_parameter(name) for module in all_experts(model).values() for name in NAMES]
    with torch.no_grad():
        for parameter in {id(parameter): parameter for parameter in parameters}.values():  # some are shared
            for matrix in parameter:
                packed = functional.quantize_4bit(
                    matrix.contiguous(), quant_type="nf4", compress_statistics=quantization == "4bit-double"
                )
                matrix.copy_(functional.dequantize_4bit(*packed))
    return model


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny, tiny_models

    checkpoint = workspace.cached(tiny_models.build_moe_checkpoint)
    found = []
    for quantization in ("4bit-double", "4bit"):
        with opt_in.EXPERTS.enabled():
            model = tiny.load(checkpoint, quantization, device=workspace.main, skip_modules=["router.proj"])
        experts = [weight for module in all_experts(model).values() for weight in module.parameters()]
        plain = sum(weight.nbytes for weight in experts if weight.is_floating_point())
        if plain:
            total = stored_bytes_of(model)
            return Outcome(True, f"experts: {plain} of the {total} bytes of a 4-bit model are in bf16")
        reference = tiny.load(checkpoint, quantization, device=workspace.main, skip_modules=["router.proj"])
        outputs = [workspace.outputs(one, text_only=True) for one in (by_hand(reference, quantization), model)]
        found.append(workspace.difference(*outputs))
    return Outcome.of_parity(max(found), "experts in 4 bits, single and double quantization")
