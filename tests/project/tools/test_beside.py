"""The matrix of libraries that patch the same classes: what a cell says, and what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from tests.collecting import collect_failures
from tools import evidence
from tools.matrix.beside import actions, others, stacks, verdicts
from tools.matrix.beside.command import FILE

LINE = "otherlib.f is in the place of x. This and other repairs of functions that otherlib has patched are off"


def result(found: dict[str, Any], other: dict[str, Any], shim: dict[str, Any], *said: str) -> dict[str, Any]:
    ways = {"other": other, "shim": shim, "shim first": found, "other first": found}
    entry = {way: {"actions": {"forward": outcome}, "said": list(said)} for way, outcome in ways.items()}
    return {"name": "otherlib", "called": "Otherlib", "module": "otherlib", "ways": entry}


@pytest.mark.parametrize(
    "found, other, shim, said, expected",
    [
        ({"digest": "a"}, {"digest": "a"}, {"digest": "a"}, (), "both"),
        ({"digest": "a"}, {"digest": "a"}, {"digest": "b"}, (), "other"),
        ({"digest": "a"}, {"error": "E: x", "kind": "E"}, {"digest": "a"}, (), "shim"),
        ({"digest": "a", "own": True}, {"digest": "b"}, {"digest": "c"}, (), "one device"),
        ({"digest": "a", "near": True}, {"digest": "b"}, {"digest": "c"}, (), "near"),
        ({"digest": "a", "own": False}, {"digest": "b"}, {"digest": "c"}, (), "differs"),
        ({"digest": "a", "own": False}, {"digest": "b"}, {"digest": "c"}, (LINE,), "said"),
        ({"error": "E: x", "kind": "E"}, {"error": "E: x", "kind": "E"}, {"digest": "c"}, (), "its own error"),
        ({"error": "E: x", "kind": "E"}, {"digest": "b"}, {"digest": "c"}, (), "error"),
        ({"error": "otherlib or it", "kind": "Gemma4CompatError"}, {}, {"digest": "c"}, (), "one error"),
        ({"error": "an error", "kind": "Gemma4CompatError"}, {}, {"digest": "c"}, (), "error"),
    ],
)
def test_what_a_cell_says(
    found: dict[str, Any], other: dict[str, Any], shim: dict[str, Any], said: tuple[str, ...], expected: str
) -> None:
    one = result(found, other, shim, *said)
    assert verdicts.verdict("forward", one, "shim first") == expected
    assert len(verdicts.bad(one)) == (2 if expected in verdicts.BAD else 0)


def test_every_entry_can_be_turned_on_and_what_is_measured_has_its_releases() -> None:
    known, measured = stacks.read(), evidence.read(evidence.EVIDENCE / FILE)
    assert set(known) == set(others.TURN_ON)
    assert list(measured) == [name for name in known if name in measured]
    for name, one in measured.items():
        assert known[name].pins.items() <= one["releases"].items(), name


@collect_failures(name=list(evidence.read(evidence.EVIDENCE / FILE)))
def test_no_cell_is_bad(name: str) -> None:
    one = evidence.read(evidence.EVIDENCE / FILE)[name]
    assert list(verdicts.table(one)) == [action for action in actions.ACTIONS if action in verdicts.table(one)]
    assert verdicts.bad(one) == []


@pytest.mark.parametrize("answer", [float("nan"), ["tensor", float("nan")], {"losses": [1.0, float("nan")]}])
def test_an_answer_that_is_not_a_number_is_none(answer: Any) -> None:
    """Two of them are alike, whatever they come from: a cell would say that they are equal."""
    torch = pytest.importorskip("torch")
    if isinstance(answer, list):
        answer = torch.tensor([1.0, answer[1]])
    with pytest.raises(ArithmeticError, match="not a number"):
        actions.digest(answer)
    assert actions.digest([1.0, float("inf")]) == actions.digest([1.0, float("inf")])
