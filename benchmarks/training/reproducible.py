"""What does it cost that steps with `train_fast` are reproducible, are two runs the same, and what does packing save?

python benchmarks/training/reproducible.py --shape E2B --out FILE.json
    [--parts deterministic,packed,streamed,fused] [--where streamed] [--sequences 512,2048,8192] [--rows 2048,8192]
    [--turns 2] [--minutes 2.5] [--kernels]

QLoRA of rank 16 on every linear layer of the decoder, random weights in the real shape, 4-bit with double
quantization, checkpointing, bf16 autocast, AdamW, one process, with what `train_fast` turns on in a GPU with room: the
loss in chunks, windows and products, and graphs. Ways, in turns, each turn from the same adapter:

deterministic   one text a step
  whole           with `products=False`: PyTorch's attention, which adds gradients in a changing order
  free            as `train_fast` is
  filled          `torch.use_deterministic_algorithms(True)`, which also fills new memory
  unfilled        the same with `torch.utils.deterministic.fill_uninitialized_memory = False`
packed          texts of `--shortest` to `--longest` tokens, which together fill a row
  packed          in one row, by DataCollatorWithFlattening
  padded          the same texts, each in a row of its own, all batches padded to one length
streamed        one text a step, unfilled; for `--where half` or `streamed`, and only where it is named
  eager           with everything but graphs
  replayed        with graphs
fused           one text a step, unfilled; only where it is named
  pytorch         graphs of PyTorch's kernels; it computes the softmax of attention, and the loss
  unfused         graphs of PyTorch's kernels, except for those two
  fused           graphs with fused kernels, once they are compiled
                  `--kernels`: of a step of the first and the last, the kernels that take longest; of each fused
                  kernel, GB a second

For each way: seconds of steps after the first six, in which `train_fast` captures; tokens that are not padding a
second; PyTorch's peaks; and losses and adapter of one turn against those of the others. CUBLAS_WORKSPACE_CONFIG is set
for all ways. A part starts nothing that ends later than `--minutes` after its begin; the file is written after every
turn. Exit code 1: something raised, a loss is not finite, nothing was replayed, two turns differ that must not, also
eager and replayed ones, or unfused and fused ones, or the first losses of packed and padded texts by over a percent.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import models
from benchmarks.training import long_steps, short_steps
from gemma4_compat._gemma4.attention import products
from gemma4_compat._graphs import recording
from gemma4_compat._kernels import programs
from gemma4_compat._kernels.kernels import Kernels
from gemma4_compat._kernels.kernels import of as kernels_of
from gemma4_compat._kernels.programs import Kernel
from gemma4_compat._lab.stand_ins.tape import standing_in
from gemma4_compat._training import chunks
from gemma4_compat._training.captured import fusing, layers

#: Whether algorithms are deterministic, and whether new memory is then filled.
DETERMINISTIC = {"whole": (False, True), "free": (False, True), "filled": (True, True), "unfilled": (True, False)}
#: Ways of which each turn trains the same.
REPRODUCIBLE = ("free", "filled", "unfilled")
PACKED = ("packed", "padded")
#: Of `short_steps.WAYS`.
STREAMED = {"eager": "windows", "replayed": "fast-windows"}
#: Whether graphs are fused.
FUSED = {"pytorch": False, "unfused": False, "fused": True}
PARTS = {"deterministic": tuple(DETERMINISTIC), "packed": PACKED, "streamed": tuple(STREAMED), "fused": tuple(FUSED)}
#: Ways that are compared with each other.
COMPARED = (*STREAMED, "unfused", "fused")
#: Steps until kernels are compiled, at most; kernels of a step that are shown; launches of a kernel that is timed.
COMPILED, SHOWN, LAUNCHES = 200, 20, 50
#: Different batches of packed texts.
BATCHES = 4
#: Padded batches have a multiple of so many tokens.
MULTIPLE = 256
#: The first losses of the same texts packed and padded are at most so far from each other, relatively.
CLOSE = 0.01


@contextlib.contextmanager
def determinism(way: str) -> Iterator[None]:
    """Inside, algorithms are as this way has them."""
    import torch

    unfilled = way in STREAMED or way in FUSED
    enabled, filled = DETERMINISTIC["unfilled" if unfilled else way if way in DETERMINISTIC else "free"]
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


@contextlib.contextmanager
def computed(way: str) -> Iterator[None]:
    """Inside, what a way has of our kernels computes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(fusing, "ENABLED", FUSED.get(way, True)))
        if way == "pytorch":
            stack.enter_context(mock.patch.object(products, "are_fused", return_value=False))
            stack.enter_context(mock.patch.object(chunks, "_is_fused", return_value=False))
        yield


def lengths(row: int, least: int, most: int, draw: random.Random) -> list[int]:
    """Of texts that fill a row of so many tokens, none shorter than ``least`` or longer than ``most``.

    Raises:
        ValueError: no such texts do.
    """
    count = max(1, round(2 * row / (least + most)))
    if not count * least <= row <= count * most:
        raise ValueError(f"{count} texts of {least} to {most} tokens do not fill a row of {row}")
    found = [draw.randint(least, most) for _ in range(count)]
    while missing := row - sum(found):
        at, by = draw.randrange(count), 1 if missing > 0 else -1
        if least <= found[at] + by <= most:
            found[at] += by
    return found


def packed(texts: list[list[Any]]) -> list[Data]:
    """A row for each batch. ``texts``: of each batch its texts, each int64 of shape (tokens,)."""
    from transformers import DataCollatorWithFlattening

    collator = DataCollatorWithFlattening()
    rows = [collator([{"input_ids": text.tolist()} for text in batch]) for batch in texts]
    return [{name: row[name].to(batch[0].device) for name in row} for row, batch in zip(rows, texts, strict=True)]


def padded(texts: list[list[Any]]) -> list[Data]:
    """The same texts on their own rows, in batches of one length."""
    import torch

    longest = max(len(text) for batch in texts for text in batch)
    longest = -(-longest // MULTIPLE) * MULTIPLE
    found = []
    for batch in texts:
        ids = torch.stack([torch.nn.functional.pad(text, (0, longest - len(text))) for text in batch])
        ends = torch.tensor([[len(text)] for text in batch], device=ids.device)
        mask = torch.arange(longest, device=ids.device) < ends
        labels = ids.masked_fill(~mask, -100)
        found.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
    return found


class Parts:
    """Measures the parts of a run, in turns, and keeps what it finds."""

    def __init__(self, run: long_steps.Run, steps: long_steps.Steps) -> None:
        self.run, self.steps, self.arguments = run, steps, run.arguments
        self.adapters: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """A part has its own time."""
        self.run.deadline = time.monotonic() + 60 * self.arguments.minutes

    def deterministic(self) -> None:
        """A text of each length."""
        for sequence in self.arguments.sequences:
            text = self.steps.text(sequence)
            self.turns(f"{sequence}", sequence, {way: [text] for way in DETERMINISTIC})

    def streamed(self) -> None:
        """The same, with and without graphs."""
        for sequence in self.arguments.sequences:
            text = self.steps.text(sequence)
            self.turns(f"{sequence} streamed", sequence, {way: [text] for way in STREAMED})

    def fused(self) -> None:
        """Without and with fused kernels, and what the kernels of a step take."""
        for sequence in self.arguments.sequences:
            text = self.steps.text(sequence)
            self.run.attempt(f"{sequence} compiled", 0, lambda text=text: self.compiled(text))
            for way in ("pytorch", "fused") if self.arguments.kernels else ():
                self.run.attempt(f"{sequence} kernels", 0, lambda text=text, way=way: self.kernels(text, way))
            self.turns(f"{sequence} fused", sequence, {way: [text] for way in FUSED})

    def compiled(self, text: Data) -> None:
        """Have the kernels of a text compiled."""
        with determinism("fused"), short_steps.switched(self.steps, "fast-windows"):
            self.settle(text, "fused")

    def settle(self, text: Data, way: str) -> None:
        """Run steps until graphs are captured, and fused if they are to be."""
        for number in range(COMPILED):
            self.steps.loss(text)
            found = gemma4_compat.statistics(self.steps.model).training
            is_fused = found.fused == 2 * found.captured or found.not_fused
            if number >= layers.CAPTURED_AT and (is_fused or not FUSED[way]):
                return

    def kernels(self, text: Data, way: str) -> None:
        """The kernels of a step, and what those of ours move."""
        import torch

        launched: dict[str, Kernel] = {}
        launch = Kernels.launch

        def noted(kernels: Kernels, kernel: Kernel) -> None:
            if torch.cuda.is_current_stream_capturing():
                launched.setdefault(kernel.text, kernel)
            launch(kernels, kernel)

        with (
            determinism(way),
            computed(way),
            mock.patch.object(Kernels, "launch", noted),
            short_steps.switched(self.steps, "fast-windows"),
        ):
            self.settle(text, way)
            found: Data = {"kernels": profiled(lambda: self.steps.loss(text))}
            found["moved"] = [moved(kernel) for kernel in launched.values() if not kernel.shared]
        case = f"{text['input_ids'].numel()} {way}"
        self.run.result.setdefault("kernels", {})[case] = found
        whole = sum(one["ms"] for one in found["kernels"])
        lines = [f"kernels of {case}: {whole:.1f} ms, {sum(one['count'] for one in found['kernels'])} launches"]
        lines += ["{ms:8.2f} ms {count:5d} x {name:.100}".format(**one) for one in found["kernels"][:SHOWN]]
        for one in sorted(found["moved"], key=lambda one: -one["mb"])[:SHOWN]:
            lines.append("{us:8.1f} us {mb:7.2f} MB {gb_s:6.0f} GB/s {name} {sizes} writes {written}".format(**one))
        self.run.keep("\n".join(lines))

    def packed(self) -> None:
        """Texts that fill a row of each length."""
        for row in self.arguments.rows:
            draw = random.Random(row)
            texts = []
            for number in range(BATCHES):
                cut = lengths(row, self.arguments.shortest, self.arguments.longest, draw)
                texts.append(list(self.steps.tokens_of(row, seed=1 + number)[0].split(cut)))
            self.turns(f"row of {row}", row, {"packed": packed(texts), "padded": padded(texts)})

    def turns(self, case: str, tokens: int, batches: dict[str, list[Data]]) -> None:
        """Every way in turns; ``tokens`` of a batch are not padding."""
        took = dict.fromkeys(batches, 0.0)
        for turn, way in itertools.product(range(1, 1 + self.arguments.turns), batches):
            title, started = f"{case}, {way}, {turn}", time.monotonic()
            found = self.run.attempt(title, took[way], lambda way=way: self.turn(way, batches[way]))
            took[way] = max(took[way], time.monotonic() - started)
            if found is None:
                self.run.keep(f"{title}: {self.run.result['out'].get(title, 'not measured')}")
                continue
            cell, adapter = found
            cell |= {"case": case, "tokens": tokens, "way": way, "turn": turn, "shape": list(shape(batches[way]))}
            cell["apart"] = self.apart(case if way in COMPARED else f"{case}, {way}", adapter)
            self.run.result["cells"][title] = cell
            seconds, reserved = statistics.median(cell["seconds"]), cell["memory"]["peak_reserved_gib"]
            speed = f"{seconds * 1e3:.1f} ms, {tokens / seconds:.0f} tokens a second"
            graphs = (
                f"captured in {cell['capture_s']:.1f} s, {cell['fused']} fused" if "fused" in cell else "no graphs"
            )
            self.run.keep(f"{title}: {speed}, {reserved} GiB reserved, {graphs}")

    def turn(self, way: str, batches: list[Data]) -> tuple[Data, dict[str, Any]]:
        """Times, peaks and losses of a turn, and the adapter after it."""
        with determinism(way), computed(way):
            fast = "fast-whole" if way == "whole" else STREAMED.get(way, STREAMED["replayed"])
            found = short_steps.measured(self.steps, fast, batches, self.arguments.steps)
        return found, {name: weight.detach().cpu() for name, weight in self.steps.sorted()}

    def apart(self, name: str, adapter: dict[str, Any]) -> float | None:
        """How far an adapter is from that of the first turn of this name, of what the turn changed; None for that."""
        if name not in self.adapters:
            self.adapters[name] = adapter
            return None
        first, initial = self.adapters[name], self.steps.initial
        apart, changed = (
            math.sqrt(sum(float((adapter[one].double() - other[one].double()).square().sum()) for one in adapter))
            for other in (first, initial)
        )
        return apart / changed


def profiled(step: Callable[[], Any]) -> list[Data]:
    """The kernels of a step by name, those that take longest first: milliseconds, and how often they ran."""
    import torch

    if not torch.cuda.is_available():
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name, []).append(event.device_time_total / 1000)
    rows = [{"name": name, "ms": sum(times), "count": len(times)} for name, times in found.items()]
    return sorted(rows, key=lambda row: -row["ms"])


def moved(kernel: Kernel) -> Data:
    """How long a kernel takes that was captured, and how much memory it reads and writes a second."""
    import torch

    launch, events = kernels_of(kernel.tensors[0].device).launch, [torch.cuda.Event(enable_timing=True) for _ in "be"]
    launch(kernel)
    events[0].record()
    for _ in range(LAUNCHES):
        launch(kernel)
    events[1].record()
    torch.cuda.synchronize()
    each = events[0].elapsed_time(events[1]) * 1e-3 / LAUNCHES
    size = sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in kernel.tensors)
    found = {"name": programs.name_of(kernel.text), "sizes": kernel.sizes, "written": kernel.written}
    return found | {"us": each * 1e6, "mb": size * 1e-6, "gb_s": size * 1e-9 / each}


def shape(batches: list[Data]) -> tuple[int, int]:
    """(rows, tokens) of a batch."""
    rows, tokens = batches[0]["input_ids"].shape
    return rows, tokens


def problems(cells: Data) -> Iterator[str]:
    """What must not be."""
    first: dict[tuple[str, str], list[str]] = {}
    for title, cell in cells.items():
        if not all(math.isfinite(float(loss)) for loss in cell["losses"]):
            yield f"{title}: a loss is not finite"
        if cell["way"] != "eager" and not cell["replayed"]:
            yield f"{title}: nothing was replayed"
        losses = first.setdefault((cell["case"], "" if cell["way"] in COMPARED else cell["way"]), cell["losses"])
        same = cell["way"] in (*COMPARED, *REPRODUCIBLE)
        if cell["way"] == "fused" and cell["not_fused"]:
            yield f"{title}: {cell['not_fused']}"
        if same and (cell["losses"] != losses or cell["apart"]):
            yield f"{title}: not what the first turn trained"
    for (case, way), losses in first.items():
        other = first.get((case, "padded")) if way == "packed" else None
        if other and not math.isclose(float(losses[0]), float(other[0]), rel_tol=CLOSE):
            yield f"{case}: a first loss of {losses[0]} packed, and of {other[0]} padded"


def table(cells: Data) -> Iterator[str]:
    """A row for each case and way."""
    yield "| case | way | batch | tokens a second | of the first way | reserved, GiB | losses apart | adapters apart |"
    yield "|---|---|---|---:|---:|---:|---:|---:|"
    cases: dict[str, dict[str, list[Data]]] = {}
    for cell in cells.values():
        cases.setdefault(cell["case"], {}).setdefault(cell["way"], []).append(cell)
    for case, ways in cases.items():
        first = {cell["turn"]: cell for cell in next(iter(ways.values()))}
        for way, turns in ways.items():
            yield f"| {case} | {way} | {' | '.join(figures(turns, first))} |"


def figures(turns: list[Data], first: dict[int, Data]) -> Iterator[str]:
    """What the table says of a way. ``first``: the turns of the first way, by number."""
    yield " x ".join(map(str, turns[0]["shape"]))
    speeds = [cell["tokens"] / seconds for cell in turns for seconds in cell["seconds"]]
    yield f"{statistics.median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f})"
    pairs = [(first[cell["turn"]]["seconds"], cell["seconds"]) for cell in turns if cell["turn"] in first]
    ratios = [statistics.median(before) / statistics.median(after) for before, after in pairs]
    yield f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "-"
    reserved = [cell["memory"]["peak_reserved_gib"] for cell in turns]
    yield "-" if None in reserved else f"{max(reserved):.2f}"
    losses = [[float(loss) for loss in cell["losses"]] for cell in turns]
    yield f"{max(abs(one - losses[0][at]) for other in losses for at, one in enumerate(other)):.2g}"
    yield f"{max(cell['apart'] or 0.0 for cell in turns):.2g}"


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=2.5)
    parser.add_argument("--where", default="gpu", help=f"of {', '.join(models.WHERE)}")
    parser.add_argument("--parts", default="deterministic,packed", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--sequences", default="512,2048,8192", help="tokens of a text, not packed")
    parser.add_argument("--rows", default="2048,8192", help="tokens of a packed row")
    parser.add_argument("--shortest", type=int, default=50, help="tokens of a packed text (50)")
    parser.add_argument("--longest", type=int, default=500, help="tokens of a packed text (500)")
    parser.add_argument("--kernels", action="store_true", help="show what the kernels of a step take (part fused)")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="that are timed in a turn (6)")
    parser.add_argument("--rank", type=int, default=long_steps.RANK)
    arguments = parser.parse_args(argv)
    if arguments.shape is None:
        parser.error("--shape is required")
    common.chosen(parser, arguments, "parts", PARTS)
    shown = common.shown(arguments)
    for name in ("sequences", "rows"):
        setattr(arguments, name, [int(number) for number in getattr(arguments, name).split(",") if number])
    for row in arguments.rows if "packed" in arguments.parts else ():
        try:
            lengths(row, arguments.shortest, arguments.longest, random.Random(0))
        except ValueError as error:
            parser.error(str(error))
    arguments.seconds = 60 * arguments.minutes
    run = long_steps.Run(arguments)
    run.result |= common.header(Path(__file__), sys.modules[__name__], arguments.shape, shown, arguments.note)
    with common.temporary("reproducible-", arguments.work or models.work_folder(arguments.shape)) as folder:
        base, loaded = long_steps.load(arguments.shape, arguments.where, folder)
        run.result |= loaded
        parts = Parts(run, long_steps.Steps(base, rank=arguments.rank, tokens=None))
        run.keep(f"loaded in {loaded['load_s']:.0f} s")
        with standing_in(recording.RECORDERS):  # without a GPU
            for name in arguments.parts:
                parts.begin()
                getattr(parts, name)()
    run.result["problems"] += problems(run.result["cells"])
    run.keep("\n".join(table(run.result["cells"])))
    return common.ended(run.result)


if __name__ == "__main__":
    sys.exit(main())
