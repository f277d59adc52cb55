"""Do the custom kernels decode one long text with memory flat, and the same tokens however long the cache is?

python benchmarks/decoding/long_text.py --shape E2B --out FILE.json [--tokens 10000]

Random weights in the real shape, 4-bit with double quantization, on the card; `decode_fast`, a prompt of 64 tokens,
sampled with a seed. Two runs: in a cache with room for the text, and in one of twice that length, which both attend to
the same keys. The prompt is read by PyTorch, whose bits may depend on the length of the cache, so the second run takes
over what the first one kept of it.

Exit code 1: tokens differ, or memory grew by more than 4 MiB after the first tenth of the text. `--shape tiny` runs
without a GPU; a stand-in captures then, and memory is not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import depth_measure, models
from benchmarks.small_card import device as small_card_device
from benchmarks.small_card.models import PROMPT, Clock

#: How often memory is looked at, and how many bytes more than at first are none: the allocator's blocks for the text.
LOOKS = 40
FLAT = 4 << 20
NAMES = ("allocated", "reserved")


class Prompt:
    """Has every later run go on from what the first one kept of its prompt."""

    def __init__(self) -> None:
        self._kept: list[Any] | None = None

    @contextlib.contextmanager
    def shared(self, kind: Any) -> Iterator[None]:
        """Inside, models of this class do that."""
        read = kind._prefill

        @functools.wraps(read)
        def prefill(model: Any, ids: Any, config: Any, given: Data, **more: Any) -> Any:
            outputs = read(model, ids, config, given, **more)
            found = [outputs.logits, *self._held(depth_measure._cache(outputs, given), ids.shape[1])]
            if self._kept is None:
                self._kept = [one.clone() for one in found]
            for one, before in zip(found, self._kept, strict=True):
                one.copy_(before)
            return outputs

        with mock.patch.object(kind, "_prefill", prefill):
            yield

    @staticmethod
    def _held(cache: Any, length: int) -> Iterator[Any]:
        for layer in cache.layers:
            if layer.keys is not None:
                yield from (layer.keys[:, :, :length], layer.values[:, :, :length])


def run(model: Any, prompt: int, tokens: int, room: int) -> Data:
    """One text, in a cache with room for so many tokens: the tokens, memory on the way, tokens a second."""
    import torch

    import gemma4_compat

    model.generation_config.max_cache_len = room
    looks: list[Data] = []

    def look(number: int) -> None:
        if torch.cuda.is_available():
            memory = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            looks.append({"token": number, **dict(zip(NAMES, memory, strict=True))})

    every = max(1, tokens // LOOKS)
    clock = Clock(at={number: functools.partial(look, number) for number in range(every, tokens + 1, every)})
    batch = models.text_prompt(model, prompt)
    torch.manual_seed(0)
    started = time.perf_counter()
    with torch.no_grad():
        ids = model.generate(
            **batch, do_sample=True, top_k=50, min_new_tokens=tokens, max_new_tokens=tokens, streamer=clock
        )
    small_card_device.synchronize()
    seconds = time.perf_counter() - started
    found = ids[0, prompt:].tolist()
    counted = gemma4_compat.statistics(model).decoding
    return {
        "room": room,
        "tokens": found,
        "digest": hashlib.sha256(json.dumps(found).encode()).hexdigest(),
        "tok_s": tokens / seconds,
        "memory": looks,
        "steps": {name: getattr(counted, name) for name in ("replayed", "captured", "fused", "eager")},
        "reasons": [*counted.reasons, *counted.not_fused],
    }


def grown(looks: list[Data], tokens: int) -> dict[str, int]:
    """Bytes that memory was more at most than when a tenth of the text was there."""
    later = [look for look in looks if look["token"] * 10 >= tokens]
    return {name: max(look[name] for look in later) - later[0][name] for name in NAMES} if later else {}


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The number of the first token that is not the same."""
    return next((number for number, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), None)


def compared(model: Any, prompt: int, tokens: int, keep: Callable[[Data], None] = lambda _: None) -> Data:
    """Both runs, and what is wrong. ``keep`` is given what there is after each run."""
    import gemma4_compat

    gemma4_compat.decode_fast(model)
    result: Data = {"runs": [], "problems": []}
    with Prompt().shared(type(model)):
        for factor in (1, 2):
            result["runs"].append(run(model, prompt, tokens, factor * (prompt + tokens)))
            keep(result)
    one, other = (single.pop("tokens") for single in result["runs"])
    different = first_difference(one, other)
    result |= {"distinct_tokens": len(set(one)), "first_difference": different}
    if different is not None:
        result["problems"].append(f"token {different} is not the same in a longer cache")
    for single in result["runs"]:
        single["grown"] = grown(single["memory"], tokens)
        result["problems"] += [
            f"a cache of {single['room']}: {name} memory grew by {nbytes / 2**20:.1f} MiB"
            for name, nbytes in single["grown"].items()
            if nbytes > FLAT
        ]
        if not single["steps"]["replayed"]:
            result["problems"].append(f"nothing was replayed: {'; '.join(single['reasons'])}")
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(models.SHAPES), required=True, help="what is built")
    parser.add_argument("--tokens", type=int, default=10_000, help="of the text, after the prompt (10000)")
    parser.add_argument("--out", type=Path, help="write the result here, and after every run what there is")
    arguments = parser.parse_args(argv)
    import peft  # noqa: F401  (while events are torch's)
    import torch
    from transformers import Gemma4ForConditionalGeneration  # noqa: F401

    import gemma4_compat  # noqa: F401  (before the others)
    from gemma4_compat._graphs import recording
    from gemma4_compat._lab.stand_ins import tape

    header = common.header(Path(__file__), sys.modules[__name__], arguments.shape, common.shown(arguments))
    stand_in = contextlib.nullcontext() if torch.cuda.is_available() else tape.standing_in(recording.RECORDERS)
    with common.temporary("long-", models.work_folder(arguments.shape)) as work, stand_in:
        weights: Data = {}
        header |= models.build(arguments.shape, work, weights)
        model = models.load("gpu", work, weights)
        weights.clear()
        result = compared(model, PROMPT, arguments.tokens, lambda so_far: common.write(header | so_far, arguments.out))
        result = header | result
        common.write(result, arguments.out)
    for single in result["runs"]:
        print(f"room for {single['room']:,}: {single['tok_s']:.0f} tok/s, grown {single['grown']}, {single['steps']}")
    print(f"first token that differs: {result['first_difference']}; {result['distinct_tokens']} distinct tokens")
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
