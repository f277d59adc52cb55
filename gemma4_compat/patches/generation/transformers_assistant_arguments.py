"""Generation works with an assistant model on transformers 5.18 and 5.19.

Symptom: ``TypeError: SinglePositionMultiTokenCandidateGenerator.__init__() missing 2 required positional arguments``
from every ``generate(assistant_model=...)`` with a Gemma 4 assistant on transformers 5.18 and 5.19.

Cause: ``generate`` no longer passes ``input_ids`` and ``model_kwargs``.
``SinglePositionMultiTokenCandidateGenerator.__init__`` no longer reads them, but still requires them.

Fix: The patch passes ``None`` in their place, by position: upstream warns that the names are deprecated.

Remove when: transformers below 5.20.0 is no longer supported.
"""

from typing import Any

from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F30",
    severity="crash",
    affected=">=5.18.0,<5.20.0",
    acts_on="every model",
    bug="pull/48982",
    applied_upstream="releases/tag/v5.20.0",
)

#: Parameters without a default, in order.
ORDER = ("input_ids", "assistant_model", "target_model_input_embeddings", "generation_config", "model_kwargs")


@PATCH.replaces("transformers.generation.candidate_generator", "SinglePositionMultiTokenCandidateGenerator.__init__")
def init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    # By position, because upstream warns that the names are deprecated.
    rest = [kwargs.pop(name, None) for name in ORDER[len(args) :]]
    original(self, *args, *rest, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab.scenarios import assisted

    try:
        return assisted(workspace, without_arguments=True)
    except ValueError as error:
        if "set of layer types" not in str(error):
            raise
        return Outcome(False, "no assistant can be made: see transformers-assistant-sharing", applicable=False)
