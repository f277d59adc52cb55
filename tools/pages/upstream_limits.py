"""docs/UPSTREAM_LIMITS.md: what upstream cannot do on Gemma 4, from the committed runs of the differential search."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.generated.search.differential.calls import load
from tests.generated.search.differential.table import CALLS
from tools.pages.markers import ROOT, shorten

STACKS = ("newest", "middle", "thread")
_INTRODUCTION = """\
# What upstream cannot do

{calls} calls that people make on a model were run in {entries} cases, without the package and with it: on one
device, with parts in host memory, and with parts on disk, in bf16, 4-bit and 8-bit, with and without adapters. A
stack with fewer cases in the table ran the calls of its date. The right outcome is that of one device without the
package, or what the call itself specifies. It counts as worse, and as a defect, if an outcome is right without
the package and not with it, or if the same `except` no longer catches an error. Errors inside upstream's own code
(`'NoneType' object has no attribute ...`) are an exception, because nobody catches them, and so is the pickle of a
split model, which no hook allows. Open defects are named
in `tests/generated/search/test_differential_search.py` (`OPEN`).

Two comparisons need care. `PeftModel.from_pretrained` without the package undoes the placement of its base, so the
model is whole again and can do whatever a whole model can. If that makes an outcome look worse, upstream runs again
with a model that gets its adapter first and is split afterwards. And if an error became a wrong answer that one device
also gives, the fault is one device's.

```bash
python -m tests.generated.search.differential --jobs 2                      # all of it
python -m tests.generated.search.differential --only 'states/' --jobs 2     # some
python -m tests.generated.search.differential \\
    --stack-json docs/evidence/search/differential-newest.json
```
"""
_BOTH = """\
## What does not work with the package either

Many of these errors are right: a missing folder, an option that does not exist. A single outcome is the same without
the package and with it: the error, or a wrong answer. Errors about CUDA come from a process without a GPU.

Here and below, lines without a stack in brackets are about the newest. If variants and places share a line, each
occurs in at least one case; the raw file has every case.
"""
_BETTER = """\
## What works only with the package

In the newest stack; the raw results have the others.
"""
#: Texts that one cause has in several forms.
_SAME = (
    (
        r"Tensor on device \w+ is not on the expected device \w+!",
        "Tensor on device meta (or cpu) is not on the expected device cpu (or meta)!",
    ),
    (r"Function \w+Backward0 returned", "Function ...Backward0 returned"),
    (r"(no data!) .*", r"\1"),
    (r"\w+ is on the meta device", "weight is on the meta device"),
    (r"Gemma4\w*For\w+", "Gemma4..."),
    (r"(implementation through torch)\b.*", r"\1"),
    (r"\d+ (weights are to be trained and are offloaded).*", r"\1"),
    (r"(the weights of) \d+ (quantized layers are offloaded).*", r"\1 \2"),
    (r" \(\d+ here?.*", ""),
    (r"gemma4_?\w+", "gemma4"),
)


def runs() -> dict[str, Any]:
    """The committed runs, by stack."""
    files = {stack: ROOT / "docs" / "evidence" / "search" / f"differential-{stack}.json" for stack in STACKS}
    return {stack: json.loads(file.read_text(encoding="utf-8")) for stack, file in files.items() if file.exists()}


def page() -> str:
    """docs/UPSTREAM_LIMITS.md, whole."""
    found = runs()
    calls, entries = (max(run[what] for run in found.values()) for what in ("calls", "entries"))
    parts = [_INTRODUCTION.format(calls=calls, entries=f"{entries:,}"), _table(found)]
    parts += [_BOTH, _by_call(found), _BETTER, _by_cause({STACKS[0]: found[STACKS[0]]})]
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


def _outcomes(runs: dict[str, Any], *, repaired: bool) -> dict[tuple[str, str], dict[tuple[str, str], set[str]]]:
    """By what a call is about and its variant: what it gave without the package and with it, and where.

    Of a stack that is older, only calls and outcomes that the newest does not have.
    """
    load()
    found: dict[tuple[str, str], dict[tuple[str, str], set[str]]] = {}
    for stack, run in runs.items():
        for call, outcomes in sorted(run["found"].items()):
            key = CALLS[call].about, call.partition("[")[2].rstrip("]")
            for outcome, names in outcomes.items():
                if outcome == "absent":
                    continue
                off, on = (run["outcomes"][int(index)] for index in outcome.split())
                if off == "right" or (on == "right") != repaired:
                    continue
                causes = found.setdefault(key, {})
                kinds = _kind(off), _kind(on)
                if stack == STACKS[0]:
                    causes.setdefault(kinds, set()).update(names.split())
                elif kinds not in causes:
                    causes[kinds] = {f"{name} ({stack})" for name in names.split()}
    return found


def _by_call(runs: dict[str, Any]) -> str:
    """A list of calls, each with what its variants give, and where."""
    calls: dict[str, dict[tuple[str, str], tuple[list[str], set[str]]]] = {}
    for (about, variant), causes in _outcomes(runs, repaired=False).items():
        for cause, names in causes.items():
            variants, places = calls.setdefault(about, {}).setdefault(cause, ([], set()))
            variants.append(variant)
            places |= names
    lines = []
    for about, outcomes in calls.items():
        wheres = {_where(places) for _, places in outcomes.values()}
        rows = []
        for (off, on), (variants, places) in outcomes.items():
            words = [_listed(variants), f"({_where(places)})" if len(wheres) > 1 else ""]
            told = " ".join(filter(None, words))
            rows.append((f"{told}: " if told else "") + (off if on == off else f"{off}; with the package {on}"))
        shared = f" ({wheres.pop()})" if len(wheres) == 1 else ""
        lines += [f"- {about}{shared}: {rows[0]}"] if len(rows) == 1 else [f"- {about}{shared}"]
        lines += [f"  - {row}" for row in rows] if len(rows) > 1 else []
    return "\n".join(lines) + "\n"


def _by_cause(runs: dict[str, Any]) -> str:
    """A table of what is given without the package, the causes of many calls first."""
    causes: dict[str, dict[str, tuple[list[str], set[str]]]] = {}
    for (about, variant), outcomes in _outcomes(runs, repaired=True).items():
        for (off, _), names in outcomes.items():
            variants, places = causes.setdefault(off, {}).setdefault(about, ([], set()))
            variants.append(variant)
            places |= names
    rows = ["| without | where | calls |", "|---|---|---|"]
    for off, calls in sorted(causes.items(), key=lambda item: (-len(item[1]), item[0])):
        by_place: dict[str, list[str]] = {}
        for about, (variants, places) in calls.items():
            words = ": ".join(filter(None, (about, _listed(variants))))
            by_place.setdefault(_where(places), []).append(words.replace("|", "\\|"))
        rows += [f"| {off} | {where} | {'; '.join(several)} |" for where, several in sorted(by_place.items())]
    return "\n".join(rows) + "\n"


def _listed(variants: list[str]) -> str:
    """Variants of a call; "as it is" is the call without one, beside others."""
    names = list(dict.fromkeys(variants))
    return "" if names == [""] else ", ".join(name or "as it is" for name in names)


def _kind(outcome: str) -> str:
    """The type of an error, or that the answer was wrong."""
    if outcome.startswith("wrong"):
        return "wrong"
    name, _, text = outcome.partition(": ")
    for form, same in _SAME:
        text = re.sub(form, same, text)
    return f"`{name}`" if not text else f"`{name}`: {shorten(text.replace('`', ''), 60)}"


def _where(names: set[str]) -> str:
    """Places and kinds of model, such as ``ram, disk (E2B, 12B)``."""
    places = sorted({name.partition("/")[0] for name in names}, key=("one", "ram", "disk", "embeddings").index)
    words = {"one": "one device", "ram": "host memory", "disk": "disk", "embeddings": "embeddings in host memory"}
    kinds = sorted({name.partition("/")[2] for name in names})
    return f"{', '.join(words[place] for place in places)}: {', '.join(kinds)}"
