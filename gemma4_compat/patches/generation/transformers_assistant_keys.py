"""An assistant model drafts from the keys, values and hidden states of accepted tokens only.

Symptom: silent: a Gemma 4 assistant's candidates are accepted less often than they should be, the more so past the
sliding window. With a window of 8 and three candidates, 3 of 11 keys in sliding attention are those of rejected
tokens.

Cause: ``SinglePositionMultiTokenCandidateGenerator.get_candidates`` cuts the model's keys and values at the length of
the text. That length includes the newest token, which the model has not read yet, so a rejected candidate's key stays
in its place. Past the window, sliding layers return only their last keys, which are fewer than the text has tokens,
and nothing is cut. Before 5.18.0 the first drafts also start from the hidden state of the text's first token.

Fix: The patch cuts as many keys and values off the end as candidates were rejected, in layers of both kinds, and
leaves the hidden states of the last forward's own candidates. The tokens that come out are the same.

Remove when: ``SinglePositionMultiTokenCandidateGenerator`` cuts rejected candidates off the end.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat.patches.api import Outcome, Patch, Workspace

PATCH = Patch("F86", severity="speed", affected=">=5.8.0")


@PATCH.replaces(
    "transformers.generation.candidate_generator", "SinglePositionMultiTokenCandidateGenerator.get_candidates"
)
def get_candidates(
    original: Callable[..., tuple[Any, Any]],
    self: Any,
    input_ids: Any,
    model_kwargs: dict[str, Any],
    model_outputs: Any,
    is_first_iteration: bool,
    n_last_matches: Any,
    **kwargs: Any,
) -> tuple[Any, Any]:
    if not is_first_iteration:
        model_outputs = accepted(model_outputs, getattr(self, attached.CANDIDATES, 0), int(n_last_matches))
    result = original(
        self,
        input_ids,
        model_kwargs=model_kwargs,
        model_outputs=model_outputs,
        is_first_iteration=is_first_iteration,
        n_last_matches=n_last_matches,
        **kwargs,
    )
    setattr(self, attached.CANDIDATES, result[0].shape[1] - input_ids.shape[1])
    return result


def accepted(outputs: Any, candidates: int, matches: int) -> Any:
    """What an assistant reads of the model's ``outputs``, without what belongs to rejected candidates.

    Args:
        outputs: of a forward; returned as it is if it lacks ``hidden_states`` or ``shared_kv_states``.
        candidates: how many candidates that forward ended with, after one token.
        matches: how many of them were accepted.
    """
    hidden = getattr(outputs, "hidden_states", None)
    states = getattr(outputs, "shared_kv_states", None)
    if hidden is None or states is None:
        return outputs
    rejected = candidates - matches
    return SimpleNamespace(
        hidden_states=(hidden[-1][:, -candidates - 1 :],),
        shared_kv_states={
            kind: tuple(rows[:, :, : rows.shape[2] - rejected] for rows in pair) for kind, pair in states.items()
        },
    )


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import assistants

    return assistants.fed(workspace)
