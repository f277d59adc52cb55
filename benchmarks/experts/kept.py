"""How fast does a 26B-A4B decode on a small card, its experts in host memory, by how many of them were used before?

python benchmarks/experts/kept.py --shape 26B-A4B --gib 8 --out benchmarks/results/DATE-DEVICE/kept-26B-A4B.json

All layers in the real shape, 4-bit with double quantization, random weights, the experts of every layer in host
memory. A ballast leaves `--gib` of the card to this process, and `decode_fast` keeps the experts used last in what is
left. Random weights choose experts at random, so tokens are sent where a trace says: of the experts of a token, so
many are drawn from those that a cache of these slots holds (least recently used goes first) as `--rates` say, the
others from the rest. In turns, without and with experts that stay: milliseconds a token, the difference of two calls;
experts that were there and experts that were brought; and the logits of both. Needs a GPU. Exit code 1: something
raised, nothing stays, logits differ, or the experts that were there are not as many as a trace says.

`--bus 12`: experts are brought at no more than 12 GiB/s. The kernel that copies an expert gets blocks of 8 threads,
which read 4 times 128 bytes at once, and so few of these blocks that less is on its way. For each rate, the experts of
one layer are brought for the tokens of the trace with 1 to 64 blocks; the fastest copy that is not above 12 GiB/s is
used, and its GiB/s are in the result. Only experts that stay are timed then: without them other kernels read. What
this does not show: a read still has the latency of this machine's bus; a token that brings more experts than another
brings more bytes a second, so the GiB/s are a mean; and other traffic (the prompt, what `decode_fast` copies) is as
fast as before.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import rounds
from benchmarks.experts import models
from benchmarks.small_card import device
from gemma4_compat._gemma4 import host
from gemma4_compat._generation import expert_slots
from gemma4_compat._graphs import decoder
from gemma4_compat._kernels.specs import expert_slots as copying

#: Tokens of the prompt, of the shorter and the longer call, and of a call after which steps are fused.
PROMPT, SHORT, LONG, WARM = 24, 20, 180, 240
COMPARED = 40
#: How far from a rate what was there may be: tokens begin with no experts.
_NEAR = 0.1
#: Threads of a block on a throttled bus: each of their loads is one read of 128 bytes. And how many blocks are tried.
_THREADS, _BLOCKS = 8, range(1, 65)


def trace(rate: float, layers: int, experts: int, chosen: int, slots: int) -> list[list[list[int]]]:
    """For each layer and position the experts of the token there."""
    found = []
    for layer in range(layers):
        draw, recent, tokens = random.Random(f"{rate} {layer}"), list[int](), []
        for _ in range(PROMPT + max(LONG, WARM)):
            inside = recent[-slots:]
            known = draw.sample(inside, min(len(inside), sum(draw.random() < rate for _ in range(chosen))))
            held = set(inside)
            rest = [one for one in range(experts) if one not in held]
            token = known + draw.sample(rest, min(len(rest), chosen - len(known)))
            token += draw.sample([one for one in inside if one not in token], chosen - len(token))
            recent = [one for one in recent if one not in set(token)] + token
            tokens.append(token)
        found.append(tokens)
    return found


@contextlib.contextmanager
def following(traced: Any, number: dict[int, int]) -> Iterator[None]:
    """Inside, the routers of decoding steps send a token where ``traced``, (layers, positions, experts), says.

    To be entered before the model is made, as accelerate's hooks call the forward that they found. ``number``: of the
    layer of a router, by its id.
    """
    from transformers.models.gemma4 import modeling_gemma4 as gemma4

    routed, turned = gemma4.Gemma4TextRouter.forward, gemma4.Gemma4TextRotaryEmbedding.forward
    now: Any = None

    def rotary(self: Any, states: Any, position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal now
        now = position_ids
        return turned(self, states, position_ids, *args, **kwargs)

    def forward(self: Any, states: Any) -> Any:
        probabilities, weights, index = routed(self, states)
        if now.numel() == 1:
            index = traced[number[id(self)]].index_select(0, now.flatten())
        return probabilities, weights, index

    kinds = (gemma4.Gemma4TextRouter, forward), (gemma4.Gemma4TextRotaryEmbedding, rotary)
    with contextlib.ExitStack() as stack:
        for kind, function in kinds:
            stack.enter_context(mock.patch.object(kind, "forward", function))
        yield


class Decoding:
    """The model, which decodes without and with experts that stay."""

    def __init__(self, model: Any) -> None:
        self.model, self._kept = model, expert_slots.of
        # A cache of one length for all calls: its steps are captured once.
        model.generation_config.max_cache_len = PROMPT + max(LONG, WARM)

    def generate(self, tokens: int, *, keeps: bool, **options: Any) -> Any:
        """A text of so many tokens; ``keeps``: experts used last stay on the card."""
        import torch

        ids = torch.randint(3, 200, (1, PROMPT), generator=torch.Generator().manual_seed(0)).to(self.model.device)
        given = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "eos_token_id": None}
        given["pad_token_id"] = 0
        with torch.no_grad(), mock.patch.object(expert_slots, "of", self._kept if keeps else lambda *_: None):
            return self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **given, **options)

    def ms_a_token(self, *, keeps: bool) -> float:
        """Of the tokens after the first ones."""
        taken = []
        for tokens in (SHORT, LONG):
            device.synchronize()
            begun = time.perf_counter()
            self.generate(tokens, keeps=keeps)
            device.synchronize()
            taken.append(time.perf_counter() - begun)
        return 1000 * (taken[1] - taken[0]) / (LONG - SHORT)

    def logits(self, *, keeps: bool) -> Any:
        """(tokens, 1, vocabulary), on the CPU: on the card they would keep memory in parts."""
        import torch

        said = self.generate(COMPARED, keeps=keeps, return_dict_in_generate=True, output_logits=True)
        return torch.stack(said.logits).cpu()

    @property
    def slots(self) -> int:
        """Experts of a layer that stay."""
        found = decoder.of(self.model).experts
        return 0 if found is None else int(found.number)

    def counted(self) -> tuple[int, int]:
        """Experts that were there, and that were brought."""
        found = gemma4_compat.statistics(self.model).decoding
        return found.experts_kept, found.experts_brought


def gib_s(kept: Any, tokens: list[list[int]], blocks: int) -> float:
    """How fast the experts of ``tokens`` are brought to the first layer's slots, empty before, by so many blocks."""
    import torch

    (lookup, layer), *_ = kept.layers.items()
    chosen = torch.tensor(tokens, device=lookup.device)
    with mock.patch.object(copying, "_BLOCKS", blocks):
        layer.bring(chosen[0], lookup.memory)  # compiled
        kept.take()
        before = kept.counts()[1]
        device.synchronize()
        begun = time.perf_counter()
        for token in chosen:
            layer.bring(token, lookup.memory)
        device.synchronize()
        taken = time.perf_counter() - begun
    expert = kept.nbytes / kept.number / len(kept.layers)
    return float((kept.counts()[1] - before) * expert / device.GIB / taken)


def fastest(speeds: dict[int, float], most: float) -> int:
    """How many blocks are fastest, of those that are not faster than ``most``, by GiB/s.

    Raises:
        SystemExit: all are.
    """
    found = [(speed, blocks) for blocks, speed in speeds.items() if speed <= most]
    if not found:
        raise SystemExit(f"--bus {most:g}: experts come at {min(speeds.values()):.2f} GiB/s at least")
    return max(found)[1]


@contextlib.contextmanager
def throttled(model: Any, most: float | None, tokens: list[list[int]]) -> Iterator[Data]:
    """Inside, experts come at no more than ``most`` GiB/s; None: as fast as they do. Gives what was chosen.

    Slots and the steps that read them are made anew inside. ``tokens``: the experts of each, of a layer.
    """
    if most is None:
        yield {}
        return
    decoding = decoder.of(model)
    with mock.patch.object(copying, "_THREADS", _THREADS):
        kept = expert_slots.taken(decoding, model.device)
        if kept is None:
            raise SystemExit("--bus: there is no room for experts any more")
        speeds = {blocks: gib_s(kept, tokens, blocks) for blocks in _BLOCKS}
        blocks = fastest(speeds, most)
        decoding.drop_experts()
        host.give_back_unused(model.device)  # the graphs' memory
        room = expert_slots.number

        def number(*args: Any, **options: Any) -> int:
            """No more slots than the trace was made for: dropped graphs leave room for more."""
            return min(kept.number, room(*args, **options))

        with mock.patch.object(copying, "_BLOCKS", blocks), mock.patch.object(expert_slots, "number", number):
            yield {"bus_gib_s": speeds[blocks], "blocks": blocks, "gib_s_by_blocks": list(speeds.values())}


def measured(decoding: Decoding, turns: int, *, without: bool) -> Data:
    """One trace; ``without``: also without experts that stay."""
    import torch

    found: Data = {False: [], True: []} if without else {True: []}
    for keeps in found:
        decoding.generate(WARM, keeps=keeps)  # captured, fused
    before = decoding.counted()
    for _ in range(turns):
        for keeps, times in found.items():
            times.append(decoding.ms_a_token(keeps=keeps))
    kept, brought = (now - then for now, then in zip(decoding.counted(), before))
    same = bool(torch.equal(*(decoding.logits(keeps=keeps) for keeps in (False, True))))
    names = {False: "without_ms", True: "kept_ms"}
    return {
        **{names[keeps]: statistics.median(times) for keeps, times in found.items()},
        "times": list(found.values()),
        "hits": kept / max(kept + brought, 1),
        "same_logits": same,
    }


def main() -> int:
    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=4)
    parser.add_argument("--gib", type=float, default=8.0, help="of the card, for this process (default: 8)")
    parser.add_argument("--rates", default="0,0.5,0.67,0.8", help="of experts that are among those kept")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--bus", type=float, help="GiB/s at which experts come at most (default: what the bus has)")
    options = parser.parse_args()
    shape: str = options.shape or "tiny"
    shown = common.shown(options)
    result = common.header(Path(__file__), sys.modules[__name__], shape, shown, options.note)
    result |= {"machine": device.machine(), "host_to_device_gib_s": device.bandwidth(), "rates": {}}
    begun = time.monotonic()
    hosted, numbers = models.hosted_experts(shape), dict[int, int]()
    text = models.config(shape).get_text_config()
    size = text.num_hidden_layers, PROMPT + max(LONG, WARM), text.top_k_experts
    import torch

    traced = torch.arange(size[2], device=device.main_device()).expand(size).contiguous()  # a graph holds its address
    with following(traced, numbers):
        model = models.placed(shape, hosted, "experts")
        numbers |= {id(layer.router): place for place, layer in enumerate(model.get_decoder().layers)}
        with rounds.stand_in(), device.ballast(options.gib):
            decoding = Decoding(gemma4_compat.decode_fast(model))
            for keeps in (True, False, True):  # graphs of both take memory
                decoding.generate(WARM, keeps=keeps)
            number = decoding.slots
            result |= {"slots": number, "experts": text.num_experts}
            slots = decoder.of(model).experts
            result["slots_gib"] = 0 if slots is None else slots.nbytes / device.GIB
            for rate in options.rates.split(",") if number else ():
                if time.monotonic() - begun > 60 * options.minutes:
                    result["not_run"].append(rate)
                    continue
                tokens = trace(float(rate), size[0], text.num_experts, size[2], number)
                traced.copy_(torch.tensor(tokens))
                with throttled(model, options.bus, tokens[0]) as bus:
                    found = measured(decoding, options.turns, without=options.bus is None) | bus
                result["rates"][rate] = found
                print(rate, common.rounded(found), flush=True)
                if not found["same_logits"]:
                    result["problems"].append(f"{rate}: logits differ")
                if decoding.slots != number:
                    result["problems"].append(f"{rate}: {decoding.slots} slots, not {number}")
                if abs(found["hits"] - float(rate)) > _NEAR:
                    result["problems"].append(f"{rate}: {found['hits']:.2f} of the experts were there")
                common.write(result, options.out)
        if not number:
            result["problems"].append("no expert stays: there is no room")
        counted = gemma4_compat.statistics(model).decoding
        result |= {"fused": counted.fused, "reasons": [*counted.reasons, *counted.not_fused]}
        result["memory"] = device.memory()
    common.write(result, options.out)
    print(f"{number} of {text.num_experts} experts of a layer stay")
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
