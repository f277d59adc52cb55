"""``bisect``: the first and the last affected release of a library."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gemma4_compat
from gemma4_compat import Patch
from gemma4_compat._engine import versions
from tools.matrix import UsageError, environments, index, stacks
from tools.matrix.stacks import LIBRARIES


@dataclass(frozen=True)
class Bounds:
    """What a bisection found: the neighbours of the affected releases; None where the listed releases end."""

    last_good_before: str | None
    first_bad: str
    last_bad: str
    first_good_after: str | None

    @property
    def specifier(self) -> str:
        """The range to write."""
        below = f">={self.first_bad}"
        return below if self.first_good_after is None else f"{below},<{self.first_good_after}"


def boundaries(candidates: Sequence[str], known_bad: str, is_bad: Callable[[str], bool]) -> Bounds:
    """Where the run of affected releases around ``known_bad`` begins and ends; each side by halving.

    ``candidates`` are sorted. On each side of ``known_bad`` affected releases must not come back after good ones: a
    bisection cannot see that, the matrix can.

    Raises:
        ValueError: ``known_bad`` is not affected.
    """
    middle = candidates.index(known_bad)
    if not is_bad(known_bad):
        raise ValueError(f"the defect is not seen with {known_bad}, so there is nothing to bisect from it")

    def edge(outermost: int, step: int) -> int:
        """The affected candidate farthest from the middle, toward ``outermost``."""
        bad, good = middle, outermost + step  # beyond the end nothing is known; it stands for "good"
        if is_bad(candidates[outermost]):
            return outermost
        good = outermost
        while abs(good - bad) > 1:
            probe = (good + bad) // 2
            bad, good = (probe, good) if is_bad(candidates[probe]) else (bad, probe)
        return bad

    first, last = edge(0, -1), edge(len(candidates) - 1, +1)
    return Bounds(
        last_good_before=candidates[first - 1] if first > 0 else None,
        first_bad=candidates[first],
        last_bad=candidates[last],
        first_good_after=candidates[last + 1] if last + 1 < len(candidates) else None,
    )


def bisect(options: argparse.Namespace) -> int:
    """Bisect, print the range to write, and compare it with the one that the patch states."""
    patches = {patch.id: patch for patch in gemma4_compat.patches()}
    known = stacks.read()
    if options.patch not in patches:
        raise UsageError(f"no patch has the id {options.patch!r}; ids: {', '.join(patches)}")
    if options.library not in LIBRARIES:
        raise UsageError(f"{options.library!r} is none of {', '.join(LIBRARIES)}")
    if options.stack not in known:
        raise UsageError(f"no stack is named {options.stack!r}; tests/matrix.toml has {', '.join(known)}")
    patch, base = patches[options.patch], known[options.stack]
    candidates = index.releases(options.library)
    bad = options.bad or _affected_release(patch, options.library, candidates)
    if bad not in candidates:
        raise UsageError(f"{options.library} {bad} is not among {', '.join(candidates)}")
    seen: dict[str, bool] = {}

    def is_bad(release: str) -> bool:
        if release not in seen:
            pins = {**base.pins, options.library: release}
            folder = options.work / f"bisect-{options.library}-{release}"
            try:
                python = environments.build(folder, [f"{name}=={pin}" for name, pin in pins.items()])
                found = reproduce(patch, python)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            seen[release] = found["defect"]
            said = "affected" if found["defect"] else "good" if found["applicable"] else "good (not applicable)"
            print(f"{options.library} {release:<10} {said:<22} {found['detail'][:150]}", flush=True)
        return seen[release]

    print(f"{patch.id}, {options.library}; the rest: " + ", ".join(
        f"{name} {pin}" for name, pin in base.pins.items() if name != options.library))  # fmt: skip
    try:
        found = boundaries(candidates, bad, is_bad)
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    return report(patch, options.library, candidates, found)


def report(patch: Patch, library: str, candidates: Sequence[str], found: Bounds) -> int:
    """Print what was found beside what the patch states; 1 where they differ."""
    print(f"\naffected:   {library} {found.first_bad} - {found.last_bad}")
    print(f"good before {found.last_good_before or '(nothing older is supported)'}, "
          f"good after {found.first_good_after or '(no newer release)'}")  # fmt: skip
    print(f"to write:   {library}{found.specifier}")
    stated = stacks.conditions(patch).get(library)
    print(f"written:    {library}{stated}" if stated is not None else f"the patch says nothing of {library}")
    if stated is not None:
        differ = [r for r in candidates if versions.admits(stated, r) != versions.admits(found.specifier, r)]
        print("the two agree on every release" if not differ else f"THEY DIFFER on {', '.join(differ)}")
        return 1 if differ else 0
    return 0


def _affected_release(patch: Patch, library: str, candidates: Sequence[str]) -> str:
    if library == patch.distribution:
        return patch.measured
    inside = [release for release in candidates if versions.admits(stacks.conditions(patch).get(library, ""), release)]
    return inside[-1]


def reproduce(patch: Patch, python: Path) -> dict[str, Any]:
    """The reproduction without the shim in another environment."""
    with tempfile.TemporaryDirectory() as folder:
        environment = environments.child_environment() | {"GEMMA4_COMPAT_DISABLE": "all"}
        found: dict[str, Any] = {}
        for command in ("build", patch.id):
            done = subprocess.run(
                [str(python), "-m", "gemma4_compat._doctor.reproductions.child", command, folder],
                env=environment, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False,
            )  # fmt: skip
            last = done.stdout.strip().rpartition("\n")[2]
            if not last.startswith("{"):
                wrote = (done.stderr or done.stdout).strip().splitlines()
                raise RuntimeError(f"the reproduction ended with {done.returncode}: {wrote[-1] if wrote else ''}")
            found = json.loads(last)
        return found
