"""Both sides of the search, and what comes of them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gemma4_compat
from tests.generated.search.differential import verdict
from tests.generated.search.differential.table import Entry
from tests.generated.search.differential.verdict import Judged, Result
from tests.generated.search.sequences_run import REPAIRED

ROOT = Path(__file__).resolve().parents[4]
#: Seconds for an entry.
LIMIT = 60.0


def references(entries: Sequence[Entry]) -> list[Entry]:
    """The calls of the entries on one device, where they are not among them."""
    names = {entry.name for entry in entries}
    ones = {one.name: one for one in (Entry(entry.call, "one", entry.kind) for entry in entries)}
    return [one for name, one in ones.items() if name not in names]


def without_value(entries: Sequence[Entry], off: dict[str, Result]) -> list[Entry]:
    """Those for which one device without the package does not say what is right: it is asked with the package."""
    return [entry for entry in references(entries) if off[entry.name]["status"] != "value"]


def side(
    entries: Sequence[Entry],
    work: Path,
    *,
    on: bool,
    repaired: bool = False,
    adapter_first: bool = False,
    plant: str | None = None,
    limit: float = LIMIT,
) -> dict[str, Result]:
    """What the entries give, by name; ``work`` has the checkpoints, which the first side makes.

    ``repaired``: without the package but for the patches of ``sequences_run.REPAIRED``, defects of one device.
    ``adapter_first``: models are dispatched after they got their adapters.

    Raises:
        RuntimeError: the process that runs them ended early.
    """
    out = Path(tempfile.mkdtemp(prefix="side-", dir=work))
    names = [entry.name for entry in entries]
    order = out / "order.json"
    given = {"limit": limit, "plant": plant, "adapter_first": adapter_first}
    order.write_text(json.dumps({"entries": names, "out": str(out), "work": str(work), **given}), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GEMMA4_COMPAT_")}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **({} if on else {"GEMMA4_COMPAT_DISABLE": _all_but_repaired() if repaired else "all"}),
    }
    command = [sys.executable, "-m", "tests.generated.search.differential.server", str(order)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the side with{'' if on else 'out'} the package ended early:\n{done.stderr[-4000:]}")
    return {name: pickle.loads((out / f"{number}.pkl").read_bytes()) for number, name in enumerate(names)}


def _all_but_repaired() -> str:
    return ",".join(sorted({patch.id for patch in gemma4_compat.patches()} - REPAIRED.keys()))


def judged(
    entries: Sequence[Entry], off: dict[str, Result], on: dict[str, Result], better: dict[str, Result] | None = None
) -> list[Judged]:
    """The verdict on each entry; ``better`` says what is right where one device without the package does not."""
    found = []
    for entry in entries:
        one = Entry(entry.call, "one", entry.kind).name
        right = _right((better or {}).get(one)) or _right(off.get(one)) or _right(on.get(one))
        alone = (better or {}).get(one) or off.get(one)
        results = off[entry.name], on[entry.name]
        found.append(verdict.judge(entry.name, *results, right, entry.call.tolerance, alone=alone))
    return found


def again(
    entries: Sequence[Entry], found: list[Judged], off: dict[str, Result], on: dict[str, Result], work: Path
) -> list[Judged]:
    """The verdicts once more, where worse entries may have the answer of one device without a known defect of it.

    And where upstream had a whole model: PEFT without the package undoes the placement of its base. Upstream is asked
    again there, for a model that gets its adapter first and is split then.
    """
    worse = [entry for entry, item in zip(entries, found) if item.verdict in verdict.FAILURES]
    if not worse:
        return found
    undone = [entry for entry in worse if entry.place != "one" and off[entry.name].get("whole")]
    if undone:
        off = off | side(undone, work, on=False, adapter_first=True)
    ones = {one.name: one for one in (Entry(entry.call, "one", entry.kind) for entry in worse)}
    return judged(entries, off, on, side(list(ones.values()), work, on=False, repaired=True))


def _right(result: Result | None) -> dict[str, Any] | None:
    return None if result is None or result["status"] != "value" else result.get("right", result["value"])


def groups(entries: Sequence[Entry], size: int = 150) -> list[list[Entry]]:
    """What one pair of processes does: calls with all their places, kind after kind."""
    of_calls: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        of_calls.setdefault((entry.kind, entry.call.name), []).append(entry)
    found: list[list[Entry]] = [[]]
    for _, several in sorted(of_calls.items(), key=lambda item: item[0][0]):
        if len(found[-1]) >= size:
            found.append([])
        found[-1] += several
    return found


def search(
    entries: Sequence[Entry],
    *,
    jobs: int = 1,
    limit: float = LIMIT,
    plant: str | None = None,
    tell: Callable[[list[Judged], str], Any] = lambda _done, _text: None,
) -> list[Judged]:
    """All entries on both sides, ``jobs`` groups at once; ``tell`` hears of each group as it is done."""
    results: list[Judged] = []

    def one(group: list[Entry]) -> list[Judged]:
        with tempfile.TemporaryDirectory(prefix="gemma4-differential-", ignore_cleanup_errors=True) as folder:
            off = side([*group, *references(group)], Path(folder), on=False, limit=limit)
            asked = [*group, *without_value(group, off)]
            on = side(asked, Path(folder), on=True, limit=limit, plant=plant)
            return again(group, judged(group, off, on), off, on, Path(folder))

    work = groups(entries)
    with ThreadPoolExecutor(jobs) as pool:
        for done in pool.map(one, work):
            results += done
            bad = sum(item.verdict in verdict.FAILURES for item in results)
            tell(done, f"{len(results)} of {len(entries)} entries, {bad} worse")
    return results
