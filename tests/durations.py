"""What each test costs, as a run measured it: ``python -m pytest -n 2 --record`` writes ``tests/durations.json``.

Seconds are of CPU time, of the test's process and of the children that it waited for, so that a busy machine changes
little. A test function has the seconds of its first case (with what it alone had set up), of all its cases, and their
number; a file has the seconds of its import under ``""``.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_suffix(".json")
Costs = dict[str, dict[str, list[float]]]  # by file and test function: first case, all cases, number of cases


def clock() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


class Recorder:
    """Notes what imports and tests cost; in a worker of pytest-xdist, for the process that started it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._costs = config, Costs()

    def _note(self, file: str, function: str, seconds: float) -> None:
        entry = self._costs.setdefault(file, {}).setdefault(function, [round(seconds, 3), 0.0, 0])
        entry[1], entry[2] = round(entry[1] + seconds, 3), entry[2] + 1

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[Any]:
        begun = clock()
        report = yield
        if isinstance(collector, pytest.Module):
            self._note(collector.nodeid, "", clock() - begun)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        begun = clock()
        done = yield
        file, _, function = item.nodeid.partition("[")[0].partition("::")
        self._note(file, function, clock() - begun)
        return done

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for file, functions in getattr(node, "workeroutput", {}).get("costs", {}).items():
            for function, (first, every, count) in functions.items():
                entry = self._costs.setdefault(file, {}).setdefault(function, [first, 0.0, 0])
                entry[1], entry[2] = round(entry[1] + every, 3), entry[2] + count
                if not function:
                    entry[0] = min(entry[0], first)

    def pytest_sessionfinish(self) -> None:
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["costs"] = self._costs

    def pytest_terminal_summary(self) -> None:
        known = read() | self._costs
        lines = [f" {json.dumps(file)}: {json.dumps(functions)}" for file, functions in sorted(known.items())]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


@functools.cache
def read() -> Costs:
    """What was recorded last."""
    found: Costs = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return found
