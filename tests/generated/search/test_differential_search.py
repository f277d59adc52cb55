"""The differential search: a part of it, and that it sees what is planted.

``python -m tests.generated.search.differential`` runs all of it; docs/UPSTREAM_LIMITS.md has what was found.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.generated.search.differential import cli, planted, runner, verdict
from tests.generated.search.differential.part import CALLS as PART_CALLS
from tests.generated.search.differential.part import part
from tests.generated.search.differential.table import CALLS, entries, named
from tests.generated.search.differential.verdict import Judged
from tests.helpers import ROOT

PART = part()
#: An entry whose placement PEFT undoes where the package is off, and what it is compared with.
UNDONE = [named("states/state_values ram E2B-lora")]
ALL = [*PART, *(entry for entry in [*UNDONE, *runner.references(UNDONE)] if entry not in PART)]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("differential")


@pytest.fixture(scope="module")
def without(work: Path) -> dict[str, verdict.Result]:
    """What all give without the package."""
    return runner.side(ALL, work, on=False)


@pytest.fixture(scope="module")
def on(work: Path, without: dict[str, verdict.Result]) -> dict[str, verdict.Result]:
    """What they give with the package, once the checkpoints are there."""
    return runner.side(ALL, work, on=True)


def told(found: list[Judged]) -> str:
    return cli.report(found) + "\nrepeat one: python -m tests.generated.search.differential --only NAME"


def failing(found: list[Judged]) -> list[Judged]:
    return [item for item in found if item.verdict in verdict.FAILURES]


def test_nothing_is_worse_with_the_package(
    work: Path, without: dict[str, verdict.Result], on: dict[str, verdict.Result]
) -> None:
    found = runner.again(PART, runner.judged(PART, without, on), without, on, work)
    assert not failing(found), told(failing(found))
    counts = [item.verdict for item in found]
    assert counts.count(verdict.EQUAL) > len(PART) // 2
    assert counts.count(verdict.BETTER) >= 3, "the package repairs something here"


def test_what_is_planted_is_found(work: Path, without: dict[str, verdict.Result]) -> None:
    chosen = [entry for entry in PART if entry.call.name in planted.FOUND and entry.place == "ram"]
    on = runner.side(chosen, work, on=True, plant="tests.generated.search.differential.planted:plant", limit=20.0)
    found = {item.name: item for item in runner.judged(chosen, without, on)}
    for call, (kind, words) in planted.FOUND.items():
        item = found[f"{call} ram E2B"]
        assert item.verdict == kind, item
        assert words in item.on, item


def test_upstream_is_asked_for_the_placement_that_peft_undoes(
    work: Path, without: dict[str, verdict.Result], on: dict[str, verdict.Result]
) -> None:
    """``PeftModel.from_pretrained`` on a split base: without the package it is whole again, and can what one can."""
    assert without[UNDONE[0].name]["whole"]
    assert not on[UNDONE[0].name]["whole"]
    first = runner.judged(UNDONE, without, on)
    assert [(item.verdict, item.off) for item in first] == [(verdict.WORSE, "right")]
    (judged,) = runner.again(UNDONE, first, without, on, work)
    assert judged.verdict == verdict.EQUAL, judged
    assert "position_embedding_table is meta" in judged.off, "upstream's split model has no values there either"


@pytest.mark.full
@pytest.mark.parametrize("number", range(8))
def test_a_fifth_of_all_entries(number: int) -> None:
    found = runner.search(entries()[number::40])
    assert not failing(found), told(failing(found))


def test_the_table_has_calls_of_every_area() -> None:
    every = entries()
    assert len(every) >= 400
    assert len(CALLS) >= 150
    assert len({entry.name for entry in every}) == len(every)
    areas = {call.name.partition("/")[0] for call in CALLS.values()}
    assert {entry.call.name.partition("/")[0] for entry in PART} == areas
    assert {entry.call.name for entry in PART} == set(PART_CALLS)
    assert {entry.place for entry in every} == {"one", "ram", "disk", "embeddings"}


#: What is worse and not repaired yet.
OPEN: set[str] = set()


@pytest.mark.parametrize("stack", ["newest", "thread", "middle"])
def test_committed_results_have_nothing_worse(stack: str) -> None:
    file = ROOT / "docs" / "evidence" / "search" / f"differential-{stack}.json"
    run = json.loads(file.read_text(encoding="utf-8"))
    assert {name.partition(" ")[0] for name in run["worse"]} <= OPEN
    assert run["entries"] >= (400 if stack == "newest" else 100)  # of the others, the part that CI runs
    assert {*run["found"], *run["right"]} <= CALLS.keys(), "a call was renamed: run it again"
    assert len(json.dumps(run)) < 150_000


# The verdict.


def value(number: float) -> dict[str, Any]:
    return {"status": "value", "value": {"": number}}


def error(*kinds: str, text: str = "no") -> dict[str, Any]:
    return {"status": "error", "type": kinds[0], "mro": [*kinds, "Exception"], "text": text}


HANG = {"status": "hang", "text": "no answer in 60 s"}


@pytest.mark.parametrize(
    "off, on, expected",
    [
        (value(1.0), value(1.0), verdict.EQUAL),
        (value(1.0), value(2.0), verdict.WORSE),
        (value(1.0), error("ValueError"), verdict.WORSE),
        (value(1.0), HANG, verdict.HANG),
        (value(2.0), value(1.0), verdict.BETTER),
        (value(2.0), value(3.0), verdict.EQUAL),
        (value(2.0), error("ValueError"), verdict.BETTER),
        (error("ValueError"), value(1.0), verdict.BETTER),
        (error("ValueError"), value(2.0), verdict.WORSE),
        (error("ValueError"), error("ValueError"), verdict.EQUAL),
        (error("OSError"), error("HFValidationError", "ValueError"), verdict.OTHER_ERROR),
        (error("ValueError"), error("HFValidationError", "ValueError"), verdict.EQUAL),
        (error("ValueError"), HANG, verdict.HANG),
        (HANG, HANG, verdict.EQUAL),
    ],
)
def test_verdicts(off: dict[str, Any], on: dict[str, Any], expected: str) -> None:
    assert verdict.judge("a call", off, on, {"": 1.0}, 0.0).verdict == expected


def test_an_error_that_became_the_wrong_answer_of_one_device_is_not_worse() -> None:
    off, on = error("NotImplementedError"), value(2.0) | {"right": {"": 1.0}}
    assert verdict.judge("a call", off, on, {"": 1.0}).verdict == verdict.WORSE
    assert verdict.judge("a call", off, on, {"": 1.0}, alone=value(3.0)).verdict == verdict.WORSE
    assert verdict.judge("a call", off, on, {"": 1.0}, alone=error("ValueError")).verdict == verdict.WORSE
    assert verdict.judge("a call", off, on, {"": 1.0}, alone=value(2.0)).verdict == verdict.EQUAL


def test_an_error_is_that_of_one_device_or_of_a_model_that_upstream_has() -> None:
    off, on = error("RuntimeError"), error("ValueError")
    assert verdict.judge("a call", off, on, None).verdict == verdict.OTHER_ERROR
    assert verdict.judge("a call", off, on, None, alone=on).verdict == verdict.EQUAL
    assert verdict.judge("a call", off | {"ready": False}, on, None).verdict == verdict.EQUAL
    stumbled = error("AttributeError", text="'NoneType' object has no attribute 'unsqueeze'")
    assert verdict.judge("a call", stumbled, on, None).verdict == verdict.EQUAL
    pickled = error("AttributeError", text="Can't pickle local object 'uncompiled.<locals>.post_forward'")
    assert verdict.judge("a call", off, pickled, None).verdict == verdict.EQUAL


def test_differences_are_told() -> None:
    import torch

    from tests.generated.search.differential.server import flat

    def between(right: Any, found: Any, tolerance: float = 0.0) -> str | None:
        return verdict.difference(flat(right), flat(found), tolerance)

    one = torch.tensor([1.0, 2.0])
    assert between({"a": one}, {"a": one.clone()}) is None
    assert between({"a": one}, {"b": one}) == "1 missing ['.a'], 1 added ['.b']"
    assert between([one, 3], [one + 0.5, 3]) == "0 off by 0.5 of 2, 1 of 2"
    assert between(one, one + 0.5, 0.5) is None
    assert between(one, one.bfloat16()) == "value is tensor bfloat16, not tensor float32"
    assert between(one, one[:1]) == "value has shape (1,), not (2,)"
    assert between(one, one * float("nan")) == "value is NaN"
    assert between(one, one.to("meta")) == "value is meta float32, not tensor float32"
    assert between("a", "b") == "value is 'b', not 'a'"


def test_a_summary_can_be_written_small() -> None:
    chosen = [entry for entry in entries() if entry.call.name.startswith("moves/cast[")]
    found = [
        Judged(entry.name, verdict.BETTER, "TypeError: no", "right")
        if "half" in entry.name
        else Judged(entry.name, verdict.EQUAL, "right", "right")
        for entry in chosen
    ]
    data = json.loads(cli.written(cli.summary(found, "a command")))
    half = " ".join(f"{entry.place}/{entry.kind}" for entry in chosen if "half" in entry.name)
    assert data["found"] == {"moves/cast[half]": {"1 0": half} if data["outcomes"][0] == "right" else {"0 1": half}}
    assert data["right"] == ["moves/cast[float]", "moves/cast[bfloat16]", "moves/cast[double]"]
    assert set(data["outcomes"]) == {"right", "TypeError: no"}
    assert data["worse"] == {}


def test_a_result_is_mended_by_running_what_failed_again() -> None:
    first = [
        Judged("a/call one E2B", verdict.EQUAL, "right", "right"),
        Judged("a/call disk E2B", verdict.WORSE, "right", "ValueError: no"),
        Judged("a/other ram E2B", verdict.ABSENT, "absent", "absent"),
        Judged("a/third ram E2B", verdict.BETTER, "KeyError: 'x'", "right"),
    ]
    before = cli.summary(first, "all")
    again = [Judged("a/call disk E2B", verdict.BETTER, "wrong: 1", "right")]
    whole = cli.summary([first[0], *again, *first[2:]], "all")
    found = cli.mended(before, again, "again")
    assert {key: found[key] for key in ("verdicts", "worse", "right", "entries", "calls")} == {
        key: whole[key] for key in ("verdicts", "worse", "right", "entries", "calls")
    }
    assert found["found"].keys() == whole["found"].keys()
    assert found["again"][0]["command"] == "again"
    with pytest.raises(ValueError, match="0 entries ran again, 1 had failed"):
        cli.mended(before, [], "again")
