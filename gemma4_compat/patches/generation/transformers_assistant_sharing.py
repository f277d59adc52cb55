"""``ValueError: The set of layer types producing a cache is different than the set of layer types using them``

Raised by transformers 5.23.0 for every assistant model of Gemma 4 (``Gemma4AssistantForCausalLM``), as soon as one is
made. With a model that shares no keys and values within itself (26B-A4B and 31B) ``KeyError: 'full_attention'`` would
follow: it has none for its assistant.

Why: ``kv_sharing_modes`` says of each layer whether it stores keys and values for others or reuses such. It wants a
layer that stores for every one that reuses; in an assistant all layers reuse those of another model. Of a model
without layers that reuse it says that none stores, although the assistant asks for the last ones of each kind.

Here: in a model all of whose layers reuse, all do; in one without such layers the last layer of each kind stores, as
in releases before.

Goes when transformers knows these two cases again.
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

    workspace.needs("gemma4")
    return assisted(workspace)


PATCH = Patch(
    id="transformers-assistant-sharing",
    summary="assistant models can be made, and get keys and values of models that share none within themselves",
    symptom="ValueError: The set of layer types producing a cache is different than the set of layer types using them",
    severity=Severity.CRASH,
    failure_points=("F30",),
    distribution="transformers",
    affected=">=5.23.0",
    measured="5.23.0",
    retire_when="kv_sharing_modes knows models that share all their layers' keys and values, and none",
    targets=(
        Target(
            module="transformers.models.gemma4.configuration_gemma4",
            name="Gemma4TextConfig.kv_sharing_modes",
            replacement=kv_sharing_modes,
            known={
                "7e8cea83fb49": "5.23.0",
            },
        ),
    ),
    reproduce=reproduce,
)
