"""``python -m tests.generated.search.replays --cases 1000 --seed 0``: what changes a model between two calls of
``generate``.

Exit status 0: every call gave the bits of ``disable_compile=True``. ``--seed N --cases 1`` repeats one sequence.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.generated.search import pool, regressions, replays_run, sequences_run
from tests.generated.search.case import OFFLOADED
from tests.generated.search.replay_rules import generate
from tests.generated.search.replays_run import Replayed
from tests.generated.search.run import Failure
from tests.generated.search.sequence import Sequence
from tests.generated.search.sequences_cli import LIMIT, SHRINKING, died, groups, refusals

COUNTED = ("compared", "raised", "steps")


@dataclass(frozen=True)
class Job:
    """A sequence of a seed; or what it failed with, to be shrunk."""

    seed: int
    failure: Failure | None = None
    attempts: int = 0


@dataclass(frozen=True)
class Result:
    seed: int
    outcome: Replayed


def work(jobs: list[Job], folder: Path) -> Iterator[Any]:
    """Run the jobs, which share a configuration, in this process."""
    import gemma4_compat  # noqa: F401  (armed before the libraries)

    with replays_run.bench(folder) as bench:
        for job in jobs:
            sequence = generate(job.seed)
            if job.failure is None:
                yield Result(job.seed, replays_run.check(sequence, bench))
            else:
                yield sequences_run.shrink(
                    sequence, job.failure, bench, attempts=job.attempts, check=replays_run.check
                ).to_json()


def search(seeds: Iterable[int], *, jobs: int, limit: float = LIMIT) -> Iterator[Result]:
    """The results of seeds, as they come. A sequence that its process did not survive is a failing one."""
    for job, found in pool.spread(work, groups(map(Job, seeds)), jobs=jobs, limit=limit):
        yield Result(job.seed, Replayed(died(found))) if isinstance(found, pool.Died) else found


def counted(sequences: Iterable[Sequence]) -> dict[str, dict[str, int]]:
    """How many sequences there are of every kind, and how many have each operation, tuner and option."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for sequence in sequences:
        case = sequence.case
        for name in ("model", "kv_shared", "per_layer", "experts", "quantization"):
            counts[name][str(getattr(case, name))] += 1
        counts["streamed"][str(OFFLOADED in dict(case.placement).values())] += 1
        counts["operations"].update({step.name for step in sequence.operations})
        options = {(key, str(value)) for step in sequence.operations for key, value in step.options}
        for key in ("tuner", "mode", "cache", "extra", "inside", "fails", "by", "what", "kind", "of"):
            counts[key].update({value for name, value in options if name == key})
    return {name: dict(sorted(counter.items())) for name, counter in counts.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generated.search.replays", description=__doc__)
    parser.add_argument("--cases", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop then, with the sequences tried so far"
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one sequence")
    parser.add_argument("--attempts", type=int, default=100, help="sequences tried to shrink one failure; 0: none")
    parser.add_argument("--report", type=Path, help="a JSON file for what was tried and found (docs/evidence/search)")
    parser.add_argument("--show", action="store_true", help="print the sequences, run nothing")
    parser.add_argument("--sequence", metavar="JSON", help="run this one, as a report has it")
    parser.add_argument("--regression", metavar="ID", help="run this one of tests/generated/search/regressions.json")
    options = parser.parse_args(argv)
    seeds = range(options.seed, options.seed + options.cases)
    if options.sequence is not None:
        return repeat(Sequence.from_json(options.sequence))
    if options.regression is not None:
        known = regressions.REPLAYS
        if options.regression not in known:
            parser.error(f"no regression has the id {options.regression!r}; ids: {', '.join(known)}")
        return repeat(known[options.regression])
    if options.show:
        for seed in seeds:
            print("\n".join([f"seed {seed}: {generate(seed).case}", *(f"  {s}" for s in generate(seed).operations)]))
        return 0

    results: list[Result] = []
    started = time.perf_counter()
    for result in search(seeds, jobs=options.jobs, limit=options.limit):
        results.append(result)
        if result.outcome.failure is not None:
            print(f"seed {result.seed}: {result.outcome.failure.signature}", flush=True)
        if time.perf_counter() - started > 60 * options.minutes:
            break
        if len(results) % 50 == 0:
            bad = sum(result.outcome.failure is not None for result in results)
            print(f"{len(results)} sequences, {bad} failing, {time.perf_counter() - started:.0f} s", flush=True)
    results.sort(key=lambda result: result.seed)
    wall = time.perf_counter() - started
    failing = [(result.seed, result.outcome.failure) for result in results if result.outcome.failure is not None]
    for seed, failure in failing:
        print(f"\nseed {seed}: {failure.signature}\n  {failure.detail}")
    print(f"{len(results)} sequences, {len(failing)} failing, {wall:.0f} s")
    shrunk = list(shrink(failing, options)) if options.attempts else []
    if options.report is not None:
        data = summary(results, shrunk, wall, options)
        options.report.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 1 if failing else 0


def repeat(sequence: Sequence) -> int:
    """Run one sequence; 1, and what is wrong, when it fails."""
    import gemma4_compat  # noqa: F401  (armed before the libraries)

    with replays_run.bench() as bench:
        outcome = replays_run.check(sequence, bench)
    for name, words in outcome.refused:
        print(f"not done: {name}: {words}")
    if outcome.failure is not None:
        print(f"{outcome.failure.signature}\n{outcome.failure.detail}", file=sys.stderr)
        return 1
    print(f"good: {outcome.compared} calls, {outcome.steps} replayed steps")
    return 0


def shrink(failing: list[tuple[int, Failure]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The shortest sequence for each signature and detail."""
    kinds: dict[str, Job] = {}
    for seed, failure in failing:
        if failure.stage != "crash":
            kinds.setdefault(failure.detail, Job(seed, failure, options.attempts))
    batches = [[job] for job in kinds.values()]
    for job, text in pool.spread(work, batches, jobs=options.jobs, limit=SHRINKING):
        if isinstance(text, pool.Died):
            print(f"\nseed {job.seed} cannot be shrunk: {text.reason}")
            continue
        print(f"\n{text}\nfor tests/generated/search/regressions.json:")
        print(
            regressions.row(Sequence.from_json(text), f"seed-{job.seed}", f"Seed {job.seed}: {job.failure.signature}")
        )
        yield {"seed": job.seed, "signature": job.failure.signature, "sequence": json.loads(text)}


def summary(
    results: list[Result], shrunk: list[dict[str, Any]], wall: float, options: argparse.Namespace
) -> dict[str, Any]:
    """What was tried, where, and what was found, as JSON-able data."""
    from gemma4_compat import __version__
    from gemma4_compat._doctor.reproductions import findings

    outcomes = [result.outcome for result in results]
    return {
        "search": "replays",
        "command": f"python -m tests.generated.search.replays --cases {options.cases} --seed {options.seed}"
        f" --jobs {options.jobs}" + (f" --minutes {options.minutes:g}" if options.minutes < float("inf") else ""),
        "gemma4_compat": __version__,
        "date": datetime.date.today().isoformat(),
        "versions": findings.stack(),
        "python": platform.python_version(),
        "main device": "CPU",
        "seeds": [results[0].seed, results[-1].seed],
        "cases": len(results),
        **{name: sum(getattr(outcome, name) for outcome in outcomes) for name in COUNTED},
        "failing": {str(r.seed): r.outcome.failure.signature for r in results if r.outcome.failure is not None},
        "shrunk": shrunk,
        "not done": refusals(results),
        "wall_s": round(wall),
        "coverage": counted(generate(result.seed) for result in results),
    }
