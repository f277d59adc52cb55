"""How long does the first text of a process take against a later one, and where do its seconds go?

python benchmarks/decoding/first_text.py --shape E2B --out FILE.json [--tokens 300] [--later 3] [--runs RUN,...]

Each run is a process of its own, with random weights in 4 bits, and all runs have the same folder of compiled kernels:

* ``empty``: nothing is in it.
* ``noted``: kernels and notes of the runs before.
* ``kernels``: the kernels, without what was noted of steps.

cuBLAS is set up before the first text, and timed. For every text: its seconds, and those in parts that are timed (a
part may be within another). Texts are greedy, and all the same: the exit code is 1 if one differs. Without a GPU, a
tape stands in for graphs, and an emulator for kernels: seconds mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks import common
from benchmarks.common import MARK, Data
from benchmarks.decoding import models, rounds

#: Tokens of the prompt.
PROMPT = 64
RUNS = ("empty", "noted", "kernels")


class Parts:
    """Seconds in functions of this package, and how often each was called."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        """Count a call."""
        known = self.found.setdefault(name, [0, 0.0])
        known[0], known[1] = known[0] + 1, known[1] + seconds

    def take(self) -> Data:
        """What was counted since the last time, the longest part first."""
        found, self.found = self.found, {}
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are counted."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(name, time.perf_counter() - begun)

        return call

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls are counted."""
        import torch

        from gemma4_compat._generation import call
        from gemma4_compat._graphs import captured_calls, decoder, fused_steps, steps
        from gemma4_compat._graphs.recording import RECORDERS
        from gemma4_compat._kernels import kernels

        kind = torch.device(models.main_device()).type
        recorder, compiler = RECORDERS[kind], kernels.COMPILERS[kind]
        where: dict[Any, tuple[str, ...]] = {
            call.Decoder: ("_read",),
            captured_calls.CapturedCalls: ("_captured",),
            decoder.AdapterStates: ("_changed",),
            fused_steps: ("fused", "fused_at_once", "_captured", "_compare"),
            steps.Step: ("run_first", "record", "_to_be_fused"),
            recorder: ("capture",),
            kernels.Kernels: ("prepare", "recall", "note", "_trial", "selftest"),
            compiler: ("compiled", "begin"),
        }
        with contextlib.ExitStack() as stack:
            for holder, names in where.items():
                for name in names:
                    shown = f"{holder.__name__.rpartition('.')[2]}.{name}"
                    stack.enter_context(mock.patch.object(holder, name, self.timed(shown, getattr(holder, name))))
            gc.callbacks.append(self._collected)
            yield
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
        elif info["generation"] == 2:
            self.add("garbage collection", time.perf_counter() - self._begun)


@contextlib.contextmanager
def stand_in(*, noted: bool) -> Iterator[None]:
    """Without a GPU: a tape in place of graphs, an emulator in place of NVRTC. Nothing is noted unless ``noted``."""
    import torch

    from gemma4_compat._kernels import kernel_files, kernels
    from gemma4_compat._kernels import noted as notes

    with contextlib.ExitStack() as stack:
        stack.enter_context(rounds.stand_in())
        if not torch.cuda.is_available():
            from tests.unit.kernels.host_kernels import HostCompiler

            class Kept(HostCompiler):
                def __init__(self, device: Any) -> None:
                    super().__init__(device)
                    self.notes = notes.Notes(kernel_files.Files(kernel_files.folder(), "the host"))

            stack.enter_context(mock.patch.dict(kernels.COMPILERS, {"cpu": Kept}))
        if not noted:
            stack.enter_context(mock.patch.object(notes.Notes, "of", return_value=notes.Note()))
        yield


def child(options: Any) -> int:
    """One process: its texts."""
    import torch

    parts = Parts()
    with tempfile.TemporaryDirectory(dir=models.work_folder(options.shape)) as name:
        begun, weights = time.perf_counter(), {}
        built = models.build(options.shape, Path(name), weights)
        with stand_in(noted=options.child != "kernels"), parts.watching():
            model = gemma4_compat.decode_fast(models.load("gpu", Path(name), weights))
            weights.clear()
            batch = models.text_prompt(model, PROMPT)
            square = torch.ones(64, 64, device=models.main_device(), dtype=torch.bfloat16)
            square.sum().item()  # the GPU is there
            loaded = time.perf_counter() - begun
            (square @ square).sum().item()
            product = time.perf_counter() - begun - loaded
            texts, tokens = [], []
            for _ in range(1 + options.later):
                before = vars(gemma4_compat.statistics(model).decoding).copy()
                found, seconds = rounds.timed(model, batch, options.tokens, do_sample=False)
                after = vars(gemma4_compat.statistics(model).decoding)
                counted = {key: after[key] - before[key] for key in ("captured", "fused", "capture_seconds", "eager")}
                texts.append({"seconds": seconds, **counted, "parts": parts.take()})
                tokens.append(found[0].tolist())
            found = gemma4_compat.statistics(model).decoding
    said = {"machine": built["machine"], "loaded_s": loaded, "first_product_s": product, "texts": texts}
    said |= {"tokens": tokens, "not_fused": list(found.not_fused), "reasons": list(found.reasons)}
    print(MARK + json.dumps(said, default=str), flush=True)
    return 0


def shown(name: str, found: Data) -> str:
    """A run in lines."""
    first, *later = found["texts"]
    usual = min(text["seconds"] for text in later)
    lines = [
        f"{name}: first text {first['seconds']:.2f} s, later {usual:.2f} s, {first['seconds'] / usual:.2f} times; "
        f"captures {first['capture_seconds']:.2f} s, fused {first['fused']}; before it: loaded in "
        f"{found['loaded_s']:.0f} s, cuBLAS began in {found['first_product_s']:.2f} s"
    ]
    lines += [f"  {seconds:7.3f} s {int(count):5} x {part}" for part, (count, seconds) in first["parts"].items()]
    return "\n".join([*lines, *(f"  {reason}" for reason in (*found["not_fused"], *found["reasons"]))])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=models.SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--later", type=int, default=3, help="texts after the first")
    parser.add_argument("--runs", default="empty,noted,kernels")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=RUNS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options)
    given = [f"--{name} {value}" for name, value in vars(options).items() if name not in ("out", "child")]
    found = common.header(Path(__file__), sys.modules[__name__], options.shape, given) | {"runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.runs.split(","):
            command = [sys.executable, __file__, "--child", name, "--shape", options.shape]
            command += ["--tokens", str(options.tokens), "--later", str(options.later)]
            environment = {**os.environ, "GEMMA4_COMPAT_CACHE": folder}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            said = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
            found["runs"][name] = json.loads(said.removeprefix(MARK))
            found["machine"] = found["runs"][name].pop("machine")
            print(shown(name, found["runs"][name]), flush=True)
    texts = [text for one in found["runs"].values() for text in one.pop("tokens")]
    found["equal"] = all(text == texts[0] for text in texts)
    common.write(found, options.out)
    print(f"{len(texts)} texts equal: {found['equal']}")
    return int(not found["equal"])


if __name__ == "__main__":
    sys.exit(main())
