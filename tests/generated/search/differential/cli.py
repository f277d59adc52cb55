"""``python -m tests.generated.search.differential [--only PATTERN] [--jobs N] [--stack-json OUT]``: what is worse
with it?

Every entry runs without the package and with it, each time in a process of its own. Exit status 0: no outcome that is
right without the package is not right with it, no ``except`` misses an error that it caught, nothing hangs.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.generated.search.differential import part, runner, verdict
from tests.generated.search.differential.table import Entry, entries
from tests.generated.search.differential.verdict import Judged


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generated.search.differential", description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", help="a regular expression that entries' names must have")
    parser.add_argument("--ci", action="store_true", help="the part that the fast suite runs")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=runner.LIMIT, help="seconds for an entry")
    parser.add_argument("--plant", metavar="MODULE:FUNCTION", help="call this first where the package is on")
    parser.add_argument("--stack-json", type=Path, metavar="OUT", help="a file for what was found")
    parser.add_argument(
        "--again",
        type=Path,
        metavar="FILE",
        help="run what failed in this result again, and write it with that",
    )
    parser.add_argument("--list", action="store_true", help="name the entries, run none")
    parser.add_argument("--all", action="store_true", help="print every entry, not only what is worse")
    options = parser.parse_args(argv)
    before = json.loads(options.again.read_text(encoding="utf-8")) if options.again else None
    chosen = [
        entry
        for entry in (part.part() if options.ci else entries())
        if (options.only is None or re.search(options.only, entry.name))
        and (not before or entry.name in before["worse"])
    ]
    if not chosen:
        parser.error("no entry has such a name; --list names them")
    if options.list:
        print("\n".join(entry.name for entry in chosen))
        print(counted(chosen))
        return 0
    started = time.perf_counter()
    found = runner.search(
        chosen,
        jobs=options.jobs,
        limit=options.limit,
        plant=options.plant,
        tell=lambda done, text: print(report(done, everything=options.all), text, sep="\n", flush=True),
    )
    counts = collections.Counter(item.verdict for item in found)
    print(", ".join(f"{number} {name}" for name, number in counts.most_common()))
    print(f"{counted(chosen)}, {time.perf_counter() - started:.0f} s")
    if before is not None:
        options.again.write_text(written(mended(before, found, command(options))), encoding="utf-8")
    if options.stack_json is not None:
        options.stack_json.write_text(written(summary(found, command(options))), encoding="utf-8")
    return 1 if any(item.verdict in verdict.FAILURES for item in found) else 0


def command(options: argparse.Namespace) -> str:
    """What repeats the run."""
    words = ["python -m tests.generated.search.differential"]
    words += ["--ci"] if options.ci else []
    words += [f"--only '{options.only}'"] if options.only else []
    words += [f"--again {options.again.name}"] if options.again else []
    return " ".join(words)


def counted(chosen: Sequence[Entry]) -> str:
    """How much that is, in words."""
    return f"{len({entry.call.name for entry in chosen})} calls, {len(chosen)} entries"


def report(found: Sequence[Judged], *, everything: bool = False) -> str:
    """What is worse, with tracebacks."""
    lines = []
    for item in found:
        if everything or item.verdict in verdict.FAILURES:
            lines.append(f"{item.verdict}: {item.name}\n  without: {item.off}\n  with:    {item.on}")
            if item.trace and item.verdict in verdict.FAILURES:
                lines.append("    " + "\n    ".join(item.trace.splitlines()[-12:]))
    return "\n".join(lines)


def words(outcome: str) -> str:
    """An outcome, short: of a wrong answer that it is one."""
    return "wrong" if outcome.startswith("wrong") else outcome if len(outcome) <= 110 else f"{outcome[:107]}..."


def summary(found: Sequence[Judged], command: str) -> dict[str, Any]:
    """What was found, as JSON-able data. An outcome is a number; ``right`` names calls with no other outcome."""
    from gemma4_compat import __version__
    from gemma4_compat._doctor.reproductions import findings

    shown = {
        item.name: None if item.verdict == verdict.ABSENT else (words(item.off), words(item.on)) for item in found
    }
    return {
        "search": "differential",
        "command": command,
        "gemma4_compat": __version__,
        "date": datetime.date.today().isoformat(),
        "versions": findings.stack(),
        "python": platform.python_version(),
        "calls": len({name.rsplit(" ", 2)[0] for name in shown}),
        "entries": len(found),
        "verdicts": dict(collections.Counter(item.verdict for item in found).most_common()),
        "worse": {item.name: [item.off, item.on] for item in found if item.verdict in verdict.FAILURES},
        **_numbered(shown),
    }


def _shown(item: Judged) -> tuple[str, str] | None:
    return None if item.verdict == verdict.ABSENT else (words(item.off), words(item.on))


def _numbered(shown: dict[str, tuple[str, str] | None]) -> dict[str, Any]:
    """Outcomes of entries without and with the package, each written once; None: absent."""
    outcomes_in_words = sorted({text for pair in shown.values() if pair for text in pair} | {"right"})
    number = {text: index for index, text in enumerate(outcomes_in_words)}
    calls: dict[str, dict[str, str]] = {}
    for full, pair in shown.items():
        name, place, kind = full.rsplit(" ", 2)
        outcomes = calls.setdefault(name, {})
        if pair == ("right", "right"):
            continue
        outcome = "absent" if pair is None else f"{number[pair[0]]} {number[pair[1]]}"
        outcomes[outcome] = " ".join(filter(None, [outcomes.get(outcome), f"{place}/{kind}"]))
    return {
        "outcomes": outcomes_in_words,
        "right": [name for name, outcomes in calls.items() if not outcomes],
        "found": {name: outcomes for name, outcomes in calls.items() if outcomes},
    }


def mended(before: dict[str, Any], again: Sequence[Judged], command: str) -> dict[str, Any]:
    """A result whose failing entries ran again: all of them, or the counts would be wrong.

    Raises:
        ValueError: ``again`` are other entries than those that failed.
    """
    if {item.name for item in again} != before["worse"].keys():
        raise ValueError(f"{len(again)} entries ran again, {len(before['worse'])} had failed")
    new = summary(again, command)
    words_before = before["outcomes"]
    shown: dict[str, tuple[str, str] | None] = {}
    for name in before["right"]:
        shown[f"{name} one E2B"] = ("right", "right")  # names the call
    for name, outcomes in before["found"].items():
        for outcome, places in outcomes.items():
            off, _, on = outcome.partition(" ")
            pair = None if outcome == "absent" else (words_before[int(off)], words_before[int(on)])
            shown |= {" ".join([name, *place.split("/")]): pair for place in places.split()}
    for item in again:
        shown[item.name] = _shown(item)
    counts = collections.Counter({kind: n for kind, n in before["verdicts"].items() if kind not in verdict.FAILURES})
    counts.update(new["verdicts"])
    ran_again = {key: new[key] for key in ("command", "date", "versions", "python", "entries")}
    return {
        **before,
        "again": [*before.get("again", []), ran_again],
        "verdicts": dict(counts.most_common()),
        "worse": new["worse"],
        **_numbered(shown),
    }


def written(data: dict[str, Any]) -> str:
    """A line for each call."""
    rows = [f"  {json.dumps(name)}: {json.dumps(outcomes)}" for name, outcomes in data["found"].items()]
    head = json.dumps({key: value for key, value in data.items() if key != "found"}, indent=1, ensure_ascii=False)
    return f'{head[:-2]},\n "found": {{\n' + ",\n".join(rows) + "\n }\n}\n"
