"""Placements and sequences of operations that failed once do not fail again; one is run as a user would run it."""

from __future__ import annotations

import pytest

from tests.helpers import child
from tests.search import run, sequence_regressions, sequences_run
from tests.search.case import Case
from tests.search.regressions import REGRESSIONS
from tests.search.sequence import Sequence

NEEDS = "needs the upstream libraries: pip install 'gemma4-compat[test]'"
#: A map that leaves modules out is refused.
PLANTED = """
import sys
import pytest
from tests.search import cli, regressions
from tests.search.case import Case
incomplete = (("lm_head", "main"), ("model.norm", "offloaded"))
if __name__ == "__main__":
    regressions.REGRESSIONS.append(pytest.param(Case(placement=incomplete), id="planted"))
    sys.exit(cli.main(["--regression", "planted"]))
"""


@pytest.mark.parametrize("case", REGRESSIONS)
def test_it_holds_now(case: Case, bench: run.Bench) -> None:
    failure = run.check(case, bench)
    assert failure is None, failure.detail


@pytest.mark.parametrize("sequence", sequence_regressions.REGRESSIONS)
def test_the_sequence_holds_now(sequence: Sequence) -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    with sequences_run.bench() as place:
        failure = sequences_run.check(sequence, place).failure
    assert failure is None, failure.detail


def test_a_case_that_holds_exits_0() -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    done = child("-m", "tests.search", "--regression", REGRESSIONS[0].id, timeout=300)
    assert done.code == 0, done.stdout + done.stderr


def test_a_sequence_that_holds_exits_0() -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    done = child(
        "-m", "tests.search", "--sequences", "--regression", sequence_regressions.REGRESSIONS[0].id, timeout=300
    )
    assert done.code == 0, done.stdout + done.stderr
    assert "good: 2 operations" in done.stdout


def test_a_case_that_does_not_hold_exits_1_and_says_what_is_wrong() -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    done = child("-c", PLANTED, timeout=300)
    assert done.code == 1, done.stdout + done.stderr
    assert "gives no device" in done.stderr


@pytest.mark.parametrize("mode", [(), ("--sequences",)], ids=["placements", "sequences"])
def test_an_unknown_id_is_one_clear_error(mode: tuple[str, ...]) -> None:
    done = child("-m", "tests.search", *mode, "--regression", "no-such", timeout=300)
    assert done.code == 2
    assert "no regression has the id 'no-such'" in done.stderr
