"""What the tests are made with is tested, too."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests import conftest, helpers
from tests.helpers import ROOT, pairwise


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2, 2), (3, 4, 5), (9, 3, 3, 2)], ids=str)
def test_pairwise_has_every_two_values_of_different_factors_and_is_the_same_each_time(sizes: tuple[int, ...]) -> None:
    factors = [[f"{number}-{value}" for value in range(size)] for number, size in enumerate(sizes)]
    cells = pairwise(*factors)
    for (first, one), (second, other) in itertools.combinations(enumerate(factors), 2):
        assert {(cell[first], cell[second]) for cell in cells} == set(itertools.product(one, other))
    assert len(cells) == len(set(cells))
    everything = list(itertools.product(*factors))
    assert set(cells) <= set(everything)
    assert len(cells) < len(everything) or len(factors) == 2
    assert cells == pairwise(*factors)


class Node:
    other: Any = None


def test_what_a_finalizer_lets_go_is_not_held() -> None:
    """Found by the second turn of the collector: in the first one the finalizer had it."""
    kept: dict[str, Any] = {}
    inner, outer = Node(), Node()
    inner.other, outer.other = inner, outer
    kept["inner"] = inner
    weakref.finalize(outer, kept.clear)
    references = [weakref.ref(inner), weakref.ref(outer)]
    del inner, outer
    assert helpers.holders(references) == []


def test_who_holds_what_is_alive_is_said() -> None:
    node, holder = Node(), Node()
    holder.other = node
    reference = weakref.ref(node)
    del node
    (found,) = helpers.holders([reference])
    assert found.startswith("Node is held by [")
    assert "other" in found or "Node" in found


def test_samples_are_parts_of_the_whole() -> None:
    tests = [f"tests/test_{name}.py::test_{number}[{case}]" for name in "abc" for number in range(20) for case in "xy"]
    parts = {tuple(test for test in tests if conftest.in_sample(test, 3, str(seed))) for seed in range(30)}
    assert len(parts) == 3
    assert sorted(test for part in parts for test in part) == sorted(tests)
    assert all(len(part) > len(tests) / 6 for part in parts)
    assert all(test.replace("x]", "y]") in part for part in parts for test in part)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGHUP", marks=pytest.mark.full)])
def test_signals_that_the_tests_were_started_to_ignore_still_end_their_children(name: str) -> None:
    """As in the background of a shell, or under nohup."""
    wanted = f"tests/unit/commands/test_leftovers.py::test_a_signal_that_asks_leaves_nothing[{name}-merge]"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", wanted],
        cwd=helpers.ROOT,
        preexec_fn=lambda: signal.signal(signal.Signals[name], signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_what_an_sdist_leaves_out_of_the_tests_exists() -> None:
    assert [name for name in conftest.NEEDS_EVIDENCE if not (helpers.ROOT / "tests" / name).is_file()] == []


def test_a_test_that_waits_forever_ends_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    """By the settings of pyproject.toml, with less patience."""
    test = tmp_path / "test_waits.py"
    test.write_text(
        "import threading\n"
        "def waits_here():\n    threading.Event().wait()\n"
        "def test_it():\n    threading.Thread(target=waits_here, daemon=True).start()\n    threading.Event().wait()\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-o", "faulthandler_timeout=1"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-p", "no:xdist", str(test)],
        capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode != 0
    assert "in waits_here" in done.stderr
    assert "in test_it" in done.stderr
