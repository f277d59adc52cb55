"""Run reproductions in child processes, shim off and on, and give verdicts. Imports nothing upstream."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._doctor.explain import imports
from gemma4_compat._doctor.reproductions import children
from gemma4_compat._engine import versions as _versions
from gemma4_compat._engine.io import address, shadowed, temporary
from gemma4_compat._engine.patch import Patch
from gemma4_compat._engine.reports.words import Verdict
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._lab.workspace import Workspace

_PREFIX = "gemma4-compat-"
#: Free bytes asked for: twice what all reproductions wrote on a CPU (241 MiB; `doctor --keep`, then `du`).
ROOM = 512 << 20

STACK = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")

#: Reproductions that take seconds: they begin first, so that none is waited for in the end.
LONG = frozenset(
    {
        "accelerate-tied-devices",
        "peft-adalora-devices",
        "peft-input-devices",
        "peft-shared-devices",
        "peft-unilora-frod",
        "transformers-auto-map",
        "transformers-embedding-devices",
        "transformers-per-layer-devices",
        "transformers-quantize-offloaded",
    }
)


@dataclass(frozen=True)
class Finding:
    """One patch examined on this stack.

    Attributes:
        id: the patch.
        versions: installed releases of the libraries it concerns.
        without: the reproduction's result with every patch off (keys ``defect``, ``detail``, ``parity``,
            ``applicable``, ``seconds``, ``state``, ``reason_code``, ``reason``, ``detection``).
        with_shim: the result with this package as the environment configures it.
    """

    id: str
    versions: dict[str, str]
    without: dict[str, Any]
    with_shim: dict[str, Any]

    @property
    def verdict(self) -> Verdict:
        """What became of the defect, and of the patch."""
        state, without = self.with_shim["state"], self.without["defect"]
        if self.with_shim["defect"] and not without:
            return Verdict.BROKEN
        if state == "failed":
            if without:
                return Verdict.FAILED_REMAINS
            # Unknown code may be free of the defect; any other failure is ours.
            return Verdict.FAILED_NOT_SEEN if self.with_shim["detection"] == "unknown" else Verdict.FAILED
        if self.with_shim["defect"]:
            return Verdict.OFF_REMAINS if state == "skipped" else Verdict.REMAINS
        if without:
            return Verdict.REPAIRED
        return Verdict.NOT_NEEDED if self.without["applicable"] else Verdict.NOT_APPLICABLE

    @property
    def good(self) -> bool:
        """Whether no defect remains and nothing failed."""
        return self.verdict.good

    @property
    def report(self) -> str | None:
        """What to report, and where, about a patch that could not be applied; None for other patches."""
        if self.with_shim["state"] != "failed":
            return None
        request = f"please {address.report_request()}"
        if self.verdict is Verdict.FAILED_NOT_SEEN:
            request = f"upstream may have fixed it; {request}, so that the patch's range is closed"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{request}. Say: {self.id}: {self.with_shim['reason']} [{versions}]"

    def as_data(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {
            "id": self.id,
            "versions": self.versions,
            "without": self.without,
            "with": self.with_shim,
            "verdict": str(self.verdict),
            "report": self.report,
        }


def stack(what: str = "the reproductions need") -> dict[str, str]:
    """Installed releases of the libraries a reproduction needs; ``what`` needs them, for the message.

    Raises:
        Gemma4CompatError: one is missing, or older than the oldest supported release.
    """
    versions = {name: _versions.installed(name) for name in STACK}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        raise Gemma4CompatError(
            f"{', '.join(missing)} not installed; {what} {', '.join(STACK)}. Install them: {address.install('stack')}"
        )
    found = {name: str(version) for name, version in versions.items()}
    if too_old := [text for item in found.items() if (text := _versions.too_old(*item)) is not None]:
        raise Gemma4CompatError("; ".join(too_old))
    return found


def examine(patches: Sequence[Patch], *, keep: bool, note: Callable[[str], None]) -> Generator[Finding]:
    """Reproduce each patch's defect without and with the shim; yields each finding when it is complete.

    Args:
        patches: what to examine.
        keep: keep the folder with the tiny checkpoints, the adapters and the offloaded weights, and print its path.
        note: called with lines for the user that are not findings.

    Raises:
        Gemma4CompatError: the tiny checkpoint cannot be built with this stack, or there is no room for it.
    """
    _tidy(note)
    shadowed.refuse(*STACK)
    try:
        folder = temporary.Folder(Path(tempfile.gettempdir()), _PREFIX)
    except OSError as error:
        raise Gemma4CompatError(
            f"no temporary folder can be made ({error.strerror or error}): {tempfile.gettempdir()!r}. Set TMPDIR to a "
            "folder that can be written"
        ) from error
    try:
        _refuse_without_room(folder.path)
        with temporary.terminable():
            yield from _examined(patches, folder.path)
    finally:
        if keep:
            folder.release()
            note(f"kept: {folder.path}")
        else:
            folder.remove()


def _tidy(note: Callable[[str], None]) -> None:
    """Remove what a killed doctor left."""
    left, _, _ = temporary.leftovers(Path(tempfile.gettempdir()), _PREFIX)
    for leftover in left:
        temporary.remove(leftover)
        note(f"removed {leftover}, left by an earlier doctor that was killed")


def _refuse_without_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < ROOM:
        raise Gemma4CompatError(
            f"{str(folder.parent)!r} has {free} bytes free and the tiny checkpoints need {ROOM}. Free some space, or "
            "set TMPDIR to a folder on another disk"
        )


def _examined(patches: Sequence[Patch], folder: Path) -> Iterator[Finding]:
    results: dict[tuple[str, bool], dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        run, jobs = _built(folder, stack)
        for patch, shim, result in _results(patches, run, jobs, stack):
            results[patch.id, shim] = result
            if (patch.id, not shim) in results:
                yield Finding(patch.id, _concerned(patch), results[patch.id, False], results[patch.id, True])


_Run = Callable[[str, bool], dict[str, Any]]


def _built(folder: Path, stack: contextlib.ExitStack) -> tuple[_Run, int]:
    """Build the checkpoints. Returns a function that runs a command, without or with the shim, and how many at once.

    Each side has its own folder, so that neither finds what the other has built. Both begin with the same bytes,
    which were built without the shim.

    Raises:
        Gemma4CompatError: they cannot be built.
    """
    cores = _cores()
    off, on = folder / "without", folder / "with"
    off.mkdir()
    if children.can_fork():
        with contextlib.ExitStack() as servers:
            # Both import the libraries meanwhile.
            without, with_shim = (servers.enter_context(children.Forks(*side)) for side in ((off, "all"), (on, "")))
            built = _checked(without("build"))
            Workspace(off).copied(on)
            if built["forks"]:
                stack.push(servers.pop_all())
                # One more than cores: a process that loads models for its forks takes no command meanwhile.
                return lambda command, shim: (with_shim if shim else without)(command), min(16, cores + 1)
    else:
        stack.callback(children.end)
        _checked(children.alone("build", off, disabled="all"))
        Workspace(off).copied(on)
    # Processes that mostly import the libraries.
    jobs = 2 * max(1, min(8, cores // 4))
    return lambda command, shim: children.alone(command, on if shim else off, disabled="" if shim else "all"), jobs


def _checked(built: dict[str, Any]) -> dict[str, Any]:
    if "built" not in built:
        detail = built["detail"]
        raise Gemma4CompatError(f"the tiny Gemma 4 checkpoint cannot be built: {detail}{imports.advice(detail)}")
    return built


def _cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2


def _results(
    patches: Sequence[Patch], run: _Run, jobs: int, stack: contextlib.ExitStack
) -> Iterator[tuple[Patch, bool, dict[str, Any]]]:
    """The result of each reproduction without the shim (False) and with it (True), as they complete.

    Both are in one queue, so that no core waits for the longer half.
    """
    pool = ThreadPoolExecutor(jobs)
    first = sorted(patches, key=lambda patch: patch.id not in LONG)
    futures = {pool.submit(run, patch.id, shim): (patch, shim) for patch in first for shim in (True, False)}
    try:
        for future in as_completed(futures):
            yield *futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()
        stack.close()  # ends the processes that the pool's threads wait for
        pool.shutdown()


def _concerned(patch: Patch) -> dict[str, str]:
    names = [patch.distribution, *(_versions.requirement(text)[0] for text in patch.requires)]
    return {name: version for name in names if (version := _versions.installed(name)) is not None}
