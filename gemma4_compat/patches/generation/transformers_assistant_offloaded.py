"""An assistant model may be offloaded as a whole.

Symptom: ``NotImplementedError: Cannot copy out of meta tensor; no data!`` from ``generate`` with an assistant whose
map offloads ``pre_projection``, such as ``device_map={"": "disk"}``.

Cause: ``Gemma4AssistantForCausalLM.forward`` brings its inputs to ``self.pre_projection.weight.device``, which is
meta while that module is offloaded. Released assistants also read ``lm_head.weight`` outside the head's forward, in
``Gemma4AssistantMaskedEmbedder``. The assistant of the 12B has the same code in a module of its own.

Fix: During the forward an offloaded ``pre_projection`` has its weight, and so has the head where it is read directly.
The other modules are offloaded as before.

Remove when: the assistant's forward reads no weight outside the forward of the module that owns it.
"""

from typing import Any

from gemma4_compat._offload.weights import gathered_weights
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F30", severity="crash", affected=">=5.10.1", requires="accelerate")


@PATCH.replaces(
    "transformers.models.gemma4_assistant.modeling_gemma4_assistant",
    "Gemma4AssistantForCausalLM.forward",
    group="gemma4",
)
@PATCH.replaces(
    "transformers.models.gemma4_unified_assistant.modeling_gemma4_unified_assistant",
    "Gemma4UnifiedAssistantForCausalLM.forward",
    group="gemma4_unified",
)
def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    getters = [lambda: self.pre_projection]
    if self.masked_embedding is not None:
        getters.append(lambda: self.lm_head)
    with gathered_weights.gathered(self, getters):
        return original(self, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import assistants

    return assistants.offloaded(workspace)
