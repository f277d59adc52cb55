"""Run reproductions in child processes, shim off and on, and judge what they found. Imports nothing upstream."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat import _versions
from gemma4_compat._engine import ISSUES
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._patch import Patch

STACK = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")

REPAIRED = "repaired"
NOT_AFFECTED = "not affected"
NOT_APPLICABLE = "not applicable"
REMAINS = "DEFECT REMAINS"
DISABLED = "skipped, DEFECT REMAINS"
FAILED = "PATCH FAILED"
CAUSED = "BROKEN BY THE PATCH"
OFF_REMAINS = "PATCH OFF, DEFECT REMAINS"
OFF_NOT_SEEN = "patch off, defect not seen"
_GOOD = frozenset({REPAIRED, NOT_AFFECTED, NOT_APPLICABLE, OFF_NOT_SEEN})

#: Seconds one child may take. A child takes seconds; importing everything from a cold network disk can take minutes.
TIMEOUT = 600


@dataclass(frozen=True)
class Finding:
    """One patch examined on this stack.

    Attributes:
        id: the patch.
        versions: releases of the libraries it concerns.
        without: the reproduction's result with every patch off (keys ``defect``, ``detail``, ``parity``,
            ``applicable``, ``seconds``, ``state``, ``reason``, ``detection``).
        with_shim: the same with this package as the environment configures it.
    """

    id: str
    versions: dict[str, str]
    without: dict[str, Any]
    with_shim: dict[str, Any]

    @property
    def verdict(self) -> str:
        state, there = self.with_shim["state"], self.without["defect"]
        if self.with_shim["defect"] and not there:
            return CAUSED
        if state == "failed":
            if there:
                return OFF_REMAINS
            # Code that is not known may be code without the defect; anything else that failed is our fault.
            return OFF_NOT_SEEN if self.with_shim["detection"] == "unknown" else FAILED
        if self.with_shim["defect"]:
            return DISABLED if state == "skipped" else REMAINS
        if there:
            return REPAIRED
        return NOT_AFFECTED if self.without["applicable"] else NOT_APPLICABLE

    @property
    def good(self) -> bool:
        return self.verdict in _GOOD

    @property
    def report(self) -> str | None:
        """What to tell us, and where, about a patch that could not be applied; None for any other."""
        if self.with_shim["state"] != "failed":
            return None
        ask = f"please report it at {ISSUES}"
        if self.verdict == OFF_NOT_SEEN:
            ask = f"upstream may have fixed it; {ask}, so that the patch's range is closed"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{ask}. Say: {self.id}: {self.with_shim['reason']} [{versions}]"

    def as_data(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "versions": self.versions,
            "without": self.without,
            "with": self.with_shim,
            "verdict": self.verdict,
            "report": self.report,
        }


def stack() -> dict[str, str]:
    """Installed releases of the libraries a reproduction needs.

    Raises:
        Gemma4CompatError: one is missing, or older than the oldest supported release.
    """
    versions = {name: _versions.installed(name) for name in STACK}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        raise Gemma4CompatError(
            f"{', '.join(missing)} not installed; the reproductions need {', '.join(STACK)}. "
            "Install them: pip install 'gemma4-compat[stack]'"
        )
    found = {name: str(version) for name, version in versions.items()}
    if too_old := [text for item in found.items() if (text := _versions.too_old(*item)) is not None]:
        raise Gemma4CompatError("\n".join(too_old))
    return found


def examine(patches: Sequence[Patch], *, keep: bool, note: Callable[[str], None]) -> Iterator[Finding]:
    """Reproduce each patch's defect without and with the shim; yields findings as they are complete.

    Args:
        patches: what to examine.
        keep: leave the folder with the tiny checkpoint, the adapters and the offloaded weights, and say where it is.
        note: called with lines for the user that are not findings.

    Raises:
        Gemma4CompatError: the tiny checkpoint cannot be built with this stack.
    """
    folder = Path(tempfile.mkdtemp(prefix="gemma4-compat-"))
    try:
        built = _child("build", folder, disabled="all")
        if "built" not in built:
            raise Gemma4CompatError(f"the tiny Gemma 4 checkpoint cannot be built: {built['detail']}")
        results: dict[tuple[str, bool], dict[str, Any]] = {}
        with ThreadPoolExecutor(max_workers=max(2, min(4, (os.cpu_count() or 2) // 4))) as pool:
            jobs = {
                pool.submit(_child, patch.id, folder, disabled="" if shim else "all"): (patch, shim)
                for patch in patches
                for shim in (False, True)
            }
            for job in as_completed(jobs):
                patch, shim = jobs[job]
                results[patch.id, shim] = job.result()
                if (patch.id, not shim) in results:
                    yield Finding(patch.id, _concerned(patch), results[patch.id, False], results[patch.id, True])
    finally:
        if keep:
            note(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)  # on Windows a memory-mapped file may outlive its reader


def _concerned(patch: Patch) -> dict[str, str]:
    names = [patch.distribution, *(_versions.requirement(text)[0] for text in patch.requires)]
    return {name: version for name in names if (version := _versions.installed(name)) is not None}


def _child(command: str, folder: Path, *, disabled: str = "") -> dict[str, Any]:
    """One reproduction in a process of its own. A child that dies is a defect, with the end of what it wrote."""
    environment = dict(os.environ, PYTHONWARNINGS=os.environ.get("PYTHONWARNINGS", "ignore"), HF_HUB_OFFLINE="1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.setdefault("OMP_NUM_THREADS", "1")  # a tiny model computes faster in one thread
    if disabled:
        environment["GEMMA4_COMPAT_DISABLE"] = disabled
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gemma4_compat._repro", command, str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _dead(f"no answer after {TIMEOUT} s")
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode != 0 or not last.startswith("{"):
        wrote = (done.stderr or done.stdout).strip().splitlines()
        return _dead(f"the process ended with {done.returncode}: {wrote[-1] if wrote else 'no output'}")
    result: dict[str, Any] = json.loads(last)
    return result


def _dead(detail: str) -> dict[str, Any]:
    result = {"defect": True, "detail": detail, "parity": None, "applicable": True, "seconds": None}
    return result | {"state": "unknown", "reason": detail, "detection": None}
