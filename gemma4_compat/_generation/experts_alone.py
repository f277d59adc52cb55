"""Whether experts give each token the same bits, whatever tokens a step reads beside it.

Upstream multiplies the tokens of an expert at once, and rounds each in a way that depends on the others. Experts in
4 bits that are multiplied as they are packed (:func:`packed_linear.experts_forward`) have each token by itself. Texts
that are decoded together (:mod:`continuous`) and drafts (:mod:`drafted_calls`) need that.
"""

from __future__ import annotations

import functools
from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.quantization import expert_forward, experts
from gemma4_compat._graphs import decoder, unsupported
from gemma4_compat._kernels.specs import products
from gemma4_compat._offload import model_lock
from gemma4_compat._offload.transfer import streaming


def unsupported_reason(model: Any) -> str | None:
    """Why a token's bits depend on the tokens beside it, in steps of ``products.MAX_ROWS`` tokens at most.

    It asks about the weights, adapters and settings of now, so it is to be asked for each call.

    Args:
        model: of transformers, after ``decode_fast``.

    Returns:
        None if they do not, as in a model without experts.
    """
    if not has_experts(model):
        return None
    lock = model_lock.of(model)  # another thread's forward may have the weights elsewhere
    found = _reason(model) if lock is None else lock.run(functools.partial(_reason, model))
    return found if found is None else f"experts: a token differs bitwise beside others, as {found}"


def has_experts(model: Any) -> bool:
    """Whether the layers of this model have experts."""
    return bool(getattr(model.config.get_text_config(), "enable_moe_block", False))


def _reason(model: Any) -> str | None:
    import torch

    decoding, text = decoder.of(model), model.config.get_text_config()
    if not decoding.custom:
        return "PyTorch's kernels compute it"
    given = torch.empty((products.MAX_ROWS, text.hidden_size), dtype=model.dtype, device=model.device)
    chosen = torch.zeros((products.MAX_ROWS, text.top_k_experts), dtype=torch.long, device=model.device)
    with torch.no_grad(), decoding.arithmetic(model.device, products.MAX_ROWS):
        found = (_reason_of_layer(layer, given, chosen) for layer in model.get_decoder().layers)
        return next((reason for reason in found if reason is not None), None)


def _reason_of_layer(layer: Any, given: Any, chosen: Any) -> str | None:
    module: Any = getattr(layer, "experts", None)
    if not experts.is_experts(module):
        return "the experts have an adapter or something else around them"
    if unsupported.has_own_forward(module):
        return "the experts have a forward of their own"
    if any(experts.quantized_parameter(module, name) is None for name in experts.NAMES):
        return "the experts are not in 4 bits"
    weights = module._parameters
    if module_hooks.offload_hook(module) is not None:
        group = streaming.group_of(layer)
        lookup = None if group is None or group.experts is not module or group.on_disk else group.lookup()
        if lookup is None:
            return "the experts are on disk, or in host memory that the device cannot read"
        weights = lookup.weights
    if expert_forward.multiplier(module, weights, given, chosen) is None:
        return "no kernel multiplies by the experts as they are packed"
    return None
