"""``python -m tests.generated.fuzz``: try inputs, and replay a corpus."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.generated.fuzz import case, worker
from tests.generated.fuzz.readers import READERS, find
from tests.generated.fuzz.run import Run


def main(arguments: list[str] | None = None) -> int:
    """Exit 0 when every input was handled, 1 when one was not."""
    given = _parser().parse_args(arguments)
    if given.replay:
        return _replay(given.replay)
    names = given.reader or [reader.name for reader in READERS]
    file = given.out or Path(tempfile.mkdtemp(prefix="fuzz-")) / "fuzz.json"
    run = Run([find(name) for name in names], given.inputs, given.seed, file, given.corpus or file.with_suffix(""))
    run.run(given.jobs, given.seconds)
    bad = 0
    for name in names:
        item = run.data["readers"][name]
        bad += item["tried"] - item["handled"]
        print(
            f"{name}: {item['tried']} tried, {item['handled']} handled, slowest {item['slowest'][0]} s, "
            f"largest {item['largest'][0]} MiB, {item['traceback']} tracebacks, "
            f"{item['over_time'] + item['over_memory']} over bounds, {item['violation']} other"
        )
    print(file)
    return 1 if bad else 0


def _replay(paths: list[Path]) -> int:
    files = [file.resolve() for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    bad = 0
    with worker.place() as where:
        for file in files:
            read, about = case.read(file.read_text())
            reader = find(about["reader"])
            if reader.upstream:
                worker.warm()
            with worker.little_space():
                outcome = worker.run_case(where, reader, read)
            bad += not outcome.good
            print(
                f"{file.name}: {outcome.kind} {outcome.signature} {outcome.seconds:.2f} s {outcome.mib:.0f} MiB",
                flush=True,
            )
            if not outcome.good:
                print(outcome.detail.encode("ascii", "backslashreplace").decode())
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.generated.fuzz", description=main.__doc__)
    parser.add_argument("--reader", action="append", choices=[reader.name for reader in READERS], help="default: all")
    parser.add_argument("--inputs", type=int, default=100_000, help="for each reader; default: 100,000")
    parser.add_argument("--seconds", type=float, help="stop after so much time, at the end of a batch")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--seed", type=int, default=20, help="decides every input")
    parser.add_argument("--out", type=Path, help="what was found, as JSON; a run with the same file goes on there")
    parser.add_argument("--corpus", type=Path, help="where failing inputs are saved; default: beside --out")
    parser.add_argument("--replay", type=Path, nargs="+", help="run these saved inputs, or folders of them, instead")
    return parser
