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

from typing import Any

from gemma4_compat._gemma4.models import rotary
from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch("F90", severity="wrong_result", affected=">=5.5.0", after="transformers-rotary-order")


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextRotaryEmbedding.__init__", group="gemma4")
@PATCH.replaces(MODELING_GEMMA4, "Gemma4VisionRotaryEmbedding.__init__", group="gemma4")
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedTextRotaryEmbedding.__init__", group="gemma4_unified")
def rotary_embedding(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    rotary.keep_frequencies(self)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import scenarios

    return scenarios.of_both_classes(workspace, gemma4=_cast, unified=_cast)


def _cast(workspace: Workspace) -> Outcome:
    model = workspace.load()
    expected = workspace.outputs(model)
    found = workspace.difference(expected, model.to(model.dtype))
    return Outcome.of_parity(found, "a model after a cast to the dtype that it has")
