"""silent: under DDP about every second rank trains another ``gemma4_unified`` model (the 12B).

Why: as in ``transformers_rotary_order.py``; the 12B has a copy of that class in a module of its own.

Here: as there.

Goes when transformers below 5.16.0 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models import rotary

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

_UNIFIED = "transformers.models.gemma4_unified.modeling_gemma4_unified"


def rotary_embedding(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    rotary.order_buffers(self)


def reproduce(workspace: Workspace) -> Outcome:
    unified = workspace.unified()
    if unified is None:
        return Outcome(False, "this release has no gemma4_unified", applicable=False)
    from gemma4_compat._reproduction import scenarios

    return scenarios.second_rank(_UNIFIED, unified)


PATCH = Patch(
    id="transformers-rotary-order-unified",
    summary="the repair of transformers-rotary-order for gemma4_unified, the classes of the 12B",
    symptom="silent: under DDP about every second rank computes with the rotary frequencies of other layers",
    severity=Severity.WRONG_RESULT,
    failure_points=("F30", "F35"),
    distribution="transformers",
    affected=">=5.10.1,<5.16.0",
    measured="5.15.1",
    fixed="5.16.0",
    applied_upstream="https://github.com/huggingface/transformers/pull/48162",
    retire_when="transformers below 5.16.0 is no longer supported",
    targets=(
        Target(
            module=_UNIFIED,
            name="Gemma4UnifiedTextRotaryEmbedding.__init__",
            replacement=rotary_embedding,
            known={
                "001f9d2c60a9": "5.10.1 - 5.14.1",
                "daac5d03c20d": "5.15.0 - 5.15.1",
            },
        ),
    ),
    reproduce=reproduce,
)
