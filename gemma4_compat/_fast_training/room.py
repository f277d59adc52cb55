"""Whether a training step fits into the memory that is free, by a formula. Plans run the step's code instead."""

from __future__ import annotations

from typing import Any

from gemma4_compat._accelerate import module_hooks
from gemma4_compat._common.text import size_text
from gemma4_compat._decoding import prompts
from gemma4_compat._fast_training import layers
from gemma4_compat._models import walk
from gemma4_compat._training import mlp

#: Bytes that have to stay free: neither fragmentation nor what kernels use internally is counted. As in plans.
MARGIN = 1 << 29
#: Bytes of a token in the layer that goes backward, in 16 bits: for each unit of its MLP, of its hidden states, and of
#: the per-layer inputs of all layers. Fitted to steps that plans ran (tests/unit/fast_training/test_parts.py).
_OF_MLP, _OF_HIDDEN, _OF_PER_LAYER = 14, 52, 7


def asks_for_pieces(model: Any, tokens: int) -> tuple[bool, str]:
    """Whether MLPs should be computed in pieces in steps of so many tokens; and why not."""
    if tokens <= mlp.TOKENS:
        return False, f"{tokens:,} tokens are one piece"
    layer = layers.decoder_layers(model)[0]
    device = module_hooks.hook_device(layer.input_layernorm) or layer.input_layernorm.weight.device
    if device.type != "cuda":
        return False, f"the model is on {device}"
    needed, free = step(model, tokens), prompts.free(device) or 0
    if needed + MARGIN <= free:
        return False, f"a step of {tokens:,} tokens takes about {size_text(needed)}, and {size_text(free)} are free"
    return True, ""


def step(model: Any, tokens: int) -> int:
    """Bytes of a step with checkpointing: checkpoints, the widest layer, gradients and Adam's states."""
    found = layers.decoder_layers(model)
    hidden, per_layer = found[0].hidden_size, getattr(found[0], "hidden_size_per_layer_input", 0) or 0
    of_layer = _OF_MLP * max(layer.mlp.gate_proj.out_features for layer in found) + _OF_HIDDEN * hidden
    of_token = len(found) * (2 * hidden + _OF_PER_LAYER * per_layer) + of_layer
    trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    item = int(walk.unwrapped(model).dtype.itemsize)
    return tokens * int(of_token) * item // 2 + 3 * int(trained)
