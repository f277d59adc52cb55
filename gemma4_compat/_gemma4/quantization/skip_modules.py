"""Which modules are worth their bytes in high precision when the rest is quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemma4_compat._gemma4.models import build
from gemma4_compat._gemma4.quantization import config
from gemma4_compat._gemma4.quantization.bytes import linear_tensors

#: End of a module's path -> why it is worth keeping; in this order.
_REASONS = {
    "lm_head": "its error goes straight into the logits; where it is tied to the token embedding, which is not "
    "quantized, a quantized copy would only be more memory",
    "router.proj": "chooses the experts: a small error sends a token to other ones",
    "embed_vision.embedding_projection": "the one way from the vision tower into the language model",
    "embed_vision.multimodal_embedder.embedding_projection": "the one way of an image into the language model",
    "embed_vision.patch_dense": "sees the pixels: there is no tower behind it that could make up for an error",
    "embed_audio.embedding_projection": "the one way of audio into the language model",
    "per_layer_model_projection": "makes every layer's per-layer input, from the token's embedding",
    "per_layer_input_gate": "lets the per-layer input into a layer; narrow, so cheap",
    "per_layer_projection": "brings the per-layer input back into the residual stream; narrow, so cheap",
}


@dataclass(frozen=True)
class SkipModule:
    """Why a module is worth keeping, and what it costs.

    Attributes:
        reason: what its error would do.
        modules: how many there are.
        parameters: weights in all of them together.
        cost: bytes more in bf16 than quantized; 0 where the matrix is kept for another module anyway.
    """

    reason: str
    modules: int
    parameters: int
    cost: int


def quantization_skip_modules(model: Any, *, quantize: str = "4bit") -> dict[str, SkipModule]:
    """The modules worth keeping in bf16 when the rest of ``model`` is quantized, each with the reason and its cost.

    >>> keep = gemma4_compat.quantization_skip_modules("26B-A4B")
    >>> keep["router.proj"].modules
    30
    >>> options = {"bnb_4bit_compute_dtype": torch.bfloat16, "llm_int8_skip_modules": list(keep)}
    >>> config = BitsAndBytesConfig(load_in_4bit=True, **options)

    Names are those of this model only, as ``llm_int8_skip_modules`` takes them on every supported transformers. That
    list replaces upstream's own, so the head is among them. Needs torch and transformers, no weights.

    Args:
        model: a folder with a ``config.json``, the id of a cached model, a variant ("E2B", "E4B", "12B", "26B-A4B",
            "31B"), a Gemma 4 configuration, or a model (on meta is enough).
        quantize: "4bit" (nf4), "4bit-double" (nested) or "8bit"; the costs are against it.

    Returns:
        By name: the reason, how many such modules and weights there are, and the bytes that bf16 takes more.

    Raises:
        Gemma4CompatError: it is not a Gemma 4 model, or the quantization is unknown.
    """
    config.check(quantize)
    built, _, _ = build.on_meta(getattr(model, "config", model))
    linears = config.linear_names(built, ())
    kept = {id(module.weight) for name, module in built.named_modules() if name.endswith("embed_tokens")}
    found = {}
    for name, reason in _REASONS.items():
        weights = [built.get_submodule(path).weight for path in sorted(linears) if f".{path}".endswith(f".{name}")]
        if weights:
            cost = sum(_saved(weight.shape, quantize) for weight in weights if id(weight) not in kept)
            found[name] = SkipModule(reason, len(weights), sum(weight.numel() for weight in weights), cost)
    return found


def _saved(shape: Any, quantize: str) -> int:
    rows, columns = (int(side) for side in shape)
    return 2 * rows * columns - sum(linear_tensors(rows, columns, quantize))
