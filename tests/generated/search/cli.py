"""``python -m tests.generated.search --cases 3000 --seed 0 --jobs 2``: seeds, coverage, failures by signature, shrunk
cases.

Exit status 0: all cases held. ``--seed N --cases 1`` repeats one case, ``--regression ID`` a row of
``regressions.json``.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import collections
import datetime
import json
import multiprocessing
import platform
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.generated.search import regressions, run
from tests.generated.search.case import GROUP, OFFLOADED, Case, generate, owner, tree, walk

#: Seed, seconds on the clock, seconds of CPU time (what other processes of the machine do not change), failure.
Result = tuple[int, float, float, "run.Failure | None"]


def run_group(seeds: list[int]) -> list[Result]:
    """The cases of seeds that share a configuration, in this process."""
    import gemma4_compat  # noqa: F401  (armed before the libraries)

    results: list[Result] = []
    with run.bench() as bench:
        for seed in seeds:
            wall, processor = time.perf_counter(), time.process_time()
            failure = run.check(generate(seed), bench)
            results.append((seed, time.perf_counter() - wall, time.process_time() - processor, failure))
    return results


def groups(first: int, cases: int) -> list[list[int]]:
    by_group: dict[int, list[int]] = collections.defaultdict(list)
    for seed in range(first, first + cases):
        by_group[seed // GROUP].append(seed)
    return list(by_group.values())


def counted(cases: Iterable[Case]) -> dict[str, dict[str, int]]:
    """How many cases there are of every value of every dimension, and of every kind of map."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in cases:
        for field in (
            "model", "layers", "kv_shared", "per_layer", "experts", "keys_are_values", "wide_mlp", "vision", "audio",
            "quantization", "adapter", "prompt", "load", "skip_keys",
        ):  # fmt: skip
            counts[field][str(getattr(case, field))] += 1
        for feature, present in features(case).items():
            counts["map"][feature] += present
    return {field: dict(sorted(counter.items())) for field, counter in counts.items()}


def coverage(cases: Iterable[Case]) -> str:
    """:func:`counted` as text, a line for each dimension."""
    return "\n".join(
        f"{field:16} " + "  ".join(f"{value} {number}" for value, number in counter.items())
        for field, counter in counted(cases).items()
    )


def features(case: Case) -> dict[str, bool]:
    """What kind of map a case has."""
    places = dict(case.placement)

    def above(name: str) -> str | None:
        others = tuple(item for item in case.placement if item[0] != name)
        key = owner(others, name)
        return None if key is None else places[key]

    def place(suffix: str) -> str | None:
        names = [node.name for node in walk(tree(case)) if node.name.endswith(suffix)]
        key = owner(case.placement, names[0]) if names else None
        return None if key is None else places[key]

    nested = [(above(name), own) for name, own in case.placement if above(name) is not None]
    return {
        "catch-all": "" in places,
        "model": "model" in places,
        "offloaded below main": any(own == OFFLOADED != outer for outer, own in nested),
        "main below offloaded": any(own != OFFLOADED == outer for outer, own in nested),
        "inside a layer": any(re.search(r"layers\.\d+\.\w+", name) for name in places),
        "embed_tokens offloaded": place("embed_tokens") == OFFLOADED,
        "per-layer table offloaded": place("embed_tokens_per_layer") == OFFLOADED,
        "head and embedding apart": place("embed_tokens") != place("lm_head"),
        "part of a tower": any("_tower." in name for name in places),
        "nothing offloaded": OFFLOADED not in places.values(),
    }


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if "--sequences" in arguments:
        from tests.generated.search import sequences_cli

        return sequences_cli.main([argument for argument in arguments if argument != "--sequences"])
    parser = argparse.ArgumentParser(prog="python -m tests.generated.search", description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--stop-after", type=int, help="stop at that many failing cases")
    parser.add_argument(
        "--attempts", type=int, default=150, help="cases tried to shrink one failure; 0: do not shrink"
    )
    parser.add_argument("--report", type=Path, help="a JSON file for what was tried and found (docs/evidence/search)")
    parser.add_argument(
        "--regression", metavar="ID", help="run this case of tests/generated/search/regressions.json instead"
    )
    options = parser.parse_args(arguments)
    if options.regression is not None:
        known = regressions.PLACEMENTS
        if options.regression not in known:
            parser.error(f"no regression has the id {options.regression!r}; ids: {', '.join(known)}")
        return repeat(known[options.regression])

    work = groups(options.seed, options.cases)
    print(f"seeds {options.seed}..{options.seed + options.cases - 1}, {len(work)} configurations", flush=True)
    results: list[Result] = []
    started = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(run_group, seeds) for seeds in work]
        for task in as_completed(tasks):
            results += task.result()
            bad = sum(failure is not None for _, _, _, failure in results)
            print(f"{len(results)} cases, {bad} failing, {time.perf_counter() - started:.0f} s", flush=True)
            if options.stop_after is not None and bad >= options.stop_after:
                pool.shutdown(cancel_futures=True)
                break
    results.sort()
    wall = time.perf_counter() - started
    report(results, wall)
    if options.report is not None:
        options.report.write_text(json.dumps(summary(results, wall, options), indent=1) + "\n", encoding="utf-8")
    failing = [(seed, failure) for seed, _, _, failure in results if failure is not None]
    if options.attempts:
        with run.bench() as bench:
            print_shrunk(failing, bench, options.attempts)
    return 1 if failing else 0


def repeat(case: Case) -> int:
    """Run one case; 1, and what is wrong, when it fails."""
    import gemma4_compat  # noqa: F401  (armed before the libraries)

    with run.bench() as bench:
        failure = run.check(case, bench)
    if failure is not None:
        print(f"{failure.stage}: {failure.signature}\n{failure.detail}", file=sys.stderr)
        return 1
    print("good: loads, keeps its placement, gives the outputs of one device")
    return 0


def summary(results: list[Result], wall: float, options: argparse.Namespace) -> dict[str, Any]:
    """What was tried, where, and what was found, as JSON-able data."""
    import torch

    from gemma4_compat import __version__
    from gemma4_compat._doctor.reproductions import findings

    failing = {str(seed): failure.signature for seed, _, _, failure in results if failure is not None}
    return {
        "command": f"python -m tests.generated.search --cases {options.cases} --seed {options.seed} --jobs "
        f"{options.jobs}",
        "gemma4_compat": __version__,
        "date": datetime.date.today().isoformat(),
        "versions": findings.stack(),
        "python": platform.python_version(),
        "main device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
        "seeds": [results[0][0], results[-1][0]],
        "cases": len(results),
        "failing": failing,
        "wall_s": round(wall),
        "coverage": counted(generate(seed) for seed, *_ in results),
    }


def report(results: list[Result], wall: float) -> None:
    """Coverage, time, and failures grouped by signature."""
    print(coverage(generate(seed) for seed, *_ in results))
    clock, processor = (1000 * sum(result[index] for result in results) / len(results) for index in (1, 2))
    print(f"{len(results)} cases in {wall:.0f} s; {clock:.0f} ms a case, {processor:.0f} ms of CPU time")
    grouped: dict[str, list[tuple[int, run.Failure]]] = collections.defaultdict(list)
    for seed, _, _, failure in results:
        if failure is not None:
            grouped[failure.signature].append((seed, failure))
    print(f"{sum(map(len, grouped.values()))} failing, {len(grouped)} signatures")
    for signature, found in sorted(grouped.items(), key=lambda item: -len(item[1])):
        seeds = [seed for seed, _ in found]
        print(f"\n{len(found)} x {signature}\n  seeds {seeds}\n  {found[0][1].detail}")


def print_shrunk(failing: list[tuple[int, run.Failure]], bench: run.Bench, attempts: int) -> None:
    """A row for ``regressions.json`` for each cause: the first failure of each signature, way to load and kind of map,
    where they shrink to different cases.

    One signature can have several causes: accelerate says "is on the meta device" for many.
    """
    kinds: dict[tuple[object, ...], tuple[int, run.Failure]] = {}
    for seed, failure in failing:
        case = generate(seed)
        kind = [name for name in ("offloaded below main", "main below offloaded") if features(case)[name]]
        kinds.setdefault((failure.signature, case.load, *kind), (seed, failure))
    shrunk: set[str] = set()
    for seed, failure in kinds.values():
        case = run.shrink(generate(seed), failure, bench, attempts=attempts)
        print(f"\nseed {seed}, {failure.signature}\n  {case.to_json()}", flush=True)
        if case.to_json() not in shrunk:
            shrunk.add(case.to_json())
            slug = re.sub(r"\W+", "-", failure.signature.partition(" [")[0])[:50].strip("-").lower()
            print("for tests/generated/search/regressions.json:")
            print(regressions.row(case, f"{slug}-{seed}", f"Seed {seed}: {failure.signature}"), flush=True)
