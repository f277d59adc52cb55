"""Run a check: a child for the survey, one for each placement, one for the merge. Imports nothing upstream."""

from __future__ import annotations

import json
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma4_compat._doctor import processes
from gemma4_compat._doctor.check import errors
from gemma4_compat._engine.io import temporary
from gemma4_compat._errors import Gemma4CompatError

#: The type of the error of a child for which the time was too short.
TIME_OVER = "Timeout"
_PREFIX = "gemma4-compat-check-"
#: What a process does before its first step: it imports the libraries.
_START = "start"
_CHILD = ("-m", "gemma4_compat._doctor.check.child")
#: Seconds that a child gets at least, once it is started: importing the libraries takes a part of them.
_FEWEST = 20.0
#: Seconds of a survey: it reads configurations, and files from a cold network disk may take minutes.
_SURVEY = 300.0
#: Bytes that PyTorch may reserve in addition to a budget of what it may allocate, as docs/SMALL_CARD.md advises.
_FRAGMENTED = 1 << 29
#: Tokens of the shortest prompt whose speed is measured, and tokens that the longest one leaves for the answer.
_SHORT, _ANSWER = 64, 128


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for.

    Attributes:
        folder: of the checkpoint; None: the tiny model.
        adapter: folder of an adapter, or None.
        vram: as ``plan`` takes it, or None.
        image: a picture, or None.
        context: tokens per sequence that the placements are planned for.
        quantize: as for ``plan``.
        merge: also merge the adapter.
        minutes: after which no placement is started, and those that run are ended.
        quick: fewer placements, tokens and contexts.
    """

    folder: Path | None
    adapter: Path | None = None
    vram: str | None = None
    image: Path | None = None
    context: int = 4096
    quantize: str = "4bit"
    merge: bool = False
    minutes: float = 5.0
    quick: bool = False


@dataclass
class Outcome:
    """What a child said.

    Attributes:
        title: of what it did.
        order: what it was told.
        steps: the names of its steps, as far as it said.
        done: results by step.
        failed: described errors by step.
        skipped: steps for which no time was left.
        said: other events, by their name.
        seconds: that it took.
    """

    title: str
    order: dict[str, Any]
    steps: list[str] = field(default_factory=list)
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Found:
    """All that a check found: the survey, a placement each, and with ``--merge`` the same for the merged model."""

    settings: Settings
    survey: dict[str, Any]
    placements: list[Outcome] = field(default_factory=list)
    merge: Outcome | None = None
    merged: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0


class Check:
    """One check.

    Args:
        settings: what was asked for.
        progress: takes a line about what is done now, and whether it begins a new child.
    """

    def __init__(self, settings: Settings, progress: Callable[[str, bool], None]) -> None:
        self._settings, self._progress = settings, progress
        self._began = time.monotonic()
        self._took: dict[str, list[float]] = {}  # seconds by step
        self._left: list[str] = []  # titles of children that are not started
        self._planned: list[str] = []  # steps of a child, as far as known

    def run(self) -> Found:
        """Everything, in a working folder that is removed at the end.

        Raises:
            Gemma4CompatError: the model cannot be read, nothing fits, or the survey crashed.
        """
        with temporary.terminable(), tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
            work = Path(name)
            found = Found(self._settings, self._survey(work))
            found.placements = self._cases(found, work, "base", found.survey["folder"], found.survey["adapter_folder"])
            if self._settings.merge:
                self._merge(found, work)
        found.seconds = time.monotonic() - self._began
        return found

    def _survey(self, work: Path) -> dict[str, Any]:
        asked = self._settings
        order = {
            "kind": "survey",
            "folder": None if asked.folder is None else str(asked.folder),
            "work": str(work),
            "adapter": None if asked.adapter is None else str(asked.adapter),
            "vram": asked.vram,
            "context": asked.context,
            "quantize": asked.quantize,
            "quick": asked.quick,
        }
        outcome = self._child("survey of machine and model", order, _SURVEY)
        for error in outcome.failed.values():
            if error["refusal"]:
                raise Gemma4CompatError(error["message"])
            raise Gemma4CompatError(f"the survey of machine and model crashed: {errors.sentence(error)}")
        surveyed: dict[str, Any] = outcome.said["surveyed"]
        return surveyed

    def _cases(self, found: Found, work: Path, label: str, folder: str, adapter: str | None) -> list[Outcome]:
        """The placements of a model, each compared with those before."""
        survey, done = found.survey, []
        store = work / f"store-{label}"
        store.mkdir(exist_ok=True)
        self._left = [placement["title"] for placement in survey["placements"]]
        for placement in survey["placements"]:
            order = placement | {
                "kind": "case",
                "label": label,
                "folder": folder,
                "adapter": adapter,
                "kinds": survey["kinds"] if label == "base" else ["text"],
                "contexts": self._contexts(survey["context"]) if label == "base" else [],
                "longest": survey["context"],
                "quick": self._settings.quick,
                "image": None if self._settings.image is None else str(self._settings.image),
                "store": str(store),
                "work": str(work),
                "tape": self._settings.folder is None and survey["machine"]["gpu"] is None,
                "limit": self._limit(placement["planned"], survey["budget"]),
            }
            share = self._remaining() / max(len(self._left), 1)
            self._left.pop(0)
            done.append(self._child(placement["title"], order | {"seconds": share}, self._remaining()))
        return done

    def _merge(self, found: Found, work: Path) -> None:
        survey, out = found.survey, work / "merged"
        order = {
            "kind": "merge",
            "folder": survey["folder"],
            "adapter": survey["adapter_folder"],
            "out": str(out),
            "stored_quantized": survey["model"]["stored_quantized"],
            "quick": self._settings.quick,
        }
        found.merge = self._child("merging the adapter", order, self._remaining())
        if found.merge.said.get("written"):
            found.merged = self._cases(found, work, "merged", str(out), None)

    def _limit(self, planned: dict[str, int] | None, budget: int | None) -> int | None:
        """Bytes that PyTorch may reserve for a placement that was planned for ``--vram``; None for others."""
        if self._settings.vram is None or budget is None or planned is None or max(planned.values()) > budget:
            return None
        return budget + _FRAGMENTED

    def _contexts(self, longest: int) -> list[int]:
        """Prompts to time: a short one; unless quick, a quarter of the context, and what an answer leaves of it."""
        shortest, longer = min(_SHORT, longest // 4), longest - min(_ANSWER, longest // 2)
        return [shortest] if self._settings.quick else sorted({shortest, longest // 4, longer})

    def _remaining(self) -> float:
        return self._began + 60 * self._settings.minutes - time.monotonic()

    # One child

    def _child(self, title: str, order: dict[str, Any], limit: float) -> Outcome:
        outcome = Outcome(title, order)
        if limit <= 0:
            minutes = f"{self._settings.minutes:g}"
            message = f"not started: the {minutes} minutes were over (--minutes gives more)"
            outcome.failed["start"] = errors.of_process(TIME_OVER, message)
            return outcome
        limit = max(limit, _FEWEST)
        began = time.monotonic()
        self._progress(f"{title}{self._estimate(outcome)}", True)
        tiny = bool(order.get("tape")) or order.get("folder") is None
        environment = processes.environment({"HF_HUB_DISABLE_PROGRESS_BARS": "1"}, threads=not tiny)
        with processes.Process(*_CHILD, environment=environment) as process:
            process.tell(json.dumps(order), last=True)
            ended = self._listen(process, outcome, began + limit)
        outcome.seconds = time.monotonic() - began
        if not outcome.said.get("end"):
            step = outcome.said.get("step", _START)
            outcome.failed[f"after {step}" if step in outcome.done else step] = ended
        return outcome

    def _listen(self, process: processes.Process, outcome: Outcome, deadline: float) -> dict[str, Any]:
        """Take its events; how it ended, for the case that it did not say that it has."""
        step_began = time.monotonic()
        while True:
            event = process.event(deadline - time.monotonic())
            if event is None:
                break
            now = time.monotonic()
            if "done" in event or "failed" in event:
                name = event.get("done") or event["failed"]
                self._took.setdefault(name, []).append(now - step_began)
            _take(outcome, event)
            if "steps" in event:
                self._planned = [_START, *event["steps"]]
                self._took.setdefault(_START, []).append(now - step_began)
            if "step" in event:
                step_began = now
                self._progress(f"{outcome.title}: {event['step']}{self._estimate(outcome)}", False)
        return _ended(process)

    def _estimate(self, outcome: Outcome) -> str:
        """What is left, from the seconds that the same steps took; nothing before any has ended."""
        known = [seconds for took in self._took.values() for seconds in took]
        if not known:
            return ""
        usual = statistics.mean(known)
        expected = {step: statistics.mean(self._took.get(step, [usual])) for step in self._planned}
        over = {*outcome.done, *outcome.failed, *outcome.skipped, *([_START] if outcome.steps else [])}
        left = sum(seconds for step, seconds in expected.items() if step not in over)
        left += len(self._left) * sum(expected.values())
        left = min(left, max(self._remaining(), 0))
        return f"; about {left:.0f} s left" if left >= 1 else ""


def _ended(process: processes.Process) -> dict[str, Any]:
    """How it ended, as an error."""
    if process.late:
        return errors.of_process(TIME_OVER, "no result in the time there was (--minutes gives more)")
    status, output = process.ended()
    if status < 0:
        name = signal.Signals(-status).name
        why = ", as the system does when its memory is full" if name == "SIGKILL" else ""
        return errors.of_process(name, f"the process was ended by {name}{why}", output)
    return errors.of_process("ProcessEnded", processes.how(status, output), output)


def _take(outcome: Outcome, event: dict[str, Any]) -> None:
    if "done" in event:
        outcome.done[event["done"]] = event["found"]
    elif "failed" in event:
        outcome.failed[event["failed"]] = event["error"]
    elif "skipped" in event:
        outcome.skipped.append(event["skipped"])
    elif "steps" in event:
        outcome.steps = event["steps"]
    else:
        outcome.said |= event
