"""Which placements are checked, and what is said of a card that others fill."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._doctor.check import placements
from gemma4_compat._plan.cards import measured

GIB = 1 << 30
OPTIONS = {"context": 128, "quantize": "4bit", "vision": True, "audio": True}


def card(free: float, memory: float = 12) -> dict[str, int]:
    return {"free": int(free * GIB), "memory": int(memory * GIB)}


def test_the_budget_of_a_free_card() -> None:
    assert placements.budget("10GiB", card(11.5)) == (10 * GIB, 11 * GIB, "")
    assert placements.budget(None, card(11.5)) == (11 * GIB, 11 * GIB, "")


def test_a_card_that_other_programs_fill() -> None:
    planned_for, whole, note = placements.budget("10GiB", card(2.5))
    assert planned_for == whole == 2 * GIB
    assert note == "other programs hold 9.50 GiB of the card's 12.00 GiB: checked with 2.00 GiB, not 10GiB"
    assert placements.budget(None, card(2.5))[2].endswith("of the card's 12.00 GiB: checked with what is free")
    with pytest.raises(Gemma4CompatError, match=r"hold 11\.75 GiB .* nothing is left to check with"):
        placements.budget("10GiB", card(0.25))


def test_more_than_the_card_has() -> None:
    with pytest.raises(Gemma4CompatError, match=r"--vram 24GiB is more than this card has, 12\.00 GiB"):
        placements.budget("24GiB", card(11))


def test_without_a_card_everything_fits() -> None:
    assert placements.budget("10GiB", None)[0] == 10 * GIB
    assert placements.budget(None, None)[0] == placements.budget(None, None)[1] > 100 * GIB


@pytest.mark.parametrize("count, away", [(2, [0, 3]), (4, [0, 3, 7])])
def test_of_a_tiny_model(workspace: Any, count: int, away: list[int]) -> None:
    """Every plan keeps it whole: others are made by hand."""
    found = placements.propose(str(workspace.checkpoint), 1 << 40, 1 << 40, count=count, options=OPTIONS)
    assert [sum(item["away"].values()) for item in found] == away
    assert [item["planned"] is None for item in found] == [False, *[True] * (len(found) - 1)]
    assert found[1]["title"] == "in host memory: per-layer embeddings, 2 towers"


def test_of_a_real_shape() -> None:
    """Without weights: everything on the card, the plan, and one that needs less."""
    found = placements.propose("E2B", 2 * GIB, 12 * GIB, count=4, options=OPTIONS | {"context": 1024})
    assert found[0]["title"] == "everything on the card"
    assert max(found[1]["planned"].values()) <= 2 * GIB
    assert len({tuple(item["away"].items()) for item in found}) == len(found) > 2
    assert found[-1]["away"]["layers"] > 0


def test_what_fits_nowhere() -> None:
    with pytest.raises(Gemma4CompatError, match="does not fit into"):
        placements.propose("E2B", 1 << 28, 12 * GIB, count=2, options=OPTIONS)


def test_parts_in_words() -> None:
    names = ("model.vision_tower", "model.language_model.embed_tokens_per_layer", "model.language_model.layers.3")
    away = measured.away(dict.fromkeys((*names, "model.language_model.layers.4.experts"), "cpu") | {"lm_head": 0})
    title = measured.title(away)
    assert title == "in host memory: per-layer embeddings, 1 tower, experts of 1 layers, 1 layers"
