"""benchmarks/training/rollouts.py: it replays, and says which step went wrong. Without a GPU a stand-in captures."""

from __future__ import annotations

import pytest

pytest.importorskip("bitsandbytes")
from benchmarks.training import rollouts
from gemma4_compat._decoding import recording
from gemma4_compat._stand_ins import tape


def test_rollouts_are_replayed_with_the_logits_of_eager_ones() -> None:
    with tape.standing_in(recording.RECORDERS):
        result = rollouts.measured("tiny-E2B", 2, own=False)
    assert rollouts.problems(result, own=False) == []
    first, second = result["steps"]
    assert first["tokens_equal"] == first["tokens"] > 0
    assert 0 < first["replayed"] < second["replayed"]
    assert first["loss"] != second["loss"]
    assert 0 < first["gradient_norm"] < float("inf")


@pytest.mark.parametrize(("changed", "own"), [({"finite": False}, True), ({"logits_equal": False}, False)])
def test_a_step_that_went_wrong_is_named(changed: dict[str, bool], own: bool) -> None:
    right = {"finite": True, "logits_equal": True}
    assert rollouts.problems({"steps": [right, right | changed]}, own=own) == ["step 1"]
