"""benchmarks/training/rollouts.py: it replays, and says which step went wrong. Without a GPU a stand-in captures."""

from __future__ import annotations

import pytest

pytest.importorskip("bitsandbytes")
from benchmarks.training import rollouts
from gemma4_compat._graphs import recording
from gemma4_compat._lab.stand_ins import tape


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


def test_log_probabilities_in_pieces_are_those_of_the_model() -> None:
    import torch

    model = rollouts.load("tiny-E2B", exact=True)
    rollouts.models.base(model).config.get_text_config().final_logit_softcapping = 1.0  # the usual one changes little
    ids = rollouts.models.text_prompt(model, rollouts.PROMPT + 2 * rollouts.PIECE + 3, batch=2)["input_ids"]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids).logits[:, rollouts.PROMPT - 1 : -1].float()
    expected = torch.log_softmax(logits, -1).gather(-1, ids[:, rollouts.PROMPT :, None])[..., 0]
    found = rollouts.log_probabilities(model, ids)
    torch.testing.assert_close(found.detach(), expected, atol=0.02, rtol=0)
    assert found.requires_grad
