"""Run the case in every interpreter and way, and write what happened.

    python -m tests.world.interpreters --python PATH --python PATH --out docs/evidence/interpreters.json

Each interpreter takes the large case where it can import the libraries, else the small one. `uv python install` gets
others. Exit 1 where an outcome differs from that of plain `python` in the same environment, or has an error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.world.interpreters import run, ways


def key(result: dict[str, Any]) -> tuple[str, ...]:
    """What a later result takes the place of."""
    return result["python"], result["way"], result["size"]


def save(file: Path, result: dict[str, Any]) -> None:
    """Put a result into the file, in the place of an earlier one of its kind."""
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    merged = [*(one for one in before if key(one) != key(result)), result]
    file.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world.interpreters", description=__doc__)
    parser.add_argument("--python", action="append", help="an interpreter (several times); default: this one")
    parser.add_argument("--way", action="append", choices=list(ways.WAYS), help="(several times) default: all")
    parser.add_argument("--size", choices=["model", "stub"], help="default: model where the libraries can be imported")
    parser.add_argument("--out", type=Path, help="add the results to this file")
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder, "samples")
        run.build_samples(samples)
        for python in given.python or [ways.here()]:
            for one in run.everything(python, given.way or list(ways.WAYS), samples, Path(folder), given.size):
                results.append(one)
                if given.out:
                    save(given.out, one)
    return 1 if any(one["problem"] for one in results) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stderr or ''}")
