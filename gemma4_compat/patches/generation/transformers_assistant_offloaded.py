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

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import ActsOn, Kind, Outcome, Patch, Severity, Target
from gemma4_compat._offload import gathered_weights

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    getters = [lambda: self.pre_projection]
    if self.masked_embedding is not None:
        getters.append(lambda: self.lm_head)
    with gathered_weights.gathered(self, getters):
        return original(self, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._reproduction import assistants

    return assistants.offloaded(workspace)


def _target(family: str, kind: str) -> Target:
    return Target(
        module=f"transformers.models.{family}_assistant.modeling_{family}_assistant",
        name=f"{kind}AssistantForCausalLM.forward",
        replacement=forward,
        group=family,
    )


PATCH = Patch(
    id="transformers-assistant-offloaded",
    kind=Kind.REPAIR,
    severity=Severity.CRASH,
    failure_points=("F30",),
    distribution="transformers",
    affected=">=5.10.1",
    requires=("accelerate",),
    acts_on=ActsOn.GEMMA4,
    targets=(_target("gemma4", "Gemma4"), _target("gemma4_unified", "Gemma4Unified")),
    reproduce=reproduce,
)
