"""How many tokens a second do batches decode, by their rows, and has each row the same bits as by itself?

python benchmarks/decoding/rows.py --shape E2B [--out FILE.json] [--rows 1,2,4,8,16,32] [--where gpu] [--tokens 128]
    [--rounds 3] [--checked 24] [--limit SECONDS] [--own ROWS] [--profile]

Random weights in the real shape, 4-bit with double quantization unless `--where bf16`, after `decode_fast`, greedy.
`--where experts` has those of every layer in host memory; with room on the card they all come to stay there.
Batches of more than eight rows are also measured "before": PyTorch and bitsandbytes compute their products. Each case
keeps its own graphs, and they take turns. A speed is that of the tokens between the 32nd and the last of a call: the
difference of two calls.

Then some rows of the largest batch are decoded by themselves. PyTorch reads prompts, and its bits depend on the batch,
so each row gets keys, values and a first token of its own after it. Logits and tokens are compared bit by bit.

`--own 4` has products with 4-bit weights of five to eight rows use the kernels of more rows (`nf4_gemv.OWN_ROWS`).
`--profile` lists the kernels of a step of one row, of eight, and of the most. `--limit` begins no case later than that
after the start, and lists those that are left out. Exit code 1: a row differs, or speed falls by more than 2 % when
rows are added. Without a GPU a tape stands in for graphs, and speeds mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Data
from benchmarks.decoding import kernel_times, measure, models, rounds
from benchmarks.experts import models as experts_models
from benchmarks.small_card import device as small_card_device

#: Where only the experts of each layer are in host memory.
EXPERTS = "experts"
PROMPT = 64
#: Tokens of the shorter call.
SETTLED = 32
#: Rows that own products had before.
BEFORE = 8
_FALLS = 0.98

_rows: list[int] | None = None


def read_alike(kind: Any) -> None:
    """Have each of the rows in ``_rows`` keys, values and a first token of its own after a prompt. Once for a class: a
    replay that finds its class changed is captured anew.
    """
    import torch

    from gemma4_compat._gemma4.cache import cache_names

    read = kind._prefill

    @functools.wraps(read)
    def prefill(self: Any, input_ids: Any, generation_config: Any, model_kwargs: Data, **more: Any) -> Any:
        outputs = read(self, input_ids, generation_config, model_kwargs, **more)
        if _rows is None:
            return outputs
        found = cache_names.cache_in(outputs)
        cache = cache_names.cache_in(model_kwargs) if found is None else found
        for number, layer in enumerate(cache.layers):
            for held in (layer.keys, layer.values):
                for place, row in enumerate(_rows if held is not None else ()):
                    valid = held[place, :, :PROMPT]
                    generator = torch.Generator(held.device).manual_seed(1000 * row + number)
                    valid.copy_(torch.randn(valid.shape, generator=generator, device=held.device))
        outputs.logits.zero_()
        for place, row in enumerate(_rows):
            outputs.logits[place, -1, 5 + row] = 1
        return outputs

    kind._prefill = prefill


class Case:
    """Batches of so many rows, with graphs of their own.

    Args:
        model: after nothing was asked of it.
        rows: of a batch.
        before: whether own products have at most eight rows.
    """

    def __init__(self, model: Any, rows: int, *, before: bool) -> None:
        import torch

        self.rows, self.before, self.model = rows, before, model
        self.name = f"{rows} rows{' before' if before else ''}"
        prompts = [models.text_prompt(model, PROMPT, seed=row) for row in range(rows)]
        self.batch = {name: torch.cat([prompt[name] for prompt in prompts]) for name in prompts[0]}
        self._decoding: Any = None
        self.speeds: list[float] = []

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        import gemma4_compat
        from gemma4_compat._graphs import decoder
        from gemma4_compat._kernels.specs import products

        base = models.base(self.model)
        if self._decoding is None:
            vars(base).pop(decoder._ATTRIBUTE, None)
            gemma4_compat.decode_fast(base)
            self._decoding = decoder.of(base)
        vars(base)[decoder._ATTRIBUTE] = self._decoding
        with contextlib.ExitStack() as stack:
            if self.before:
                stack.enter_context(mock.patch.object(products, "MAX_ROWS", BEFORE))
            stack.enter_context(measure.fused_early())
            yield

    def generate(self, tokens: int, batch: Data | None = None, **options: Any) -> Any:
        """So many tokens of every row."""
        import torch

        given = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "eos_token_id": None}
        with self._own(), torch.no_grad():
            return self.model.generate(**(batch or self.batch), **given, **options)

    def prepare(self) -> Data:
        """Capture and fuse; what it took."""
        begun = time.perf_counter()
        for _ in range(2):
            self.generate(SETTLED)
        counted = self._decoding.statistics
        return {
            "prepared_s": time.perf_counter() - begun,
            "captured": counted.captured,
            "fused": counted.fused,
            "reasons": [*counted.reasons, *counted.not_fused],
        }

    def turn(self, tokens: int) -> None:
        """Note a speed, in tokens a second of all rows."""
        taken = []
        for number in (SETTLED, SETTLED + tokens):
            small_card_device.synchronize()
            begun = time.perf_counter()
            self.generate(number)
            small_card_device.synchronize()
            taken.append(time.perf_counter() - begun)
        self.speeds.append(self.rows * tokens / (taken[1] - taken[0]))

    def profiled(self) -> Data:
        """The kernels of a step."""
        import torch

        def decode(start: Callable[[], None]) -> None:
            left = SETTLED

            def begin(ids: Any, _scores: Any, **_more: Any) -> Any:
                nonlocal left
                left -= 1
                if not left:
                    start()
                return torch.zeros(ids.shape[:1], dtype=torch.bool, device=ids.device)

            self.generate(SETTLED + kernel_times.TOKENS, stopping_criteria=[begin])

        return kernel_times.recorded(decode)

    def text(self, rows: list[int], tokens: int) -> Any:
        """Tokens and logits of these rows, all of the batch or one."""
        global _rows
        batch = {name: tensor[rows] for name, tensor in self.batch.items()}
        _rows = rows
        try:
            return self.generate(tokens, batch, return_dict_in_generate=True, output_logits=True)
        finally:
            _rows = None


def checked(alone: Case, together: Case, tokens: int) -> Data:
    """Whether rows have the same tokens and logits in the batch as by themselves."""
    import torch

    rows = list(range(together.rows))
    many = together.text(rows, tokens)
    found: Data = {"tokens": tokens, "rows": {}}
    for row in sorted({0, 1, together.rows // 3, together.rows // 2, together.rows - 1}):
        one = Case.text(alone_as(alone, together), [row], tokens)
        same = bool(torch.equal(one.sequences[0], many.sequences[row]))
        bits = sum(int(torch.equal(first[0], other[row])) for first, other in zip(one.logits, many.logits))
        found["rows"][row] = {"same_tokens": same, "same_logits": bits}
    found["equal"] = all(one["same_tokens"] and one["same_logits"] == tokens for one in found["rows"].values())
    return found


def alone_as(alone: Case, together: Case) -> Case:
    """The case of one row with the prompts of another."""
    alone.batch = together.batch
    return alone


def run(model: Any, options: Any, write: Callable[[str, Any], None]) -> Data:
    """All cases."""
    begun = time.perf_counter()
    base = models.base(model)
    base.generation_config.max_cache_len = PROMPT + SETTLED + options.tokens
    read_alike(type(base))
    both = {rows for rows in options.rows if rows > BEFORE}
    kinds = [(rows, before) for rows in options.rows for before in (False, True)[: 1 + (rows in both)]]
    # The largest batch and a row alone first, for a limit of time.
    kinds.sort(key=lambda kind: (-kind[0] if kind[0] in (max(options.rows), 1) else 0, kind[1]))
    cases: list[Case] = []
    found: Data = {"prepared": {}, "left_out": []}
    for rows, before in kinds:
        case = Case(model, rows, before=before)
        if options.limit and time.perf_counter() - begun > options.limit:
            found["left_out"].append(case.name)
            continue
        found["prepared"][case.name] = case.prepare()
        write(case.name, found["prepared"][case.name])
        cases.append(case)
    for _ in range(options.rounds):
        for case in cases:
            case.turn(options.tokens)
    cases.sort(key=lambda case: (case.rows, case.before))
    found["tokens_s"] = {case.name: statistics.median(case.speeds) for case in cases}
    found["turns"] = {case.name: case.speeds for case in cases}
    after = [found["tokens_s"][case.name] for case in cases if not case.before]
    found["never_falls"] = all(more >= _FALLS * fewer for fewer, more in itertools.pairwise(after))
    for case in cases:
        speed = found["tokens_s"][case.name]
        write(case.name, f"{speed:,.0f} tokens/s, {1000 * case.rows / speed:.2f} ms a step")
    for case in cases if options.profile else ():
        if case.rows in (1, BEFORE, max(options.rows)):
            profile = found.setdefault("profiles", {})[case.name] = case.profiled()
            write(case.name, f"{profile.get('ms_a_token')} ms in {profile.get('kernels_a_token')} kernels a step")
            for one in profile.get("longest", ())[:14]:
                print(f"    {one['ms']:.3f} ms  {one['count']:6.1f}  {one['name']}", flush=True)
    own = {case.rows: case for case in cases if not case.before}
    if 1 in own and len(own) > 1:
        found["checked"] = checked(own[1], own[max(own)], options.checked)
        write(f"each of {max(own)} rows alone", found["checked"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=models.SHAPES, default="tiny")
    parser.add_argument("--where", default="gpu", help=f"of {', '.join([*models.WHERE, EXPERTS])}")
    parser.add_argument("--rows", type=rounds.numbers(int), default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=128, help="of the longer call, beyond those of the shorter one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checked", type=int, default=24, help="tokens of the rows that are decoded alone")
    parser.add_argument("--gib", type=float, help="of the card, for this process; all without")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds; no limit without")
    parser.add_argument("--own", type=int, default=8, help="rows of which each block turns the input into float16")
    parser.add_argument("--profile", action="store_true", help="list kernels")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    given = {name: value for name, value in vars(options).items() if name != "out"}

    def write(what: str, of_it: Any) -> None:
        print(f"{what}: {of_it}", flush=True)

    with tempfile.TemporaryDirectory(dir=models.work_folder(options.shape)) as name:
        folder: Path = Path(name)
        weights: dict[str, Any] = {}
        found: Data = {"options": given}
        begun = time.perf_counter()
        if options.where == EXPERTS:
            hosted = experts_models.hosted_experts(options.shape)
            model = experts_models.placed(options.shape, hosted, EXPERTS)
        else:
            found["built"] = models.build(options.shape, folder, weights)
            model = models.load(options.where, folder, weights)
            weights.clear()
        found["load_s"] = time.perf_counter() - begun
        write("built and loaded, s", found["load_s"])
        from gemma4_compat._kernels.specs import nf4_gemv

        nf4_gemv.OWN_ROWS = options.own
        with rounds.stand_in(), small_card_device.ballast(options.gib):  # transformers has been imported
            found |= run(model, options, write)
    found["memory"] = small_card_device.memory()
    if options.out:
        options.out.write_text(json.dumps(found, indent=1, default=str))
    print(f"never falls: {found['never_falls']}; left out: {found['left_out']}")
    return int(not (found["never_falls"] and found.get("checked", {"equal": True})["equal"]))


if __name__ == "__main__":
    sys.exit(main())
