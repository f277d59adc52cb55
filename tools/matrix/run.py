"""``run``: measure patches in stacks, several at once, and write what was found."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import gemma4_compat
from gemma4_compat import Patch
from tools import evidence
from tools.matrix import UsageError, environments, measure, stacks
from tools.matrix.stacks import TABLE, Stack


def run(options: argparse.Namespace) -> int:
    """Measure, write and print; 1 where a stack is not as claimed."""
    known, listed, everything = stacks.read(), stacks.releases(), list(gemma4_compat.patches())
    for requested, names, what in (
        (options.stacks, list(known), "stack is named"),
        (options.patches, [patch.id for patch in everything], "patch has the id"),
    ):
        if unknown := [name for name in requested if name not in names]:
            raise UsageError(f"no {what} {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [stack for stack in known.values() if stack.name in options.stacks or not options.stacks]
    if options.ci:
        if options.patches:
            raise UsageError("--ci chooses the patches of each stack; leave out --patches")
        chosen = [stack for stack in chosen if stack.ci in ("all", "gates")]
    if not chosen:
        raise UsageError(f"CI's matrix step runs none of {', '.join(options.stacks)}, so nothing would be measured")
    named = [patch for patch in everything if patch.id in options.patches or not options.patches]
    patches_of = {stack.name: stacks.patches_in_ci(stack, listed) if options.ci else named for stack in chosen}
    if without := [name for name, patches in patches_of.items() if not patches]:
        raise UsageError(f"no patch has a gate at {', '.join(without)}: leave `ci` out of that entry in {TABLE.name}")
    earlier = stacks.results(options.out) if options.patches else {}
    durations = seconds()

    # One stack after the other in the same environment: what both have is neither installed nor compiled again.
    places: SimpleQueue[Path] = SimpleQueue()
    for number in range(options.jobs):
        places.put(place := options.work / f"place-{number + 1}")
        shutil.rmtree(place, ignore_errors=True)  # of a run that was cut off

    def one(stack: Stack) -> dict[str, Any]:
        patches = patches_of[stack.name]
        only = "TestPromise" if options.ci or options.reproductions or stack.tests == "reproductions" else None
        folder = options.work / stack.name if options.keep else places.get()
        try:
            python, packages = Path(sys.executable), None
            if options.packages is not None:
                packages = options.packages / stack.name
            else:
                pins = [f"{name}=={pin}" for name, pin in stack.pins.items()]
                python = environments.build(folder, pins, over=not options.keep)
            groups = split(patches, options.split, durations.get(stack.name, durations.get("newest", {})))
            with ThreadPoolExecutor(max_workers=len(groups)) as pool:
                parts = list(pool.map(lambda group: measure.measure(stack, python, group, packages, only), groups))
        except (RuntimeError, OSError, subprocess.SubprocessError, ValueError) as error:  # the other stacks go on
            parts = [{"error": str(error), "patches": {}}]
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            if not options.keep:
                places.put(folder)
        known_of_others = [earlier[stack.name]] if stack.name in earlier else []
        return measure.joined(stack, [*known_of_others, *parts], everything)

    bad = []
    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        for job in as_completed([pool.submit(one, stack) for stack in chosen]):
            result = job.result()
            evidence.write_matrix({result["cell"]: result}, known, options.out)
            print(said := line(result), flush=True)
            bad += [] if result["ok"] else [said]
    while not places.empty():
        shutil.rmtree(places.get(), ignore_errors=True)
    # Once more at the end, which is all of a long log that some services show.
    print(f"\n{len(chosen) - len(bad)} of {len(chosen)} stacks as claimed" + ("; not:" if bad else ""), *bad, sep="\n")
    return 1 if bad else 0


def seconds() -> dict[str, dict[str, float]]:
    """Stack -> patch -> seconds of its tests when it was last measured there."""
    return {
        name: {patch: float(entry["seconds"]) for patch, entry in result["patches"].items() if entry["seconds"]}
        for name, result in stacks.results().items()
    }


def split(patches: Sequence[Patch], parts: int, seconds: Mapping[str, float]) -> list[list[Patch]]:
    """Groups of about equal duration, for as many processes; where nothing is known every patch counts the same."""
    groups: list[list[Patch]] = [[] for _ in range(min(parts, len(patches)))]
    loads = [0.0] * len(groups)
    for patch in sorted(patches, key=lambda patch: -seconds.get(patch.id, 60.0)):
        lightest = loads.index(min(loads))
        groups[lightest].append(patch)
        loads[lightest] += seconds.get(patch.id, 60.0)
    return groups


def line(result: Mapping[str, Any]) -> str:
    """One stack in the terminal: a line, and the failures."""
    entries = result["patches"]
    said = [entry["verdict"] for entry in entries.values()]
    counts = ", ".join(f"{said.count(name)} {name}" for name in sorted(set(said)))
    seconds = sum(entry["seconds"] or 0 for entry in entries.values())  # None: not recorded
    lines = [f"{result['cell']:<24} {'ok ' if result['ok'] else 'BAD'} {counts} ({seconds} s)"]
    lines += [f"    {result['error']}"] if "error" in result else []
    lines += [
        f"    {patch_id}::{test}: {message[:200]}"
        for patch_id, entry in entries.items()
        for test, message in entry["failures"].items()
    ]
    return "\n".join(lines)
