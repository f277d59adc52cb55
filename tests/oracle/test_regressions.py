"""Placements that failed once do not fail again; one of them is run as a user would run it."""

from __future__ import annotations

import pytest

from tests.helpers import child
from tests.search import run
from tests.search.case import Case
from tests.search.regressions import REGRESSIONS

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


def test_a_case_that_holds_exits_0() -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    done = child("-m", "tests.search", "--regression", REGRESSIONS[0].id, timeout=300)
    assert done.code == 0, done.stdout + done.stderr


def test_a_case_that_does_not_hold_exits_1_and_says_what_is_wrong() -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    done = child("-c", PLANTED, timeout=300)
    assert done.code == 1, done.stdout + done.stderr
    assert "gives no device" in done.stderr


def test_an_unknown_id_is_one_clear_error() -> None:
    done = child("-m", "tests.search", "--regression", "no-such", timeout=300)
    assert done.code == 2
    assert "no regression has the id 'no-such'" in done.stderr
