"""Random weights with the magnitudes of trained ones, and where float16 overflows first.

Random weights give activations of about one. Trained ones do not, and no random model shows what float16 does to them.
A rescaling multiplies some weights by a power of two and divides others by it, or relies on a norm that divides by it,
so that a chosen activation grows and the model stays the same function (in float32, apart from the ``eps`` of norms).
:data:`SAME_FUNCTION` lists those; the others change the function, and their reference is float32 with the same
weights.

Upstream is imported only inside functions, so this module may be imported first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def mlp_product(model: Any, factor: float) -> None:
    """The product of gate and up; the output of the MLP stays."""
    for layer in _layers(model):
        layer.mlp.up_proj.weight.mul_(factor)
        layer.mlp.down_proj.weight.div_(factor)


def mlp_output(model: Any, factor: float) -> None:
    """The output of the MLP, which a norm divides again."""
    for layer in _layers(model):
        layer.mlp.down_proj.weight.mul_(factor)


def mlp_gate_and_up(model: Any, factor: float) -> None:
    """Gate and up alike; another function, because the activation is not linear."""
    for layer in _layers(model):
        layer.mlp.gate_proj.weight.mul_(factor)
        layer.mlp.up_proj.weight.mul_(factor)
        layer.mlp.down_proj.weight.div_(factor * factor)


def residual(model: Any, factor: float) -> None:
    """The residual stream: everything that is added to it, against everything that reads it without a norm."""
    text = model.model.language_model
    text.embed_tokens.weight.mul_(factor)
    for name in ("embed_vision", "embed_audio"):
        embedder = getattr(model.model, name, None)
        if embedder is not None:
            getattr(embedder, "multimodal_embedder", embedder).embedding_projection.weight.mul_(factor)
    for layer in text.layers:
        layer.post_attention_layernorm.weight.mul_(factor)
        layer.post_feedforward_layernorm.weight.mul_(factor)
        if getattr(layer, "hidden_size_per_layer_input", 0):
            layer.post_per_layer_input_norm.weight.mul_(factor)
            layer.per_layer_input_gate.weight.div_(factor)
    text.norm.weight.div_(factor)  # the head is the embedding


def attention_output(model: Any, factor: float) -> None:
    """The output of attention, which a norm divides again."""
    for layer in _layers(model):
        layer.self_attn.o_proj.weight.mul_(factor)


def attention_logits(model: Any, factor: float) -> None:
    """The logits of attention; another function."""
    for layer in _layers(model):
        layer.self_attn.q_norm.weight.mul_(factor)


def per_layer_inputs(model: Any, factor: float) -> None:
    """The per-layer inputs, and their product with their gate (E2B, E4B)."""
    text = model.model.language_model
    text.embed_tokens_per_layer.weight.mul_(factor)
    text.per_layer_projection_norm.weight.mul_(factor)
    for layer in text.layers:
        layer.per_layer_projection.weight.div_(factor)


def experts_product(model: Any, factor: float) -> None:
    """The product of gate and up in the experts (26B-A4B); their output stays."""
    for layer in _layers(model):
        layer.experts.gate_up_proj[:, layer.experts.intermediate_dim :].mul_(factor)
        layer.experts.down_proj.div_(factor)


def experts_output(model: Any, factor: float) -> None:
    """The output of the experts, which a norm divides again."""
    for layer in _layers(model):
        layer.experts.down_proj.mul_(factor)


def vision_product(model: Any, factor: float) -> None:
    """The product of gate and up in the vision tower, and the bounds of its clipped linears with it."""
    for layer in model.model.vision_tower.encoder.layers:
        _scale_linear(layer.mlp.up_proj, factor, outputs=factor)
        _scale_linear(layer.mlp.down_proj, 1 / factor, inputs=factor)


def vision_residual(model: Any, factor: float) -> None:
    """The residual stream of the vision tower; the embedder's norm divides again."""
    tower = model.model.vision_tower
    tower.patch_embedder.input_proj.weight.mul_(factor)
    tower.patch_embedder.position_embedding_table.mul_(factor)
    for layer in tower.encoder.layers:
        layer.post_attention_layernorm.weight.mul_(factor)
        layer.post_feedforward_layernorm.weight.mul_(factor)
    if tower.config.standardize:
        tower.std_bias.mul_(factor)
        tower.std_scale.div_(factor)


def unified_patches(model: Any, factor: float) -> None:
    """The projection of patches (12B); a layer norm divides again."""
    for parameter in model.model.embed_vision.patch_dense.parameters():
        parameter.mul_(factor)


def audio_output(model: Any, factor: float) -> None:
    """The outputs of the audio tower's MLPs, which are clamped to the dtype's range; then a norm divides again."""
    for layer in model.model.audio_tower.layers:
        for part in (layer.feed_forward1, layer.feed_forward2):
            _scale_linear(part.ffw_layer_2, factor, outputs=factor)


def audio_residual(model: Any, factor: float) -> None:
    """The residual stream of the audio tower within a layer; the norm at the end of a layer divides again."""
    tower = model.model.audio_tower
    tower.subsample_conv_projection.input_proj_linear.weight.mul_(factor)
    last = len(tower.layers) - 1
    for index, layer in enumerate(tower.layers):
        for part in (layer.feed_forward1, layer.feed_forward2):
            part.post_layer_norm.weight.mul_(factor)
        layer.norm_post_attn.weight.mul_(factor)
        _scale_linear(layer.lconv1d.linear_end, factor, outputs=factor)
        if index < last:
            layer.norm_out.weight.mul_(factor)


#: Where the function stays the same.
SAME_FUNCTION: dict[str, Callable[[Any, float], None]] = {
    "MLP: product": mlp_product,
    "MLP: output": mlp_output,
    "residual stream": residual,
    "attention: output": attention_output,
    "per-layer inputs": per_layer_inputs,
    "experts: product": experts_product,
    "experts: output": experts_output,
    "vision: product": vision_product,
    "vision: residual stream": vision_residual,
    "vision: patches of the 12B": unified_patches,
    "audio: MLP output": audio_output,
    "audio: residual stream": audio_residual,
}
#: Where it changes.
OTHER_FUNCTION: dict[str, Callable[[Any, float], None]] = {
    "MLP: gate and up": mlp_gate_and_up,
    "attention: logits": attention_logits,
}


def applies(name: str, model: Any) -> bool:
    """Whether the model has what the rescaling of that name scales."""
    layer = _layers(model)[0]
    parts = model.model
    if name == "per-layer inputs":
        return bool(getattr(layer, "hidden_size_per_layer_input", 0))
    if name.startswith("experts"):
        return hasattr(layer, "experts")
    if name == "vision: patches of the 12B":
        return hasattr(parts.embed_vision, "patch_dense")
    if name.startswith("vision"):
        return getattr(parts, "vision_tower", None) is not None
    return not name.startswith("audio") or getattr(parts, "audio_tower", None) is not None


def rescale(model: Any, name: str, factor: float) -> Any:
    """Multiply the activation ``name`` by ``factor``, in place; returns the model.

    ``factor`` should be a power of two, with which nothing is rounded but weights below the normal numbers of float16.
    """
    import torch

    with torch.no_grad():
        (SAME_FUNCTION | OTHER_FUNCTION)[name](model, factor)
    return model


class Extremes:
    """What :func:`watch` saw.

    Attributes:
        first: the first operation whose inputs are finite and whose output is not, as "module: operation"; "backward
            of module" for a gradient. None if all outputs and gradients are finite.
        first_module: the first module that returned a value that is not finite, which is all that forward hooks show.
        largest: the largest absolute value of an operation's output, by "module: operation".
        largest_output: the largest absolute value that a module returned.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        self.first_module: str | None = None
        self.largest: dict[str, float] = {}
        self.largest_output = 0.0


#: These make infinities on purpose, for masks, or only pass values on.
_MAKERS = ("full", "fill", "scalar_tensor", "where", "empty", "new_", "zeros", "ones", "detach", "alias", "view")


@contextmanager
def watch(model: Any) -> Iterator[Extremes]:
    """Watch every operation of ``model`` in a forward or backward pass. It is slow: for tiny models."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    found = Extremes()
    stack: list[str] = []

    def floats(tree: Any) -> list[Any]:
        leaves = tree_leaves(tree)
        return [one for one in leaves if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel()]

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            outputs = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            if any(part in name for part in _MAKERS):
                return outputs
            where = f"{stack[-1] if stack else 'backward'}: {name}"
            for output in floats(outputs):
                found.largest[where] = max(found.largest.get(where, 0.0), float(output.abs().max()))
                if found.first is None and not output.isfinite().all():
                    inputs = floats((args, kwargs or {}))
                    # In place, an input is the output.
                    if all(one.isfinite().all() for one in inputs if one.data_ptr() != output.data_ptr()):
                        found.first = where
            return outputs

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: stack.append(name)

    def leave(name: str) -> Callable[..., None]:
        def left(_module: Any, _inputs: Any, outputs: Any) -> None:
            for output in floats(outputs):
                found.largest_output = max(found.largest_output, float(output.detach().abs().max()))
                if found.first_module is None and not output.isfinite().all():
                    found.first_module = name
                if output.requires_grad:
                    output.register_hook(lambda gradient: seen(name, gradient))
            stack.pop()

        return left

    def seen(name: str, gradient: Any) -> None:
        if found.first is None and not gradient.isfinite().all():
            found.first = f"backward of {name}"

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name or "model")))
        handles.append(module.register_forward_hook(leave(name or "model")))
    try:
        with Mode():
            yield found
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: Any) -> Any:
    return model.model.language_model.layers


def _scale_linear(linear: Any, factor: float, *, inputs: float = 1.0, outputs: float = 1.0) -> None:
    """Scale the weight of a linear or clipped linear, and the bounds of the latter."""
    getattr(linear, "linear", linear).weight.mul_(factor)
    for kind, by in (("input", inputs), ("output", outputs)):
        for end in ("min", "max"):
            bound = getattr(linear, f"{kind}_{end}", None)
            if bound is not None:
                bound.mul_(by)
