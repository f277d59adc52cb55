"""Placements and sequences of operations that failed once do not fail again; one is run as a user would run it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.generated.search import cli, run, sequences_run
from tests.generated.search.case import Case
from tests.generated.search.regressions import PLACEMENTS, SEQUENCES
from tests.generated.search.sequence import Sequence
from tests.helpers import Finished

NEEDS = "needs the upstream libraries: pip install 'gemma4-compat[test]'"
#: A map that leaves modules out is refused.
PLANTED = """
import sys
from tests.generated.search import cli, regressions
from tests.generated.search.case import Case
incomplete = (("lm_head", "main"), ("model.norm", "offloaded"))
if __name__ == "__main__":
    regressions.PLACEMENTS["planted"] = Case(placement=incomplete)
    sys.exit(cli.main(["--regression", "planted"]))
"""


@pytest.mark.parametrize("case", PLACEMENTS.values(), ids=PLACEMENTS)
def test_it_holds_now(case: Case, bench: run.Bench) -> None:
    failure = run.check(case, bench)
    assert failure is None, failure.detail


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_the_sequence_holds_now(sequence: Sequence) -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    with sequences_run.bench() as place:
        failure = sequences_run.check(sequence, place).failure
    assert failure is None, failure.detail


@pytest.fixture
def searched(warm_child: Callable[..., Finished]) -> Callable[..., Finished]:
    """``searched(...)``: ``python -m tests.generated.search ...`` in a fork of a process that has imported the
    libraries.
    """
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    return functools.partial(warm_child, str(Path(cli.__file__).with_name("__main__.py")), timeout=300)


def test_a_case_that_holds_exits_0(searched: Callable[..., Finished]) -> None:
    done = searched("--regression", next(iter(PLACEMENTS)))
    assert done.code == 0, done.stdout + done.stderr


def test_a_sequence_that_holds_exits_0(searched: Callable[..., Finished]) -> None:
    done = searched("--sequences", "--regression", next(iter(SEQUENCES)))
    assert done.code == 0, done.stdout + done.stderr
    assert "good: 2 operations" in done.stdout


def test_a_case_that_does_not_hold_exits_1_and_says_what_is_wrong(
    warm_child: Callable[..., Finished], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    script = tmp_path / "planted.py"
    script.write_text(PLANTED, encoding="utf-8")
    done = warm_child(str(script), timeout=300)
    assert done.code == 1, done.stdout + done.stderr
    assert "gives no device" in done.stderr


@pytest.mark.parametrize("mode", [(), ("--sequences",)], ids=["placements", "sequences"])
def test_an_unknown_id_is_one_clear_error(searched: Callable[..., Finished], mode: tuple[str, ...]) -> None:
    done = searched(*mode, "--regression", "no-such")
    assert done.code == 2
    assert "no regression has the id 'no-such'" in done.stderr
