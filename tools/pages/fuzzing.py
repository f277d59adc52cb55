"""docs/FUZZING.md: what hostile inputs were tried, and what they may cost, from the committed run."""

from __future__ import annotations

import json
from typing import Any

from tools.pages.markers import ROOT

_INTRODUCTION = """\
# Hostile inputs

Whatever a file or an option contains, a function or command gives an answer or one `Gemma4CompatError`: the command
line exits 0, 1 or 2, without a traceback, and prints no control character from a file. This is tested with valid
adapters, checkpoints, indexes, requirements files, projects, lock files, error texts and options that
[hypothesis](https://hypothesis.readthedocs.io) mutates anywhere: wrong types, huge numbers, deep nesting, regular
expressions that backtrack, overlapping tensors, links, pipes, `/dev/zero`, holes of gigabytes, paths that leave the
folder, control characters, lone surrogates; then the bytes are truncated.

Each input runs under a watch. It fails when it

- raises anything but `Gemma4CompatError`, or one whose message is longer than 10,000 characters,
- takes more processor time or memory than the bounds below, which are a constant plus an amount per MiB of the input
  (up to 16 MiB), or waits for a pipe,
- writes, renames or removes a file outside OUT, or changes one of its own,
- starts a program, unpickles, or opens a connection,
- prints a raw control character, or JSON that is not an object or not JSON (`NaN`).

```bash
pip install -c constraints/newest.txt ".[test]"
# all readers; resumes where it stopped
python -m tests.generated.fuzz --inputs 100000 --jobs 8 --out fuzz.json
# one of them
python -m tests.generated.fuzz --reader safetensors --inputs 100000
# every input ever found
python -m tests.generated.fuzz --replay tests/generated/fuzz/corpus
```

Failing inputs are minimized and saved beside `fuzz.json`; those that were fixed are in
`tests/generated/fuzz/corpus/`, which CI replays, with a few new inputs for each reader.
"""


def page() -> str:
    """docs/FUZZING.md, whole."""
    parts = [_INTRODUCTION]
    for file in sorted((ROOT / "docs" / "evidence" / "fuzz").glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        stack = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        rows = [
            "| reader | inputs | handled | slowest | largest | tracebacks | over bounds | other | may cost |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_row(name, item) for name, item in run["readers"].items()),
        ]
        what = f"Python {run['python']}, {stack}, seed {run['seed']} ([raw](evidence/fuzz/{file.name}))"
        parts.append(f"## {file.stem}\n\n{what}\n\n" + "\n".join(rows) + "\n" + _left(run))
    return "\n".join(parts).rstrip() + "\n"


def _row(name: str, item: dict[str, Any]) -> str:
    seconds, mib = item["bound"]["seconds"], item["bound"]["mib"]
    return (
        f"| `{name}`: {item['about']} | {item['tried']:,} | {item['handled']:,} | {item['slowest'][0]} s | "
        f"{item['largest'][0]} MiB | {item['traceback']} | {item['over_time'] + item['over_memory']} | "
        f"{item['violation']} | {seconds[0]:g} s + {seconds[1]:g} s, {mib[0]:g} MiB + {mib[1]:g} MiB |"
    )


def _left(run: dict[str, Any]) -> str:
    failures = [
        f"- `{name}`, {failure['count']} times: {failure['signature']}"
        for name, item in run["readers"].items()
        for failure in item["failures"]
    ]
    return "\nNot handled:\n\n" + "\n".join(failures) + "\n" if failures else ""
