"""One process of tools/upstream_suites.py: some of upstream's tests in one mode, and each one's outcome.

It is run as a script in the folder of the suite: ``python upstream_child.py TASK.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDS_HUB = "needs the hub"
SKIPPED = "skipped"
NOTHING_YET = "no outcome"


def matching(patterns: Mapping[str, str], nodeid: str) -> str | None:
    """The first pattern that matches all of ``nodeid``. Only ``*`` is special: node ids are full of brackets."""
    for pattern in patterns:
        if re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), nodeid, re.DOTALL):
            return pattern
    return None


def in_sample(nodeid: str, one_in: int) -> bool:
    """Whether ``nodeid`` belongs to the fixed sample: the same tests on every machine and in every release."""
    return int(hashlib.sha256(nodeid.encode()).hexdigest(), 16) % one_in == 0


class Recorder:
    """A pytest plugin: selects tests, and notes each one's outcome and the repaired functions it went through."""

    def __init__(self, task: Mapping[str, Any], reached: set[str]) -> None:
        self.files: dict[str, int] = task["files"]
        self.patterns: dict[str, str] = task["deselected"]
        self.only: list[str] | None = task["only"]
        self.collected = 0
        self.sampled_out = 0
        self.deselected: Counter[str] = Counter()
        self.outcomes: dict[str, str] = {}
        self.through: Counter[str] = Counter()
        self._reached = reached

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Keep what the table takes."""
        self.collected = len(items)
        kept = [item for item in items if self._keeps(item.nodeid)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    def _keeps(self, nodeid: str) -> bool:
        pattern = matching(self.patterns, nodeid)
        if pattern is not None:
            self.deselected[pattern] += 1
            return False
        if not in_sample(nodeid, self.files[nodeid.partition("::")[0]]):
            self.sampled_out += 1
            return False
        return self.only is None or nodeid in self.only

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is an outcome as well."""
        if report.failed:
            print(report.longreprtext, file=sys.stderr)
            self.outcomes[report.nodeid] = "cannot be collected"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """From here on nothing has been called yet."""
        self.outcomes[nodeid] = NOTHING_YET
        quiet_aliases()
        self._reached.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: Any) -> Any:
        """The report gets the exception's type; it is gone afterwards."""
        report = yield
        report.error_type = error_type(call.excinfo.value) if call.excinfo is not None else None
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase, or one sub-test."""
        self.outcomes[report.nodeid] = joined(self.outcomes[report.nodeid], describe(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Count it for the patches it went through."""
        if is_executed(self.outcomes[nodeid]):
            self.through.update(self._reached)


def describe(report: Any) -> str:
    """``passed``, ``skipped``, ``xfailed``, ``xpassed``, ``failed: AssertionError``, ``error in setup: OSError``."""
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.passed else "xfailed"
    if not report.failed:
        return str(report.outcome)
    if report.error_type == NEEDS_HUB:
        return NEEDS_HUB
    return f"{'failed' if report.when == 'call' else f'error in {report.when}'}: {report.error_type}"


def joined(before: str, now: str) -> str:
    """The outcome of a test by its phases (and sub-tests): what is not ``passed``, in the order it was seen."""
    if before in (NOTHING_YET, "passed"):
        return now
    return before if now in ("passed", *before.split(", ")) else f"{before}, {now}"


def error_type(error: BaseException) -> str:
    """The name of its type; :data:`NEEDS_HUB` where the refused connection is what led to it."""
    todo, seen = [error], set[int]()
    while todo:
        current = todo.pop()
        # datasets says it in its message only.
        if type(current).__name__ == "LocalEntryNotFoundError" or "OfflineModeIsEnabled" in repr(current):
            return NEEDS_HUB
        seen.add(id(current))
        for cause in (current.__cause__, current.__context__):
            if cause is not None and id(cause) not in seen:
                todo.append(cause)
    return type(error).__name__


def refuse_hub() -> None:
    """HF_HUB_OFFLINE is not enough: peft's tests switch it off around their first access to a model."""
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    client = type(huggingface_hub.get_session())  # httpx's, or that of its successor

    def refuse(request: Any) -> None:
        raise OfflineModeIsEnabled(f"upstream's tests are run without the hub: {request.url}")

    huggingface_hub.set_client_factory(lambda: client(event_hooks={"request": [refuse]}))


def quiet_aliases() -> None:
    """``assertWarns`` reads ``__warningregistry__`` of every module. In some releases, transformers' aliases of old
    modules then import the module behind the alias, and with it torchvision, which nothing here needs.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and "__getattr__" in vars(module):
            vars(module).setdefault("__warningregistry__", {})


def watch_replacements(patches: Iterable[Any], reached: set[str]) -> None:
    """Note the ids of the patches whose replacements are called. Before the libraries are imported."""

    def watched(patch_id: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_call(*args: Any, **kwargs: Any) -> Any:
            reached.add(patch_id)
            return replacement(*args, **kwargs)

        return note_and_call

    for patch in patches:
        for target in patch.targets:
            object.__setattr__(target, "replacement", watched(patch.id, target.replacement))


def child(task: Mapping[str, Any]) -> int:
    # Last, and not this folder: upstream's package of tests is called `tests` too.
    sys.path[:] = [*(entry for entry in sys.path if Path(entry) != ROOT / "tools"), str(ROOT)]
    import gemma4_compat

    warnings.simplefilter("error", gemma4_compat.Gemma4CompatWarning)
    reached: set[str] = set()
    watch_replacements(gemma4_compat.patches(), reached)
    if task["refuse_hub"]:
        refuse_hub()
    recorder = Recorder(task, reached)
    arguments = ["-v", f"--tb={'short' if task['only'] else 'line'}", "--durations=30", "--color=no"]
    arguments += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    arguments += ["-W", "error::gemma4_compat.Gemma4CompatWarning", "--continue-on-collection-errors"]
    started = time.perf_counter()
    code = pytest.main([*arguments, *task["files"]], plugins=[recorder])
    result = {
        "gemma4_compat": gemma4_compat.__version__,
        "exit code": int(code),
        "wall_s": round(time.perf_counter() - started),
        "collected": recorder.collected,
        "sampled out": recorder.sampled_out,
        "deselected": recorder.deselected,
        "outcomes": recorder.outcomes,
        "through": recorder.through,
        "states": {key: [str(value.state), value.reason] for key, value in gemma4_compat.status().items()},
        "overridden": {key: value.overridden for key, value in gemma4_compat.status().items() if value.overridden},
    }
    Path(task["result"]).write_text(json.dumps(result), encoding="utf-8")
    return 0


def is_executed(outcome: str) -> bool:
    return outcome not in (SKIPPED, NEEDS_HUB, "cannot be collected", "absent")


if __name__ == "__main__":
    sys.exit(child(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
