"""The same inputs, guided by what they reach: ``python -m tests.fuzz.guided --reader safetensors --seconds 60``.

atheris, which has to be installed (pip install atheris), instruments the package's readers and makes the bytes from
which hypothesis draws an input; what reaches new code is kept and varied.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

#: What is instrumented: the rooms that read what users give them.
_ROOMS = ("_adapters", "_checkpoint", "_engine.text", "_merge", "_models", "_needed", "_planner", "_reading", "_scan")


def main() -> None:
    """Try inputs until the time is over, then write what came of them as JSON."""
    import atheris

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=main.__doc__)
    parser.add_argument("--reader", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("guided.json"))
    given = parser.parse_args()
    with atheris.instrument_imports(include=[f"gemma4_compat.{room}" for room in _ROOMS]):
        from tests.fuzz import readers, worker
    reader, out = readers.find(given.reader), given.out.resolve()
    tally, deadline = worker.Tally(worker.Task(reader.name, 0, 0, 0)), time.monotonic() + given.seconds
    if reader.upstream:
        worker.warm()
    with worker.place() as where, worker.little_space():

        def visit(case: Any) -> None:
            tally.add(case, worker.run_case(where, reader, case))
            if time.monotonic() > deadline:
                _write(tally, out)
                os._exit(0)  # libFuzzer does not return

        target = worker.hypothesis_test(reader.cases, visit).hypothesis.fuzz_one_input
        atheris.Setup([sys.argv[0], "-timeout=0", "-rss_limit_mb=0", "-max_len=4096", "-verbosity=0"], target)
        atheris.Fuzz()


def _write(tally: Any, out: Path) -> None:
    failures = {signature: failure["case"] for signature, failure in tally.failures.items()}
    data = {"reader": tally.task.reader, "tried": tally.tried, "outcomes": dict(tally.kinds), "failures": [*failures]}
    out.write_text(json.dumps(data, indent=1) + "\n")
    for number, (signature, case) in enumerate(failures.items()):
        file = out.with_name(f"{tally.task.reader}-guided-{number}.json")
        file.write_text(case.as_text(reader=tally.task.reader, found=signature) + "\n")
    print(json.dumps(data), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
