"""A cast keeps the frequencies of rotary embeddings in float32, as loading does.

Symptom: silent: ``.to(torch.bfloat16)``, ``.bfloat16()``, ``.half()``, ``Trainer(bf16_full_eval=True)`` or
``.to(device, dtype)`` change the outputs, even of a model that already has that dtype. Longer prompts are further off.
The change cannot be undone.

Cause: Loading casts weights but keeps ``inv_freq`` of the rotary embeddings in float32, in which the angles are
computed. ``nn.Module._apply``, which every cast uses, rounds all buffers.

Fix: Rotary embeddings keep the dtype of buffers that a cast would narrow, and still move them to the requested device.
Casts to float32 and float64 are unchanged.

Remove when: casts of Gemma 4 keep its rotary frequencies in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import ActsOn, Kind, Outcome, Patch, Severity, Target
from gemma4_compat._models import rotary

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

_GEMMA4 = "transformers.models.gemma4.modeling_gemma4"
_UNIFIED = "transformers.models.gemma4_unified.modeling_gemma4_unified"


def rotary_embedding(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    rotary.keep_frequencies(self)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._reproduction import scenarios

    return scenarios.of_both_classes(workspace, gemma4=_cast, unified=_cast)


def _cast(workspace: Workspace) -> Outcome:
    from gemma4_compat._reproduction.workspace import difference

    model = workspace.load()
    expected = workspace.outputs(model)
    found = difference(expected, workspace.outputs(model.to(model.dtype)))
    return Outcome.of_parity(found, "a model after a cast to the dtype that it has")


def _target(module: str, name: str, group: str) -> Target:
    return Target(module=module, name=f"{name}.__init__", replacement=rotary_embedding, group=group)


PATCH = Patch(
    id=rotary.CAST,
    kind=Kind.REPAIR,
    severity=Severity.WRONG_RESULT,
    failure_points=("F90",),
    distribution="transformers",
    affected=">=5.5.0",
    acts_on=ActsOn.GEMMA4,
    after=("transformers-rotary-order",),
    targets=(
        _target(_GEMMA4, "Gemma4TextRotaryEmbedding", "gemma4"),
        _target(_GEMMA4, "Gemma4VisionRotaryEmbedding", "gemma4"),
        _target(_UNIFIED, "Gemma4UnifiedTextRotaryEmbedding", "gemma4_unified"),
    ),
    reproduce=reproduce,
)
