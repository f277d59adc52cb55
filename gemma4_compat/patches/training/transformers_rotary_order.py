"""silent: under DDP (``accelerate launch --multi_gpu``, Trainer, torchrun) about every second rank trains another
model: its sliding layers rotate with frequencies of the full ones, and the other way round.

Why: the rotary embedding registers its buffers in the order of ``set(config.layer_types)``. The order of a set of
strings depends on a salt that each process draws for itself (unless ``PYTHONHASHSEED`` says which), and DDP broadcasts
rank 0's buffers before each forward one after another, without their names. They have as many numbers in all, so
nothing fails.

Here: the buffers are put in the order of their names, which is what upstream does from 5.16.0 on.

Goes when transformers below 5.16.0 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models import rotary

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

_GEMMA4 = "transformers.models.gemma4.modeling_gemma4"


def rotary_embedding(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    rotary.order_buffers(self)


def reproduce(workspace: Workspace) -> Outcome:
    workspace.needs("gemma4")
    from gemma4_compat._reproduction import scenarios

    return scenarios.second_rank(_GEMMA4, workspace)


PATCH = Patch(
    id="transformers-rotary-order",
    summary="every rank of DDP has the rotary frequencies that belong to a layer",
    symptom="silent: under DDP about every second rank computes with the rotary frequencies of other layers",
    severity=Severity.WRONG_RESULT,
    failure_points=("F35",),
    distribution="transformers",
    affected=">=5.5.0,<5.16.0",
    measured="5.15.1",
    fixed="5.16.0",
    applied_upstream="https://github.com/huggingface/transformers/pull/48162",
    retire_when="transformers below 5.16.0 is no longer supported",
    targets=(
        Target(
            module=_GEMMA4,
            name="Gemma4TextRotaryEmbedding.__init__",
            replacement=rotary_embedding,
            known={
                "001f9d2c60a9": "5.5.0 - 5.14.1",
                "daac5d03c20d": "5.15.0 - 5.15.1",
            },
        ),
    ),
    reproduce=reproduce,
)
