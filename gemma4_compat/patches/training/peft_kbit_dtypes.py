"""silent: ``prepare_model_for_kbit_training`` makes a quantized model grow: the per-layer embedding becomes float32
(E2B: 4.7 GB more, E4B: 5.6 GB), and with it the embedding, experts and every layer that was left unquantized.

Why: it casts whatever is bfloat16 or float16 and not a ``Params4bit``. Only all of that together works: with the
embedding, everything that is computed is float32, and an unquantized layer has to be. Of an offloaded weight it casts
the stand-in on meta, and the stored weight is of another dtype from then on.

Here: of a quantized bfloat16 Gemma 4 model the norms are cast, as documented, and nothing else: the embeddings, the
head (which is the embedding, or gets its bfloat16 output), experts and unquantized layers keep their dtype, for the
model computes in bfloat16 as it does without a preparation, with the same bits. Gemma 4's norms compute in float32
whatever their dtype. Of an offloaded norm the stored weight is cast, too. A float16 model needs the
float32 between its layers and gets it, but for the per-layer embedding, which is kept. Freezing and checkpointing are
upstream's. So are models that are not quantized with bitsandbytes.

Goes when PEFT casts norms only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models import family, placement

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

_PER_LAYER = "embed_tokens_per_layer"


def prepare_model_for_kbit_training(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if not family.is_gemma4(model) or not _is_quantized(model):
        return original(model, *args, **kwargs)
    with _uncast_hidden(model):
        prepared = original(model, *args, **kwargs)
    _cast_offloaded_norms(model)
    return prepared


def _is_quantized(model: Any) -> bool:
    return bool(getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False))


@contextlib.contextmanager
def _uncast_hidden(model: Any) -> Iterator[None]:
    """Inside, the model does not show the parameters that keep their dtype, which are frozen."""
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
        module._parameters[own] = None  # the name stays, and with it the order
    try:
        yield
    finally:
        for module, own, weight in hidden:
            module._parameters[own] = weight


def _cast_offloaded_norms(model: Any) -> None:
    import torch

    for module in model.modules():
        if _is_norm(module) and placement.is_offloaded(module) and module.weight.dtype == torch.bfloat16:
            with placement.weights_brought_in(module):
                module.weight.data = module.weight.data.to(torch.float32)


def _is_norm(module: Any) -> bool:
    """Whether this is one of Gemma 4's norms, which give back the dtype they got."""
    name = type(module).__name__
    return name.startswith("Gemma4") and name.endswith("RMSNorm")


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import prepare_model_for_kbit_training

    from gemma4_compat._reproduction.workspace import difference

    found = []
    for model in (workspace.load("4bit"), workspace.split("4bit")):
        inner = model.model.language_model
        per_layer = getattr(inner, _PER_LAYER, None)  # None: of a variant without one
        kind, table = ("embedding", inner.embed_tokens) if per_layer is None else ("per-layer embedding", per_layer)
        before = sum(weight.nbytes for weight in model.parameters())
        reference = workspace.answers(model)
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        after = sum(weight.nbytes for weight in model.parameters())
        if table.weight.dtype != torch.bfloat16:
            return Outcome(True, f"the {kind} is {table.weight.dtype}; the model has {after / before:.1f} its bytes")
        found.append(difference(reference, workspace.answers(model)))
    return Outcome.of_parity(max(found), "prepared 4-bit models, one of them split")


PATCH = Patch(
    id="peft-kbit-dtypes",
    summary="prepare_model_for_kbit_training casts the norms of a quantized model, not its embeddings and experts",
    symptom="silent: prepare_model_for_kbit_training makes E2B 4.7 GB larger, E4B 5.6 GB",
    severity=Severity.MEMORY,
    failure_points=("F20",),
    distribution="peft",
    affected=">=0.18.0",
    measured="0.21.2",
    retire_when="PEFT casts norms only",
    targets=(
        Target(
            module="peft.utils.other",
            name="prepare_model_for_kbit_training",
            replacement=prepare_model_for_kbit_training,
            known={
                "fc3ec3af237b": "0.18.0 - 0.19.1",
                "e92aa55e439d": "0.20.0 - 0.21.2",
            },
        ),
    ),
    reproduce=reproduce,
)
