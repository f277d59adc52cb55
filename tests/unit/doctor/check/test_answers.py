"""Answers are compared as bits; what was said before is the reference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gemma4_compat._doctor.check import answers


def answer(**changes: Any) -> dict[str, Any]:
    logits = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
    return {"forward 1": logits, "logits": logits + 1, "tokens": torch.tensor([3, 1, 2]), **changes}


def test_the_same() -> None:
    assert answers.compared(answer(), answer()) == {
        "equal": True,
        "difference": 0.0,
        "tokens": 3,
        "tokens_equal": 3,
        "first": None,
    }


@pytest.mark.parametrize(
    "name, value, difference",
    [
        ("logits", torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8.5]], dtype=torch.bfloat16), 0.5),
        ("forward 1", torch.tensor([[-0.0, 1, 2, 3], [4, 5, 6, 7]], dtype=torch.bfloat16), 0.0),
        ("forward 1", torch.full((2, 4), math.nan, dtype=torch.bfloat16), math.inf),
        ("forward 1", torch.zeros(2, 3, dtype=torch.bfloat16), math.inf),
        ("forward 1", torch.arange(8, dtype=torch.float32).reshape(2, 4), 0.0),
    ],
)
def test_another_bit(name: str, value: Any, difference: float) -> None:
    found = answers.compared(answer(), answer(**{name: value}))
    assert (found["equal"], found["first"], found["difference"]) == (False, name, difference)


def test_what_may_not_be_chosen_is_no_difference() -> None:
    one, two = (torch.tensor([[1.0, -math.inf], [-math.inf, value]]) for value in (2.0, 2.5))
    assert answers.compared(answer(logits=one), answer(logits=two))["difference"] == 0.5
    assert answers.finite(answer(logits=one))
    assert not answers.finite(answer(logits=-one))
    assert not answers.finite(answer(**{"forward 1": one}))


def test_how_many_tokens_agree() -> None:
    found = answers.compared(answer(), answer(tokens=torch.tensor([3, 0, 2])))
    assert (found["equal"], found["tokens_equal"], found["first"]) == (False, 1, "tokens")
    assert answers.compared(answer(), answer(tokens=torch.tensor([3, 1])))["tokens_equal"] == 2


def test_equal_nans_are_the_same_bits_and_not_finite() -> None:
    broken = answer(logits=torch.full((2, 4), math.nan))
    assert answers.compared(broken, answer(logits=torch.full((2, 4), math.nan)))["equal"]
    assert not answers.finite(broken)
    assert answers.finite(answer())


def test_a_digest_is_that_of_the_bits() -> None:
    assert answers.digest(answer()) == answers.digest(answer())
    zero = torch.zeros(2, 4, dtype=torch.bfloat16)
    assert answers.digest(answer(logits=zero)) != answers.digest(answer(logits=-zero))
    assert answers.digest(answer(tokens=torch.tensor([3, 1, 4]))) != answers.digest(answer())


def test_the_first_answer_is_the_reference(tmp_path: Path) -> None:
    assert answers.Store(tmp_path).compare("base eager text", answer()) is None
    again = answers.Store(tmp_path)
    other = again.compare("base eager text", answer(tokens=torch.tensor([0, 1, 2])))
    same = again.compare("base eager text", answer())
    assert other is not None
    assert same is not None
    assert (other["equal"], same["equal"]) == (False, True)
    assert again.compare("base eager image", answer()) is None
