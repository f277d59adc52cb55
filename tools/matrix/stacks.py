"""The stacks of tests/matrix.toml, and the gates of the patches between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from packaging.requirements import Requirement

import gemma4_compat
from gemma4_compat import Patch
from gemma4_compat._engine import versions
from gemma4_compat.patches import registry
from tools import evidence

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "matrix.toml"
LIBRARIES = tuple(versions.OLDEST)


@dataclass(frozen=True)
class Stack:
    """One environment: exact pins, why it is in the matrix, and what of it CI runs.

    Attributes:
        name: its name in matrix.toml and in the results.
        pins: distribution -> release, the four libraries.
        why: what this stack is there to show.
        tests: "all" tests of every patch, or its "reproductions" only.
        ci: "" (not in CI), "gates" (in CI, the reproductions of patches that have a gate here), "all" (in CI, every
            patch's reproduction) or "suite" (in steps of its own, the whole test suite).
    """

    name: str
    pins: Mapping[str, str]
    why: str
    tests: str = "all"
    ci: str = ""


@dataclass(frozen=True)
class Gate:
    """A release at which a patch begins or ceases to be needed.

    Attributes:
        patch: the patch.
        distribution: the library whose release decides.
        last: the newest release below the bound.
        first: the oldest release at or above it.
    """

    patch: Patch
    distribution: str
    last: str
    first: str

    def __str__(self) -> str:
        return f"{self.patch.id}: {self.distribution} {self.last} | {self.first}"


def read(file: Path = TABLE) -> dict[str, Stack]:
    """The stacks of matrix.toml, by name."""
    table = tomllib.loads(file.read_text(encoding="utf-8"))["stacks"]
    found = {}
    for name, entry in table.items():
        rest = {key: value for key, value in entry.items() if key not in LIBRARIES}
        found[name] = Stack(name=name, pins={library: entry[library] for library in LIBRARIES}, **rest)
    return found


def results(folder: Path = evidence.EVIDENCE) -> dict[str, dict[str, Any]]:
    """What was measured in each stack, in the order of matrix.toml; the patches in that of the registry."""
    return evidence.matrix(read(), folder, [patch.id for patch in gemma4_compat.patches()])


def releases() -> dict[str, list[str]]:
    """Every measured release of the four libraries, from the supported floor up, oldest first."""
    return {library: list(registry.RELEASES[library]) for library in LIBRARIES}


def conditions(patch: Patch) -> dict[str, str]:
    """Distribution -> specifier: the patch is needed where all of them hold."""
    requirements = map(Requirement, patch.requires)
    return {patch.distribution: patch.affected, **{item.name: str(item.specifier) for item in requirements}}


def claimed(patch: Patch, pins: Mapping[str, str]) -> bool:
    """Whether the patch says that it is needed with these releases."""
    return all(versions.admits(specifier, pins[name]) for name, specifier in conditions(patch).items())


def gates(patch: Patch, listed: Mapping[str, Sequence[str]]) -> list[Gate]:
    """The gates of a patch above the supported floor: two neighbouring releases, one inside and one outside."""
    found = []
    for name, specifier in conditions(patch).items():
        inside = [versions.admits(specifier, release) for release in listed.get(name, ())]
        found += [
            Gate(patch, name, listed[name][index - 1], listed[name][index])
            for index in range(1, len(inside))
            if inside[index - 1] != inside[index]
        ]
    return found


def sides(gate: Gate, among: Iterable[Stack]) -> tuple[list[Stack], list[Stack]]:
    """The stacks just below and just above a gate in which this gate, and no other condition, decides."""
    others = {name: text for name, text in conditions(gate.patch).items() if name != gate.distribution}
    deciding = [
        stack for stack in among if all(versions.admits(text, stack.pins[name]) for name, text in others.items())
    ]
    below = [stack for stack in deciding if stack.pins[gate.distribution] == gate.last]
    above = [stack for stack in deciding if stack.pins[gate.distribution] == gate.first]
    return below, above


def pairs(gate: Gate, among: Iterable[Stack]) -> list[tuple[Stack, Stack]]:
    """The stacks just below and just above a gate that differ in nothing else."""
    below, above = sides(gate, among)
    alone = {gate.distribution: ""}
    return [(one, other) for one in below for other in above if {**one.pins, **alone} == {**other.pins, **alone}]


def patches_in_ci(stack: Stack, listed: Mapping[str, Sequence[str]]) -> list[Patch]:
    """What CI runs in a stack: every patch, or those that have a gate just here."""
    if stack.ci == "all":
        return list(gemma4_compat.patches())
    every = read().values()
    return [
        patch
        for patch in gemma4_compat.patches()
        if any(stack in pair for gate in gates(patch, listed) for pair in pairs(gate, every))
    ]
