"""docs/UPSTREAM_LIMITS.md: what upstream cannot do on Gemma 4, from the committed runs of the differential search."""

from __future__ import annotations

import json
from typing import Any

from tests.search.differential.calls import load
from tests.search.differential.table import CALLS
from tools.pages.markers import ROOT, shorten

STACKS = ("newest", "middle", "thread")
_INTRODUCTION = """\
# What upstream cannot do

{calls} calls that people make on a model were run in {entries} cases, without the package and with it: on one
device, with parts in host memory, and with parts on disk, in bf16, 4-bit and 8-bit, with and without adapters. A
stack with fewer cases in the table was given the part that CI runs. The right outcome is that of one device
without the package, or what the call itself says. An outcome that is right without the package and not with it, or
an error that the same `except` no longer catches, is worse: a defect. Those that are open are named in
`tests/tools/test_differential_search.py` (`OPEN`).

```bash
python -m tests.search.differential --jobs 2                      # all of it
python -m tests.search.differential --only 'states/' --jobs 2     # some
python -m tests.search.differential --stack-json docs/evidence/search/differential-newest.json
```
"""
_BOTH = """\
## What does not work with the package either

Many of these errors are right: a folder that is not there, an option that does not exist. "The same" is the type and
the text of the error, or another wrong answer.
"""
_BETTER = """\
## What works with the package only
"""


def runs() -> dict[str, Any]:
    """The committed runs, by stack."""
    files = {stack: ROOT / "docs" / "evidence" / "search" / f"differential-{stack}.json" for stack in STACKS}
    return {stack: json.loads(file.read_text(encoding="utf-8")) for stack, file in files.items() if file.exists()}


def page() -> str:
    """docs/UPSTREAM_LIMITS.md, whole."""
    found = runs()
    calls, entries = (max(run[what] for run in found.values()) for what in ("calls", "entries"))
    parts = [_INTRODUCTION.format(calls=calls, entries=f"{entries:,}"), _table(found)]
    parts += [_BOTH, _rows(found, repaired=False), _BETTER, _rows(found, repaired=True)]
    return "\n".join(parts).rstrip() + "\n"


def _table(runs: dict[str, Any]) -> str:
    rows = ["| stack | cases | equal | better | worse | not in this release |", "|---|---|---|---|---|---|"]
    for stack, run in runs.items():
        stands = ", ".join(f"{name} {run['versions'][name]}" for name in ("transformers", "accelerate", "peft"))
        found = run["verdicts"]
        rows.append(
            f"| {stack}: {stands} ([raw](evidence/search/differential-{stack}.json), {run['date']}) "
            f"| {run['entries']} | {found.get('equal', 0)} "
            f"| {found.get('better', 0)} | {len(run['worse'])} | {found.get('absent', 0)} |"
        )
    return "\n".join(rows) + "\n"


def _rows(runs: dict[str, Any], *, repaired: bool) -> str:
    """A row for each call and outcome: where, in which stacks, and the words."""
    found: dict[tuple[str, str, str], dict[str, set[str]]] = {}
    for stack, run in runs.items():
        for call, outcomes in run["found"].items():
            for outcome, names in outcomes.items():
                if outcome == "absent":
                    continue
                off, on = (run["outcomes"][int(index)] for index in outcome.split())
                if off == "right" or (on == "right") != repaired:
                    continue
                places = found.setdefault((call, _kind(off), _kind(on)), {})
                places.setdefault(stack, set()).update(names.split())
    load()
    head = ["| call | where | without | with |", "|---|---|---|---|"]
    if repaired:
        head = ["| call | where | without |", "|---|---|---|"]
    rows = []
    for (call, off, on), stacks in sorted(found.items()):
        where = _where(set().union(*stacks.values()))
        if len(stacks) < len(runs):
            where += f" ({', '.join(stacks)})"
        variant = call.partition("[")[2].rstrip("]")
        name = CALLS[call].about + (f": {variant}" if variant else "")
        rows.append(
            f"| {name.replace('|', chr(92) + '|')} | {where} | {off} |"
            + ("" if repaired else f" {'the same' if on == off else on} |")
        )
    return "\n".join([*head, *rows]) + "\n"


def _kind(outcome: str) -> str:
    """The type of an error, or that the answer was wrong."""
    if outcome.startswith("wrong"):
        return "wrong"
    name, _, text = outcome.partition(": ")
    return f"`{name}`" if not text else f"`{name}`: {shorten(text.replace('`', ''), 80)}"


def _where(names: set[str]) -> str:
    """Places and kinds of model, such as ``ram, disk (E2B, 12B)``."""
    places = sorted({name.partition("/")[0] for name in names}, key=("one", "ram", "disk", "embeddings").index)
    words = {"one": "one device", "ram": "host memory", "disk": "disk", "embeddings": "embeddings in host memory"}
    kinds = sorted({name.partition("/")[2] for name in names})
    return f"{', '.join(words[place] for place in places)}: {', '.join(kinds)}"
