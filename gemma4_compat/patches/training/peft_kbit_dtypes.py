"""Preparing a quantized model for k-bit training casts its norms, not its embeddings and experts.

Symptom: silent: ``prepare_model_for_kbit_training`` makes a quantized model larger. The per-layer embedding becomes
float32 (E2B: 4.7 GB more, E4B: 5.6 GB), and so do the token embedding, the experts and every layer that was left
unquantized.

Cause: ``prepare_model_for_kbit_training`` casts every bfloat16 or float16 parameter that is not a ``Params4bit`` to
float32. These casts only work all together: a float32 embedding makes every activation float32, and then every
unquantized layer must also be float32. For an offloaded weight it casts the placeholder on meta, whose dtype from then
on differs from that of the stored weight.

Fix: In a quantized bfloat16 Gemma 4 model the patch casts only the norms, as documented. The embeddings, the head
(tied to the embedding, or computing on bfloat16 states), the experts and unquantized layers keep their dtype: the
model computes in bfloat16 as it does without the preparation, bit for bit. This is safe because Gemma 4's norms
compute in float32 whatever their dtype. For an offloaded norm, the stored weight is also cast.

A float16 model needs float32 between its layers and gets it; only its per-layer embedding keeps float16. Freezing and
gradient checkpointing stay upstream's, and so does the preparation of models that have another architecture or are
quantized neither with bitsandbytes nor by layers that stay packed (``transformers-packed-layers``).

Remove when: PEFT casts norms only.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.quantization.other_quantizers import is_packed
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F20", severity="memory", affected=">=0.18.0")

_PER_LAYER = "embed_tokens_per_layer"


@PATCH.replaces("peft.utils.other", "prepare_model_for_kbit_training")
def prepare_model_for_kbit_training(original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
    if not family.has_parts(model) or not _is_quantized(model):
        return original(model, *args, **kwargs)
    with _uncast_hidden(model):
        prepared = original(model, *args, **kwargs)
    _cast_offloaded_norms(model)
    return prepared


def _is_quantized(model: Any) -> bool:
    of_bitsandbytes = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    return bool(of_bitsandbytes) or any(is_packed(module) for module in model.modules())


@contextlib.contextmanager
def _uncast_hidden(model: Any) -> Iterator[None]:
    """Inside, the model hides the parameters that keep their dtype; they are frozen."""
    import torch

    def is_kept(name: str, module: Any, weight: Any) -> bool:
        if weight.dtype == torch.float16:
            return name.endswith(_PER_LAYER)
        return weight.dtype == torch.bfloat16 and (not _is_norm(module) or weight.device.type == "meta")

    hidden: list[tuple[Any, str, Any]] = []
    for name, module in model.named_modules():
        for own, weight in module._parameters.items():
            if weight is not None and is_kept(name, module, weight):
                weight.requires_grad = False
                hidden.append((module, own, weight))
    for module, own, _ in hidden:
        module._parameters[own] = None  # the name stays, so the order does too
    try:
        yield
    finally:
        for module, own, weight in hidden:
            module._parameters[own] = weight


def _cast_offloaded_norms(model: Any) -> None:
    import torch

    for module in model.modules():
        if _is_norm(module) and module_hooks.is_offloaded(module) and module.weight.dtype == torch.bfloat16:
            with module_hooks.weights_brought_in(module):
                module.weight.data = module.weight.data.to(torch.float32)


def _is_norm(module: Any) -> bool:
    """Whether this is one of Gemma 4's norms, or a copy of them, which return the dtype of their input."""
    name = type(module).__name__
    return name.endswith("RMSNorm") and (name.startswith("Gemma4") or hasattr(module, "with_scale"))


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import prepare_model_for_kbit_training

    found = []
    for model in (workspace.load("4bit"), workspace.split("4bit")):
        inner = model.model.language_model
        per_layer = getattr(inner, _PER_LAYER, None)  # None for a variant without one
        kind, embedding = (
            ("embedding", inner.embed_tokens) if per_layer is None else ("per-layer embedding", per_layer)
        )
        before = sum(weight.nbytes for weight in model.parameters())
        reference = workspace.outputs(model, text_only=True)
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        after = sum(weight.nbytes for weight in model.parameters())
        if embedding.weight.dtype != torch.bfloat16:
            return Outcome(
                True, f"the {kind} is {embedding.weight.dtype}; the model has {after / before:.1f} its bytes"
            )
        found.append(workspace.difference(reference, model, text_only=True))
    return Outcome.of_parity(max(found), "prepared 4-bit models, one of them split")
