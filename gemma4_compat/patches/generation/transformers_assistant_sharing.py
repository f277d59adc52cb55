"""Assistant models can be created, and receive keys and values from models that share none internally.

Symptom: ``ValueError: The set of layer types producing a cache is different than the set of layer types using
them``, raised by transformers 5.23.0 as soon as any Gemma 4 assistant model is created
(``Gemma4AssistantForCausalLM``, and ``Gemma4UnifiedAssistantForCausalLM`` of the 12B). With a model that shares no
keys and values within itself (26B-A4B and 31B), ``KeyError: 'full_attention'`` would follow, because that model
returns none for its assistant.

Cause: ``Gemma4TextConfig.kv_sharing_modes`` says for each layer whether it stores keys and values for other layers
or reuses theirs. It requires a storing layer for every type of layer that reuses, but all layers of an assistant
reuse those of another model. For a model without reusing layers it reports that none stores, although the assistant
requests the last one of each type. ``gemma4_unified``, the classes of the 12B, has the same code in a configuration
class and module of its own, ``Gemma4UnifiedTextConfig.kv_sharing_modes``.

Fix: In both configuration classes: if all layers reuse, ``kv_sharing_modes`` says so. If none does, the last layer
of each type stores, as in earlier releases. Other models get upstream's result.

Remove when: ``kv_sharing_modes`` handles models in which all layers, or none, reuse keys and values.
"""

from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.cache import shared_kv
from gemma4_compat.patches.api import Outcome, Patch, Workspace

PATCH = Patch("F30", severity="crash", affected=">=5.23.0,<5.24.0", applied_upstream="releases/tag/v5.24.0")


@PATCH.replaces("transformers.models.gemma4.configuration_gemma4", "Gemma4TextConfig.kv_sharing_modes", group="gemma4")
@PATCH.replaces(
    "transformers.models.gemma4_unified.configuration_gemma4_unified",
    "Gemma4UnifiedTextConfig.kv_sharing_modes",
    group="gemma4_unified",
)
def kv_sharing_modes(original: Callable[..., list[str | None]], self: Any) -> list[str | None]:
    return shared_kv.sharing_modes(original, self)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import scenarios

    return scenarios.of_both_classes(workspace, gemma4=scenarios.assisted, unified=scenarios.assisted)
