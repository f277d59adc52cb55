"""What a turn of a conversation costs until its first token: read whole, and with ``reuse_prefix``.

python benchmarks/decoding/turns.py                                       the tiny model, on any machine
python benchmarks/decoding/turns.py --shape E2B --first 2048 --out FILE.json    4 bits, everything on the GPU
python benchmarks/decoding/turns.py --bound 40                            how far logits are off, and equal texts

A conversation has a first prompt, then questions and answers of the same lengths, all random. Turns 2 and 10 are asked
with a model that reads everything and with one that reuses what it holds, under the default cache and after
``decode_fast``. Milliseconds are medians of ``--rounds`` conversations; on a CPU, calls of Python functions and
operations of PyTorch say more. Without a GPU a stand-in captures, whose replays run the operations one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import gemma4_compat
from benchmarks.decoding import models
from benchmarks.small_card.device import main_device
from gemma4_compat._graphs import recording

WAYS: dict[str, dict[str, bool] | None] = {
    "default cache": None,
    "decode_fast": {},
    "any_length": {"any_length": True},
}
TURNS = (2, 10)


class First(Exception):  # noqa: N818  # no error
    """The first token is there."""


class Clock:
    """A streamer that notes when the first token comes, and stops there if it is told to."""

    def __init__(self, *, stops: bool = False) -> None:
        self.begun, self.first, self._put, self._stops = time.perf_counter(), 0.0, 0, stops

    def put(self, _tokens: Any) -> None:
        """Get the prompt, then each token."""
        self._put += 1
        if self._put == 2:  # the prompt comes first
            self.first = time.perf_counter() - self.begun
            if self._stops:
                raise First

    def end(self) -> None:
        """Get the end of the text."""


def ask(model: Any, ids: Any, new: int, **options: Any) -> Any:
    import torch

    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": new, "min_new_tokens": new}
    with torch.no_grad():
        return model.generate(**given, do_sample=False, **options)


def text(length: int, seed: int, device: Any) -> Any:
    import torch

    return torch.randint(5, 200, (1, length), generator=torch.Generator().manual_seed(seed)).to(device)


def counted(model: Any, ids: Any) -> dict[str, int]:
    """Calls of Python functions, and operations of PyTorch, until the first token; the conversation is lost."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):  # type: ignore[misc]
        count = 0

        def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return op(*args, **(kwargs or {}))

    with Operations() as operations, contextlib.suppress(First):
        ask(model, ids, 2, streamer=Clock(stops=True))
    return {"operations": operations.count}


def profiled(model: Any, ids: Any) -> dict[str, int]:
    with cProfile.Profile() as profile, contextlib.suppress(First):
        ask(model, ids, 2, streamer=Clock(stops=True))
    return {"calls": pstats.Stats(profile).total_calls}  # type: ignore[attr-defined]


def conversation(model: Any, options: argparse.Namespace, seed: int) -> list[Any]:
    """The prompt of each turn, with the answers of the model to those before."""
    import torch

    found = [text(options.first, seed, model.device)]
    for turn in range(1, max(TURNS)):
        said = ask(model, found[-1], options.answer)
        found.append(torch.cat([said, text(options.question, 1000 * seed + turn, model.device)], dim=-1))
    return found


def measured(
    model: Any, options: argparse.Namespace, conversations: list[list[Any]], way: dict[str, Any], *, reuse: bool
) -> dict[str, dict[str, Any]]:
    """By turn: its milliseconds, the tokens that were read, and what the host did for it."""
    found: dict[str, dict[str, Any]] = {str(turn): {"tokens": [], "ms": []} for turn in TURNS}
    counts = gemma4_compat.statistics(model).decoding
    for prompts in conversations:
        gemma4_compat.decode_fast(model, reuse_prefix=reuse, **way)
        for turn, ids in enumerate(prompts, 1):
            if turn not in TURNS:
                if reuse:
                    ask(model, ids, options.answer)
                continue
            entry, before, clock = found[str(turn)], counts.prompt_tokens_read, Clock()
            tokens = ask(model, ids, options.answer, streamer=clock)
            entry["tokens"].append(tokens[0, ids.shape[1] :].tolist())
            entry["ms"].append(round(1000 * clock.first, 1))
            entry |= {"prompt": ids.shape[1], "read": counts.prompt_tokens_read - before if reuse else ids.shape[1]}
    for turn in TURNS:
        for count in (counted, profiled):
            gemma4_compat.decode_fast(model, reuse_prefix=reuse, **way)
            for ids in conversations[0][: turn - 1] if reuse else ():
                ask(model, ids, options.answer)
            found[str(turn)] |= count(model, conversations[0][turn - 1])
    gemma4_compat.decode_fast(model, **way)
    return found


def table(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    print("| cache | turn | prompt | read | ms to the first token | calls | operations | tokens |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for way, fast in WAYS.items():
        given = {"graphs": False} if fast is None else fast
        gemma4_compat.decode_fast(model, **given)
        conversations = [conversation(model, options, seed) for seed in range(options.rounds)]
        whole, reused = (measured(model, options, conversations, given, reuse=reuse) for reuse in (False, True))
        found[way] = {"whole": whole, "reused": reused}
        for turn in map(str, TURNS):
            one, other = whole[turn], reused[turn]
            same = sum(a == b for a, b in zip(one["tokens"], other["tokens"], strict=True))
            one["median"], other["median"] = (round(statistics.median(each["ms"]), 1) for each in (one, other))
            cells = [f"{one[name]:,} -> {other[name]:,}" for name in ("read", "median", "calls", "operations")]
            equal = f"equal in {same} of {len(one['tokens'])}"
            print(f"| {way} | {turn} | {one['prompt']:,} | {' | '.join(cells)} | {equal} |", flush=True)
    return found


def bound(model: Any, conversations: int) -> dict[str, Any]:
    """How far the logits of turns are off, and how many answers are equal, with histories that are edited.

    Chunks of 16 tokens of the same prompts are compared as well.
    """
    import torch

    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model, name = model.to(dtype), str(dtype).removeprefix("torch.")
        pairs: dict[str, list[tuple[Any, Any]]] = {"reused": [], "chunks": []}
        for seed in range(conversations):
            draw, ids = random.Random(seed), text(40, seed, model.device)
            gemma4_compat.decode_fast(model, reuse_prefix=True, graphs=False)
            for turn in range(6):
                kept = {"return_dict_in_generate": True, "output_logits": True}
                answer, whole = ask(model, ids, 12, **kept), ask(model, ids, 12, **kept, **WHOLE)
                if turn:
                    pairs["reused"].append((answer, whole))
                    pairs["chunks"].append((ask(model, ids, 12, **kept, **WHOLE, prefill_chunk_size=16), whole))
                cut = draw.choice([0, 0, 12, draw.randrange(1, 20)])
                ids = answer.sequences[:, : answer.sequences.shape[1] - cut]
                ids = torch.cat([ids, text(8, 100 * seed + turn, model.device)], dim=-1)
        gemma4_compat.decode_fast(model, enabled=False)
        for what, both in pairs.items():
            off = [(one.logits[0] - other.logits[0]).abs().max().item() for one, other in both]
            largest = max(other.logits[0].abs().max().item() for _, other in both)
            equal = sum(torch.equal(one.sequences, other.sequences) for one, other in both)
            found[f"{name}, {what}"] = {"off": max(off), "largest": largest, "equal": equal, "answers": len(both)}
            print(f"{name}, {what}: first logits off by {max(off):.2g} of {largest:.2g}, {equal} of {len(both)} equal")
    return found


#: A call that ``reuse_prefix`` leaves as it is.
WHOLE: dict[str, Any] = {"logits_to_keep": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(models.SHAPES), default="tiny")
    parser.add_argument("--where", choices=sorted(models.WHERE), default="gpu", help="default: gpu, in 4 bits")
    parser.add_argument("--first", type=int, default=512, help="tokens of the first prompt (default: 512)")
    parser.add_argument("--question", type=int, default=32, help="tokens of each later question (default: 32)")
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer (default: 32)")
    parser.add_argument("--rounds", type=int, default=3, help="conversations (default: 3)")
    parser.add_argument("--bound", type=int, metavar="CONVERSATIONS", help="compare logits instead, on the tiny model")
    parser.add_argument("--out", type=Path, help="a file for the results, in JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        weights: dict[str, Any] | None = None if options.bound or options.shape.startswith("tiny") else {}
        models.build("tiny" if options.bound else options.shape, Path(folder), weights)
        model = models.load("bf16" if options.bound else options.where, Path(folder), weights)
        if main_device() == "cpu":
            from gemma4_compat._lab.stand_ins.tape import standing_in

            stack.enter_context(standing_in(recording.RECORDERS))
        found = bound(model, options.bound) if options.bound else table(model, options)
    if options.out:
        given = {name: value for name, value in vars(options).items() if name != "out"}
        options.out.write_text(json.dumps({"options": given, "found": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
