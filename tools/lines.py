"""Lines of Python and CUDA by room and folder of tests, beside what was agreed: ``python -m tools.lines``.

Exit status 1: one of them, or the sum, is more than 3 % above. A feature that needs more lines says in its commit what
it replaces, and ``--write`` agrees to today's.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_suffix(".json")
#: What may be added without a word.
MARGIN = 0.03
#: Small rooms may grow by a function.
AT_LEAST = 40


def count() -> dict[str, int]:
    """Lines of the files that git knows, by room."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.cuh"], cwd=ROOT, capture_output=True, text=True, check=True)
    found: collections.Counter[str] = collections.Counter()
    for name in listed.stdout.splitlines():
        top, *rest = Path(name).parts
        if top in ("gemma4_compat", "tests") and (ROOT / name).exists():
            room = f"{top}/{rest[0]}" if len(rest) > 1 else top
            found[room] += (ROOT / name).read_bytes().count(b"\n")
    for top in ("gemma4_compat", "tests"):
        found[f"{top}, all"] = sum(lines for room, lines in found.items() if room.split("/")[0] == top)
    return dict(sorted(found.items()))


def limit(lines: int) -> int:
    """How many lines there may be where so many were agreed."""
    return lines + max(int(lines * MARGIN), AT_LEAST)


def table(today: Mapping[str, int], agreed: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Rows of the table, and what is above its limit."""
    rows, above = [], []
    for room in sorted({*today, *agreed}):
        now, then = today.get(room, 0), agreed.get(room, 0)
        rows.append(f"{room:<32} {now:>7,} {then:>7,} {now - then:>+7,}")
        if now > limit(then):
            above.append(f"{room}: {now:,} lines, {then:,} agreed, {limit(then):,} allowed")
    return rows, above


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.lines", description=__doc__)
    parser.add_argument("--write", action="store_true", help="agree to today's lines")
    today = count()
    if parser.parse_args().write:
        FILE.write_text(json.dumps(today, indent=1) + "\n", encoding="utf-8")
    rows, above = table(today, json.loads(FILE.read_text(encoding="utf-8")))
    print("\n".join([f"{'':<32} {'today':>7} {'agreed':>7}", *rows]))
    print("".join(f"\n{line}" for line in above), end="\n" if above else "")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
