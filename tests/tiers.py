"""Which tests a run of pytest has: the quick ones, those of every push, those that a change touches, or all.

``quick`` is chosen by what each test cost when it was last recorded (:mod:`tests.durations`), within :data:`BUDGET`:
what is in :data:`FIRST`, then the shortest. Of a parametrized test it has the first case, or all if there is room.
Files without a quick test are not imported.
"""

from __future__ import annotations

import fnmatch
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.durations import Costs

#: CPU seconds of ``python -m pytest -n 2``: five minutes of two cores.
BUDGET = 600.0
#: CPU seconds that each process may import test files for.
COLLECTING = 12.0
#: pytest-xdist's workers: each imports every file of the tier.
PROCESSES = 2
#: CPU seconds that no test is seen to take: of these processes before their first test, of those that reproductions
#: are forked from, and of the reproductions. ``time python -m pytest -n 2`` says whether the sum is within the budget.
START = 230.0

#: What the quick tests have in any case: patterns of ``FILE::FUNCTION``, in all their cases.
FIRST = (
    "tests/patches/*::TestPromise::test_with_the_patch_it_is_gone",
    "tests/unit/engine/*",
    "tests/contract/test_metadata.py::*",
    "tests/contract/test_kinds.py::*",
    "tests/project/docs/test_errors_box.py::*",
    "tests/project/typing/*",
)
#: What they never have: a child works for a minute or more, for whichever test asks first, or outlives the test.
NEVER = (
    "tests/patches/*::TestPromise::test_without_*",
    "tests/contract/test_orderings.py::*",
    "tests/contract/test_undoing.py::*",
)

#: Rooms, and folders of rooms, whose tests are not in ``tests/unit/ROOM``.
ROOMS = {
    "cli": "tests/unit/commands",
    "generation/prefix_cache": "tests/unit/prefix_cache",
    "graphs": "tests/unit/generation",
}

Tier = Mapping[str, Mapping[str, bool]]  # by file and function: whether all cases are in it, or the first one alone


def quick(costs: Costs, budget: float = BUDGET, first: Iterable[str] = FIRST) -> Tier:
    """The tests of README's command. What was never recorded is in none, and runs.

    Args:
        costs: what was recorded.
        budget: CPU seconds. What is in ``first`` may exceed them.
        first: patterns of ``FILE::FUNCTION``.
    """
    tier: dict[str, dict[str, bool]] = {}
    wanted, other = [], []
    for file, functions in costs.items():
        for name in functions:
            if name and not _is_one(file, name, NEVER):
                (wanted if _is_one(file, name, first) else other).append((file, name))
    left, collecting = budget - START, COLLECTING

    def add(file: str, name: str, *, every: bool, declared: bool = False) -> None:
        nonlocal left, collecting
        one, total, _ = costs[file][name]
        known = tier.get(file, {}).get(name)
        seconds = total if every else one
        seconds -= one if known is False else 0.0
        imports = 0.0 if file in tier else costs[file].get("", (0.0,))[0]
        if declared or (seconds + imports * PROCESSES <= left and imports <= collecting):
            left -= seconds + imports * PROCESSES
            collecting -= imports
            tier.setdefault(file, {})[name] = every

    for file, name in wanted:
        add(file, name, every=True, declared=True)
    for file, name in sorted(other, key=lambda each: costs[each[0]][each[1]][0]):
        add(file, name, every=False)
    chosen = [(file, name) for file, name in other if name in tier.get(file, {})]
    for file, name in sorted(chosen, key=lambda each: costs[each[0]][each[1]][1]):
        add(file, name, every=True)
    return tier


def _is_one(file: str, name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(f"{file}::{name}", pattern) for pattern in patterns)


def seconds(tier: Tier, costs: Costs) -> float:
    """What the tier costs by what was recorded, in CPU seconds."""
    tests = (costs[file][name][every] for file, names in tier.items() for name, every in names.items())
    return START + sum(tests) + PROCESSES * collecting(tier, costs)


def collecting(tier: Tier, costs: Costs) -> float:
    """CPU seconds that each process takes to import the tier's files."""
    return sum(costs[file].get("", (0.0,))[0] for file in tier)


def changed(root: Path, since: str) -> list[Path]:
    """Files and folders of tests that belong to what changed in git since that commit, uncommitted work included.

    Raises:
        ValueError: this is no checkout of git, or it knows no such commit.
    """
    names: list[str] = []
    for command in (["ls-files", "--others", "--exclude-standard"], ["diff", "--name-only", since, "--"]):
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.partition("\n")[0]
            raise ValueError(f"--changed asks git what changed since {since}, which says: {said}")
        names += done.stdout.splitlines()
    found = (root / path for name in names for path in of_a_file(name))
    return sorted({path for path in found if path.exists()})


def of_a_file(name: str) -> list[str]:
    """Files and folders of tests that belong to a file of the repository, by their paths in it."""
    path = Path(name)
    top, *folders = path.parts
    if top == "tests":
        is_test = path.name.startswith("test_") and path.suffix == ".py"
        return [name] if is_test else [str(path.parent)] if len(folders) > 1 else []
    if top == "docs" or path.suffix == ".md":
        return ["tests/project/docs"]
    if top in ("tools", "benchmarks", "examples"):
        return ["tests/project/tools"]
    if top != "gemma4_compat":
        return []
    if len(folders) == 1:  # the face, errors
        return ["tests/unit/engine", "tests/contract"]
    if folders[0] == "patches":
        own = [f"tests/patches/{folders[1]}/test_{path.name}"] if len(folders) == 3 else []
        return [*own, "tests/contract"]
    name = folders[0].strip("_")
    room = ROOMS.get(name, f"tests/unit/{name}")
    inner = ROOMS.get(f"{name}/{folders[1]}", f"{room}/{folders[1]}")
    return [inner if (Path(__file__).parents[1] / inner).is_dir() else room]
