"""``ValueError: The set of layer types producing a cache is different than the set of layer types using them``

Raised by transformers 5.23.0 for every assistant model of a ``gemma4_unified`` model, the 12B
(``Gemma4UnifiedAssistantForCausalLM``), as soon as one is made.

Why: as in ``transformers_assistant_sharing.py``. ``gemma4_unified`` has a configuration of its own, in a module of its
own.

Here: as there.

Goes when transformers knows models all of whose layers reuse keys and values, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models import shared_kv

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def kv_sharing_modes(original: Callable[..., list[str | None]], self: Any) -> list[str | None]:
    return shared_kv.sharing_modes(original, self)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._reproduction.scenarios import assisted

    unified = workspace.unified()
    if unified is None:
        return Outcome(False, "this release has no gemma4_unified", applicable=False)
    return assisted(unified)


PATCH = Patch(
    id="transformers-assistant-sharing-unified",
    summary="the repair of transformers-assistant-sharing for gemma4_unified, the classes of the 12B",
    symptom="ValueError: The set of layer types producing a cache is different than the set of layer types using them",
    severity=Severity.CRASH,
    failure_points=("F30",),
    distribution="transformers",
    affected=">=5.23.0",
    measured="5.23.0",
    retire_when="kv_sharing_modes knows models that share all their layers' keys and values, and none",
    targets=(
        Target(
            module="transformers.models.gemma4_unified.configuration_gemma4_unified",
            name="Gemma4UnifiedTextConfig.kv_sharing_modes",
            replacement=kv_sharing_modes,
            known={
                "7e8cea83fb49": "5.23.0",
            },
        ),
    ),
    reproduce=reproduce,
)
