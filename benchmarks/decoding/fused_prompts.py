"""What do fused kernels change for a prompt that is replayed: milliseconds to the first token, and of its graph?

python benchmarks/decoding/fused_prompts.py --shape E2B --lengths 64,512 --out FILE.json [--rounds 10]

4-bit, random weights in the real shape, everything on the card, after `decode_fast`. Two sets of graphs of one model
take turns, each with a text that was not read before: as captured, and fused at once in place of in the 128th replay.
The logits of both are compared bit by bit. Then each graph is replayed by itself: its time on the GPU, and its
kernels.

`--shape tiny` needs no GPU; a stand-in captures, and nothing is fused. Exit code 1: a bit differs, or a graph was not
fused.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import models
from benchmarks.small_card import device
from gemma4_compat._generation.prompts import prompts
from gemma4_compat._graphs import decoder

WAYS = ("captured", "fused")
READ_FIRST, REPLAYS = 3, 8


class Model:
    """A model with a set of graphs for each way."""

    def __init__(self, loaded: Any) -> None:
        self._model = loaded
        self.decodings: dict[str, Any] = {}
        for way in WAYS:
            vars(loaded).pop(decoder._ATTRIBUTE, None)
            gemma4_compat.decode_fast(loaded)
            self.decodings[way] = decoder.of(loaded)
            self.decodings[way].fuses = way == "fused"

    def read(self, way: str, length: int, seed: int) -> tuple[float, Any]:
        """Milliseconds to the first token of a text, and its logits."""
        import torch

        vars(self._model)[decoder._ATTRIBUTE] = self.decodings[way]
        batch = models.text_prompt(self._model, length, seed=seed)
        device.synchronize()
        begun = time.perf_counter()
        with torch.no_grad():
            found = self._model.generate(
                **batch,
                do_sample=False,
                min_new_tokens=1,
                max_new_tokens=1,
                output_logits=True,
                return_dict_in_generate=True,
            )
        device.synchronize()
        return 1e3 * (time.perf_counter() - begun), found.logits[0].clone()

    def graph(self, way: str) -> Data:
        """Milliseconds of the last used graph of a prompt on the GPU, and how many kernels it has."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        decoding, times = self.decodings[way], []
        graph = list(decoding.prompts.graphs())[-1]
        for _ in range(REPLAYS):
            self._rewind(decoding)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.recording.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        self._rewind(decoding)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            graph.recording.replay()
            device.synchronize()
        kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())
        return {"ms": statistics.median(times), "kernels": kernels}

    @staticmethod
    def _rewind(decoding: Any) -> None:
        """A replay appends to a cache that is as long as the prompt needs."""
        for memory in decoding.memories:
            for length in memory.tensors[2::3]:
                length.zero_()
        device.synchronize()


def measured(model: Model, length: int, rounds: int, *, on_gpu: bool) -> Data:
    """Both ways at this length."""
    for way in WAYS:
        for seed in range(READ_FIRST):
            model.read(way, length, seed)
    with mock.patch.multiple(prompts.Progress, early=1, after=1):
        fusing, _ = model.read("fused", length, READ_FIRST)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    equal = True
    for turn in range(rounds):
        logits = []
        for way in WAYS[:: 1 - 2 * (turn % 2)]:
            spent, found = model.read(way, length, 100 + turn)
            times[way].append(spent)
            logits.append(found)
        equal = equal and logits[0].equal(logits[1])
    found = {way: {"ms": statistics.median(spent), "all": spent} for way, spent in times.items()}
    for way in WAYS if on_gpu else ():
        found[way]["graph"] = model.graph(way)
    statistic = model.decodings["fused"].statistics
    why = list(statistic.not_fused)
    return {"fusing_ms": fusing, "equal": equal, "graphs_fused": statistic.prompts_fused, "not_fused": why} | found


@contextlib.contextmanager
def recorders(*, on_gpu: bool) -> Iterator[None]:
    """On the CPU, a stand-in for graphs."""
    if on_gpu:
        yield
        return
    from gemma4_compat._graphs import recording
    from gemma4_compat._lab.stand_ins.tape import standing_in

    with standing_in(recording.RECORDERS):
        yield


def told(way: str, cell: Data) -> str:
    """One way, for the console."""
    graph = cell.get("graph")
    own = "" if graph is None else f" (graph {graph['ms']:.2f} ms, {graph['kernels']} kernels)"
    return f"{way} {cell['ms']:.1f} ms{own}"


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", required=True, choices=models.SHAPES)
    parser.add_argument("--lengths", default="64,512")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    result = common.header(Path(__file__), sys.modules[__name__], arguments.shape, common.shown(arguments))
    result |= {"machine": device.machine(), "lengths": {}}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        weights: Data | None = {} if on_gpu else None
        models.build(arguments.shape, Path(name), weights)
        loaded = models.load("gpu" if on_gpu else "bf16", Path(name), weights)
        if weights is not None:
            weights.clear()
        stack.enter_context(recorders(on_gpu=on_gpu))
        model = Model(loaded)
        for length in map(int, arguments.lengths.split(",")):
            found = result["lengths"][str(length)] = measured(model, length, arguments.rounds, on_gpu=on_gpu)
            common.write(result, arguments.out)
            shown = ", ".join(told(way, found[way]) for way in WAYS)
            print(f"{length:6}: {shown}, equal {found['equal']}, fusing {found['fusing_ms']:.0f} ms", flush=True)
    cells = list(result["lengths"].values())
    all_fused = not on_gpu or cells[-1]["graphs_fused"] == len(cells)
    return 0 if all_fused and all(cell["equal"] for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
