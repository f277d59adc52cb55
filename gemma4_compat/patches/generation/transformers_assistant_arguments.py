"""``TypeError: SinglePositionMultiTokenCandidateGenerator.__init__() missing 2 required positional arguments``

Raised in transformers 5.18 and 5.19 by every ``generate(assistant_model=...)`` with an assistant of Gemma 4.

Why: ``generate`` no longer passes ``input_ids`` and ``model_kwargs``. The generator of candidates no longer reads
them, but still asks for them.

Here: it gets nothing in their place.

Goes when transformers 5.18 and 5.19 are no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

#: What has no default, in order.
ORDER = ("input_ids", "assistant_model", "target_model_input_embeddings", "generation_config", "model_kwargs")


def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    # By position: by name upstream warns that they are deprecated.
    rest = [kwargs.pop(name, None) for name in ORDER[len(args) :]]
    original(self, *args, *rest, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._reproduction.scenarios import assisted

    try:
        return assisted(workspace, without_arguments=True)
    except ValueError as error:
        if "set of layer types" not in str(error):
            raise
        return Outcome(False, "no assistant can be made: see transformers-assistant-sharing", applicable=False)


PATCH = Patch(
    id="transformers-assistant-arguments",
    summary="generate works with an assistant model",
    symptom="TypeError: SinglePositionMultiTokenCandidateGenerator.__init__() missing 2 required positional arguments",
    severity=Severity.CRASH,
    failure_points=("F30",),
    distribution="transformers",
    affected=">=5.18.0,<5.20.0",
    measured="5.19.0",
    fixed="5.20.0",
    bug=("https://github.com/huggingface/transformers/pull/48982",),
    applied_upstream="https://github.com/huggingface/transformers/releases/tag/v5.20.0",
    retire_when="transformers below 5.20.0 is no longer supported",
    targets=(
        Target(
            module="transformers.generation.candidate_generator",
            name="SinglePositionMultiTokenCandidateGenerator.__init__",
            replacement=init,
            known={
                "a1bd3a101ddf": "5.18.0 - 5.19.0",
            },
        ),
    ),
    reproduce=reproduce,
)
