"""``python -m tests.generated.search --sequences --cases 2000 --seed 0 --jobs 14``: operations on split models.

Exit status 0: all sequences held. ``--seed N --cases 1`` repeats one. ``--one-device`` compares a model on one device
with the shim and without it instead; nothing is split then.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.generated.search import pool, regressions, sequences_run
from tests.generated.search.case import GROUP, OFFLOADED
from tests.generated.search.run import Failure
from tests.generated.search.sequence import Sequence
from tests.generated.search.sequence_rules import generate
from tests.generated.search.sequence_shrinking import SHOWING
from tests.generated.search.sequences_run import Outcome

#: Seconds for one sequence, and for the shrinking of one.
LIMIT, SHRINKING = 120.0, 600.0


@dataclass(frozen=True)
class Job:
    """A sequence of a seed; or what it failed with, to be shrunk."""

    seed: int
    one_device: bool = False
    failure: Failure | None = None
    attempts: int = 0


@dataclass(frozen=True)
class Result:
    seed: int
    outcome: Outcome
    seconds: float = 0.0
    processor: float = 0.0


def work(jobs: list[Job], folder: Path) -> Iterator[Any]:
    """Run the jobs, which share a configuration, in this process."""
    import gemma4_compat  # noqa: F401  (armed before the libraries)

    with sequences_run.bench(folder) as bench:
        for job in jobs:
            check = sequences_run.check_one_device if job.one_device else sequences_run.check
            if job.failure is not None:
                yield sequences_run.shrink(
                    generate(job.seed), job.failure, bench, attempts=job.attempts, check=check
                ).to_json()
                continue
            wall, processor = time.perf_counter(), time.process_time()
            outcome = check(generate(job.seed), bench)
            yield Result(job.seed, outcome, time.perf_counter() - wall, time.process_time() - processor)


def groups(jobs: Iterable[Job]) -> list[list[Job]]:
    by_group: dict[int, list[Job]] = collections.defaultdict(list)
    for job in jobs:
        by_group[job.seed // GROUP].append(job)
    return list(by_group.values())


def search(seeds: Iterable[int], *, jobs: int, limit: float = LIMIT, one_device: bool = False) -> Iterator[Result]:
    """The results of seeds, as they come. A sequence that its process did not survive is a failing one."""
    for job, found in pool.spread(work, groups(Job(seed, one_device) for seed in seeds), jobs=jobs, limit=limit):
        if isinstance(found, pool.Died):
            found = Result(job.seed, Outcome(died(found)))
        yield found


def died(found: pool.Died) -> Failure:
    """Where it was, as far as is known: the innermost function of the libraries' or of this package."""
    frames = re.findall(r'File "([^"]+)", line \d+ in (\S+)', found.detail)
    known = ("accelerate/", "transformers/", "peft/", "bitsandbytes/", "gemma4_compat/", "tests/generated/search/")
    inside = [
        f"{path.rpartition('site-packages/')[2]}:{name}" for path, name in frames if any(k in path for k in known)
    ]
    where = re.sub(r"^.*/(gemma4_compat|tests)/", r"\1/", inside[0]) if inside else "nowhere"
    return Failure("crash", f"crash: {found.reason} [{where}]", f"{found.reason}\n{found.detail}")


def counted(sequences: Iterable[Sequence]) -> dict[str, dict[str, int]]:
    """How many sequences there are of every kind, and how many have each operation."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for sequence in sequences:
        case = sequence.case
        for name in ("model", "kv_shared", "per_layer", "experts", "vision", "audio", "quantization", "load"):
            counts[name][str(getattr(case, name))] += 1
        counts["offloaded_to"][case.offloaded_to] += 1
        places = {name for name, place in case.placement if place == OFFLOADED}
        counts["offloaded"].update(
            part
            for part in ("embed_tokens", "lm_head", "layers", "_tower")
            if any(re.search(rf"{part}(\.|$)", name) for name in places)
        )
        counts["operations"].update({step.name for step in sequence.operations})
        kinds = {
            dict(step.options)["kind"] for step in sequence.operations if step.name in ("load_adapter", "new_adapter")
        }
        counts["adapters"].update(kinds)
        counts["length"][str(len(sequence.operations))] += 1
    return {name: dict(sorted(counter.items())) for name, counter in counts.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generated.search --sequences", description=__doc__)
    parser.add_argument("--cases", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one sequence")
    parser.add_argument("--one-device", action="store_true", help="nothing is split: with the shim against without it")
    parser.add_argument(
        "--attempts", type=int, default=100, help="sequences tried to shrink one failure; 0: do not shrink"
    )
    parser.add_argument("--report", type=Path, help="a JSON file for what was tried and found (docs/evidence/search)")
    parser.add_argument("--show", action="store_true", help="print the sequences, run nothing")
    parser.add_argument("--sequence", metavar="JSON", help="run this one, as a report has it")
    parser.add_argument("--regression", metavar="ID", help="run this one of tests/generated/search/regressions.json")
    options = parser.parse_args(argv)
    seeds = range(options.seed, options.seed + options.cases)
    if options.sequence is not None:
        return repeat(Sequence.from_json(options.sequence), one_device=options.one_device)
    if options.regression is not None:
        known = regressions.SEQUENCES
        if options.regression not in known:
            parser.error(f"no regression has the id {options.regression!r}; ids: {', '.join(known)}")
        return repeat(known[options.regression], one_device=options.one_device)
    if options.show:
        for seed in seeds:
            print(describe(generate(seed)))
        return 0

    results: list[Result] = []
    started = time.perf_counter()
    found = search(seeds, jobs=options.jobs, limit=options.limit, one_device=options.one_device)
    for result in found:
        results.append(result)
        if len(results) % 50 == 0:
            bad = sum(result.outcome.failure is not None for result in results)
            print(f"{len(results)} sequences, {bad} failing, {time.perf_counter() - started:.0f} s", flush=True)
    results.sort(key=lambda result: result.seed)
    wall = time.perf_counter() - started
    report(results, wall)
    shrunk = list(shrink(results, options)) if options.attempts else []
    if options.report is not None:
        data = summary(results, shrunk, wall, options)
        options.report.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 1 if any(result.outcome.failure for result in results) else 0


def repeat(sequence: Sequence, *, one_device: bool = False) -> int:
    """Run one sequence; 1, and what is wrong, when it fails."""
    import gemma4_compat  # noqa: F401  (armed before the libraries)

    with sequences_run.bench() as bench:
        outcome = (sequences_run.check_one_device if one_device else sequences_run.check)(sequence, bench)
    for name, words in outcome.refused:
        print(f"refused {name}: {words}")
    if outcome.cut:
        print(f"one device cannot do it either: {': '.join(outcome.cut)}")
    if outcome.failure is not None:
        print(f"{outcome.failure.stage}: {outcome.failure.signature}\n{outcome.failure.detail}", file=sys.stderr)
        return 1
    print(f"good: {outcome.operations} operations show what they show on one device")
    return 0


def describe(sequence: Sequence) -> str:
    case = sequence.case
    shape = ", ".join(
        f"{name} {value}" if value is not True else name
        for name, value in vars(case).items()
        if value not in (None, False, 0) and name not in ("placement", "prompt", "skip_keys", "period")
    )
    places = ", ".join(f"{name or 'all'} {place}" for name, place in case.placement)
    return "\n".join([f"seed {sequence.seed}: {shape}; {places}", *(f"  {step}" for step in sequence.operations)])


def report(results: list[Result], wall: float) -> None:
    """Coverage, time, refusals, and failures grouped by signature."""
    for name, counter in counted(generate(result.seed) for result in results).items():
        print(f"{name:14} " + "  ".join(f"{value} {number}" for value, number in counter.items()))
    clock, processor = (
        sum(getattr(result, name) for result in results) / len(results) for name in ("seconds", "processor")
    )
    print(f"{len(results)} sequences in {wall:.0f} s; {clock:.2f} s each, {processor:.2f} s of CPU time")
    for title, counter in (("refused", refusals(results)), ("not on one device either", cuts(results))):
        print(f"{sum(counter.values())} {title}")
        for words, number in counter.items():
            print(f"  {number} x {words}")
    grouped: dict[str, list[tuple[int, Failure]]] = collections.defaultdict(list)
    for result in results:
        if result.outcome.failure is not None:
            grouped[result.outcome.failure.signature].append((result.seed, result.outcome.failure))
    print(f"{sum(map(len, grouped.values()))} failing, {len(grouped)} signatures")
    for signature, found in sorted(grouped.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(found)} x {signature}\n  seeds {[seed for seed, _ in found]}\n  {found[0][1].detail}")


def refusals(results: Iterable[Result]) -> dict[str, int]:
    found = [f"{name}: {sequences_run.words(text)}" for result in results for name, text in result.outcome.refused]
    return dict(collections.Counter(found).most_common())


def cuts(results: Iterable[Result]) -> dict[str, int]:
    return dict(collections.Counter(": ".join(r.outcome.cut) for r in results if r.outcome.cut).most_common())


def shrink(results: list[Result], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The shortest sequence for each signature and last operation that changes the model before it."""
    kinds: dict[tuple[object, ...], Job] = {}
    for result in results:
        failure = result.outcome.failure
        if failure is None or failure.stage == "crash":
            continue
        names = [step.name for step in generate(result.seed).operations[: result.outcome.operations + 1]]
        before = [name for name in names[:-1] if name not in SHOWING]
        job = Job(result.seed, options.one_device, failure, options.attempts)
        kinds.setdefault((failure.signature, *before[-1:]), job)
    seen: set[str] = set()
    batches = [[job] for job in kinds.values()]
    for job, text in pool.spread(work, batches, jobs=options.jobs, limit=SHRINKING):
        if isinstance(text, pool.Died):
            print(f"\nseed {job.seed} cannot be shrunk: {text.reason}")
            continue
        if text not in seen:
            seen.add(text)
            shortest = Sequence.from_json(text)
            print(
                f"\n{describe(replace(shortest, seed=job.seed))}\n  {text}\nfor "
                f"tests/generated/search/regressions.json:"
            )
            print(
                regressions.row(shortest, f"seed-{job.seed}", f"Seed {job.seed}: {job.failure.signature}"), flush=True
            )
            yield {"seed": job.seed, "signature": job.failure.signature, "sequence": json.loads(text)}


def summary(
    results: list[Result], shrunk: list[dict[str, Any]], wall: float, options: argparse.Namespace
) -> dict[str, Any]:
    """What was tried, where, and what was found, as JSON-able data."""
    import torch

    from gemma4_compat import __version__
    from gemma4_compat._doctor.reproductions import findings

    mode = " --one-device" if options.one_device else ""
    failing = {str(r.seed): r.outcome.failure.signature for r in results if r.outcome.failure is not None}
    return {
        "search": "one device" if options.one_device else "sequences",
        "command": f"python -m tests.generated.search --sequences{mode} --cases {options.cases} --seed {options.seed}"
        f" --jobs {options.jobs}",
        "gemma4_compat": __version__,
        "date": datetime.date.today().isoformat(),
        "versions": findings.stack(),
        "python": platform.python_version(),
        "main device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
        "seeds": [results[0].seed, results[-1].seed],
        "cases": len(results),
        "operations": sum(result.outcome.operations for result in results),
        "failing": failing,
        "shrunk": shrunk,
        "refused": refusals(results),
        "not on one device": cuts(results),
        "wall_s": round(wall),
        "coverage": counted(generate(result.seed) for result in results),
    }
