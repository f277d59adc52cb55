"""docs/THREADS.md: several threads in one split model, and what deleted models leave, from the committed runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.pages import gpu
from tools.pages.markers import ROOT, shorten

_INTRODUCTION = """\
# Threads and memory

This page is generated from the results in [threads](evidence/threads) and [leftovers](evidence/leftovers): the tiny
model on a CPU, with every layer, the towers and the embeddings offloaded.

## Several threads in one split model

Threads that call one split model take turns, forward by forward
([F45](FAILURE_POINTS.md#f45-several-threads-in-a-split-model)): each waits for those that came before it, and gets the
same answer as if it ran by itself. Two threads that `generate` take turns token by token. A backward pass is one turn.
What this costs a single thread: [BENCHMARKS.md](BENCHMARKS.md#the-lock-of-a-split-model-with-one-thread).

Two things are up to you. Change a model (load, merge or switch an adapter, dispatch or move it) only while no other
thread runs it. And a model that is whole on one device has no lock: threads behave as upstream.

`python -m tests.unit.offload.threads --forwards 1000 --jobs 12 --out docs/evidence/threads/STACK.json`: that many
forwards of text, a batch, and text with an image and sound, in turn, from several threads that Python switches as
often as it can. Each answer is compared, bit by bit, with that of one device.
"""
_SOAK = """\
## Threads that do different things

`python -m tests.unit.offload.threads_soak --minutes 60 --out docs/evidence/soak/STACK.json`: two, four or ten threads
forward, `generate` (replayed, by a stand-in for CUDA graphs) and compute gradients on one model or two, in some rounds
beside a thread that trains another with `train_fast`. Python switches between them every microsecond or every 5 ms.
Each answer is compared, bit by bit, with that of one thread; a thread that does not end would end the run.
"""
_LEFTOVERS = """\
## What deleted models leave behind

`python -m tests.unit.offload.leftovers --loads 20 --jobs 6 --out docs/evidence/leftovers/STACK.json`: a model is
loaded, split and given an adapter, generates, takes a training step, and is deleted, that many times in one process.
Objects, tensors, hooks, threads, open and mapped files and pinned memory are counted after the first one and after
the last. Memory is the growth of the process per model, after the first ten.
"""


def page() -> str:
    """docs/THREADS.md, whole."""
    parts = [_INTRODUCTION]
    for file, run in _runs("threads"):
        rows = ["| offloaded to, weights, adapter | exact | by thread | raised | seconds |", "|---|---|---|---|---|"]
        for name, found in run["measured"].items():
            by_thread = ", ".join(map(str, found["by_thread"]))
            raised = shorten("; ".join(found["raised"])) or "nothing"
            rows.append(
                f"| {name} | {found['exact']:,} of {run['forwards']:,} | {by_thread} | {raised} | {found['seconds']} |"
            )
        parts.append(_part(file, run, f"{run['threads']} threads", rows))
    for run, title in gpu.runs():
        rows = ["| offloaded to, weights, adapter | exact answers | raised | seconds |", "|---|---|---|---|"]
        rows += [_gpu_row(name, found) for name, found in sorted(run["measured"].items()) if name.startswith(_GPU)]
        if len(rows) > 2:
            parts += [f"On a GPU, from 4 threads, {title.replace('PAGE', '')}", "", *rows, ""]
    parts.append(_SOAK)
    for file, run in _runs("soak"):
        rows = ["| what a thread did | calls, all exact |", "|---|---:|"]
        rows += [f"| {name} | {count:,} |" for name, count in run["measured"]["calls"].items()]
        what = (
            f"{run['minutes']:g} minutes, {run['measured']['rounds']:,} rounds, load {run['load'][2]:.0f} on two cores"
        )
        parts.append(_part(file, run, what, rows))
    parts.append(_LEFTOVERS)
    for file, run in _runs("leftovers"):
        rows = ["| offloaded to, weights | left behind | files mapped | memory a load |", "|---|---|---|---|"]
        rows += [f"| {name} | {_left(found)} |" for name, found in run["measured"].items()]
        parts.append(_part(file, run, f"{run['loads']} loads", rows))
    return "\n".join(parts).rstrip() + "\n"


#: What the names of GPU measurements of threads begin with.
_GPU = "threads "


def _gpu_row(name: str, found: dict[str, Any]) -> str:
    store, weights, adapter = name.removeprefix(_GPU).split()
    raised = shorten("; ".join(found["raised"])) or "nothing"
    who = "no adapter" if adapter == "None" else "LoRA"
    return f"| {store}, {weights}, {who} | {found['exact']:,} | {raised} | {found['seconds']} |"


def _left(found: dict[str, Any]) -> str:
    if "died" in found:
        return f"the process died: {found['died']} | | "
    left = {name: after - before for name, (before, after) in found["left"].items()} | found["alive"]
    told = ", ".join(f"{number} {name}" for name, number in left.items()) or "nothing"
    sizes = found["resident KiB"]
    first = min(10, len(sizes) - 1) - 1
    return f"{told} | {found['files mapped']} | {(sizes[-1] - sizes[first]) / (len(sizes) - 1 - first):.0f} KiB"


def _part(file: Path, run: dict[str, Any], what: str, rows: list[str]) -> str:
    stack = ", ".join(f"{name} {version}" for name, version in sorted(run["versions"].items()))
    link = f"evidence/{file.parent.name}/{file.name}"
    return f"### {file.stem}: {what}\n\n{stack}, Python {run['python']} ([raw]({link}))\n\n" + "\n".join(rows) + "\n"


def _runs(folder: str) -> list[tuple[Path, dict[str, Any]]]:
    files = sorted((ROOT / "docs" / "evidence" / folder).glob("*.json"))
    return [(file, json.loads(file.read_text(encoding="utf-8"))) for file in files]
