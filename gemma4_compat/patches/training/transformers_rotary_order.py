"""Every DDP rank uses the rotary frequencies that belong to a layer (``gemma4`` and ``gemma4_unified``).

Symptom: silent: under DDP (``accelerate launch --multi_gpu``, Trainer, torchrun) about every second rank trains a
different model. Its sliding layers rotate with the frequencies of the full attention layers, and its full attention
layers with those of the sliding ones.

Cause: ``Gemma4TextRotaryEmbedding.__init__`` registers its buffers in the order of ``set(config.layer_types)``. The
order of a set of strings depends on a salt that each process draws for itself, unless ``PYTHONHASHSEED`` sets it.
Before each forward, DDP broadcasts the buffers of rank 0 one after another, without their names. The total size is the
same, so nothing fails.

``gemma4_unified`` (the 12B) has a copy of that class, ``Gemma4UnifiedTextRotaryEmbedding``, in its own module, with
the same defect.

Fix: After ``__init__`` of either class, the buffers are put in the order of their names, as upstream does from
5.16.0 on.

Remove when: transformers below 5.16.0 is no longer supported.
"""

from typing import Any

from gemma4_compat._gemma4.models import rotary
from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch("F30 F35", severity="wrong_result", affected=">=5.5.0,<5.16.0", applied_upstream="pull/48162")


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextRotaryEmbedding.__init__", group="gemma4")
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedTextRotaryEmbedding.__init__", group="gemma4_unified")
def rotary_embedding(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    rotary.order_buffers(self)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import scenarios

    return scenarios.of_both_classes(
        workspace,
        gemma4=lambda workspace: scenarios.second_rank(MODELING_GEMMA4, workspace),
        unified=lambda workspace: scenarios.second_rank(MODELING_UNIFIED, workspace),
    )
