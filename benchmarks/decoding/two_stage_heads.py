"""What does a head in two stages change: microseconds and TB/s of its kernels, milliseconds a token, and any token?

python benchmarks/decoding/two_stage_heads.py --shape E2B --out FILE.json [--texts 4] [--tokens 500] [--kernels 40]
    [--host]

First the kernels alone, for heads of an E2B, an E4B, a 12B and a 31B with weights of three kinds: the whole head,
both stages, each kernel and the copy, in turns; and whether the best words are those of the whole head. Then a 4-bit
model with random weights in the real shape, everything on the card, after `decode_fast`. Two sets of graphs of it take
turns, one with the whole head. Texts are greedy and sampled (top-k of 64, top-p of 0.95, as Gemma's defaults say).

`--host` adds the same model with embedding and head in host memory: a copy of the whole head for each token, by
accelerate's hook, as it was before, and two stages in place. Then it also says how many texts are those of the head on
the card, and how many GiB of the card each way takes at most.

`--shape tiny` needs no GPU; a stand-in captures, nothing is fused, and its small head is computed whole. Exit code 1:
a token differs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import graph_times, models
from benchmarks.decoding.fused_prompts import recorders
from benchmarks.small_card import device
from gemma4_compat._generation.sampling import best_words
from gemma4_compat._graphs import decoder, fused_steps
from gemma4_compat._lab import tiny
from gemma4_compat._offload.transfer import row_lookup

#: What computes otherwise in a way.
WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "whole": functools.partial(mock.patch.object, best_words, "of", lambda *_: None),
    "two stages": contextlib.nullcontext,
    "copied": functools.partial(mock.patch.object, row_lookup, "MOST_ROWS", 0),
    "in place": contextlib.nullcontext,
}
CARD, HOST = ("whole", "two stages"), ("copied", "in place")
ON_HOST = ("model.language_model.embed_tokens", "lm_head")
SAMPLED = {"do_sample": True, "top_k": 64, "top_p": 0.95, "temperature": 1.0}
TEXTS: dict[str, Data] = {"greedy": {"do_sample": False}, "sampled": SAMPLED}
HEADS = {"E2B": 1536, "E4B": 2560, "12B": 3840, "31B": 5376}
WORDS, PROMPT = 1 << 18, 64


def head(kind: str, inputs: int) -> Any:
    """A head on the GPU."""
    import torch

    weight = torch.randn(WORDS, inputs, device="cuda")
    if kind == "heavy tails":
        weight *= torch.randn(WORDS, inputs, device="cuda").abs().pow_(1.5)
        weight *= torch.rand(WORDS, 1, device="cuda") * 1.5 + 0.25
    if kind == "outlier columns":
        weight[:, :8] *= 12
        weight *= torch.rand(WORDS, 1, device="cuda") + 0.5
    return (weight * inputs**-0.5).bfloat16()


def state(weight: Any, number: int) -> Any:
    """A hidden state with outliers; every second one makes a word likely."""
    import torch

    inputs = weight.shape[1]
    found = torch.randn(inputs, device="cuda")
    found[torch.randint(inputs, (6,), device="cuda")] *= 20
    if number % 2:
        found += weight[torch.randint(WORDS, (1,), device="cuda")][0].float() * inputs**0.5 * 1.5
    return found.bfloat16()[None]


def kernels(name: str, kind: str, states: int, *, timed: bool) -> Data:
    """One head: words that were computed, whether what is chosen is right, and times."""
    import torch

    from gemma4_compat._kernels import kernels as own_kernels
    from gemma4_compat._kernels.match import custom
    from gemma4_compat._kernels.specs import head as spec

    torch.manual_seed(0)
    weight = head(kind, HEADS[name])
    copy = spec.Copy.of(weight)
    custom.launch(weight.device, copy.made_from(weight))
    best, dense = custom.operator("best"), custom.operator("dense")
    found: Data = {"head": name, "weights": kind, "copy_bytes": spec.nbytes(*weight.shape)}
    for most in (1, spec.FEWEST):
        counts, tokens, kept = [], 0, 0
        for number in range(states):
            given = state(weight, number)
            before = int(copy.counts[0])
            ours, whole = best(given, weight, *copy, most, 30.0), dense(given, weight, None)
            counts.append(int(copy.counts[0]) - before)
            ours, whole = (torch.tanh(one / 30.0) * 30.0 for one in (ours, whole))
            tokens += int(torch.equal(ours.argmax(-1), whole.argmax(-1)))
            last = whole.float().topk(most).values[..., -1:]
            kept += int(torch.equal(ours[whole >= last], whole[whole >= last]))
        middle = sorted(counts)[len(counts) // 2]
        found[f"best {most}"] = {
            "words": [min(counts), middle, max(counts)], "same_token": tokens, "all_kept": kept, "of": states
        }  # fmt: skip
    if timed:
        given = state(weight, 0)
        known = own_kernels.of(weight.device)
        wanted, _kept = spec.best(given, weight, copy, spec.FEWEST, 30.0)
        calls = {
            "whole": lambda _: dense(given, weight, None),
            "two stages": lambda _: best(given, weight, *copy, spec.FEWEST, 30.0),
            "copy": lambda _: known.launch(copy.made_from(weight)),
        }
        names = "given", "scores", "least", "chosen"
        calls |= {
            one: lambda _, kernel=kernel: known.launch(kernel) for one, kernel in zip(names, wanted, strict=True)
        }
        times = {one: spent["median"] for one, spent in graph_times.in_turns(calls).items()}
        found["us"] = times
        found["tb_s"] = {
            "whole": weight.numel() * 2 / times["whole"] / 1e6,
            "scores": found["copy_bytes"] / times["scores"] / 1e6,
            "copy": (weight.numel() * 2 + found["copy_bytes"]) / times["copy"] / 1e6,
        }
    return found


class Model:
    """A model with a set of graphs for each of two ways.

    Attributes:
        found: the tokens of the second way, by kind of text and number.
    """

    def __init__(self, loaded: Any, ways: Sequence[str]) -> None:
        self._model, self.ways = loaded, ways
        self.decodings: dict[str, Any] = {}
        self.found: dict[tuple[str, int], list[int]] = {}
        for way in ways:
            self.renew(way)

    def renew(self, way: str) -> None:
        """Let this way begin anew, alone on the card."""
        for one in self.decodings.values():
            one.clear()
        vars(self._model).pop(decoder._ATTRIBUTE, None)
        gemma4_compat.decode_fast(self._model)
        self.decodings[way] = decoder.of(self._model)

    def text(self, way: str, tokens: int, seed: int, options: Data) -> tuple[float, list[int]]:
        """Seconds of a text, and its tokens."""
        import torch

        vars(self._model)[decoder._ATTRIBUTE] = self.decodings[way]
        batch = models.text_prompt(self._model, PROMPT, seed=seed)
        torch.manual_seed(seed)
        device.synchronize()
        begun = time.perf_counter()
        with torch.no_grad(), WAYS[way]():
            found = self._model.generate(**batch, min_new_tokens=tokens, max_new_tokens=tokens, **options)
        device.synchronize()
        return time.perf_counter() - begun, found[0, PROMPT:].tolist()

    def compared(self, kind: str, tokens: int, texts: int) -> Data:
        """Milliseconds a token of both ways, a prompt of 64 tokens included, and how many texts are equal."""
        options, equal = TEXTS[kind], 0
        times: dict[str, list[float]] = {way: [] for way in self.ways}
        for number in range(texts):
            found = {}
            for way in self.ways[:: 1 - 2 * (number % 2)]:
                spent, found[way] = self.text(way, tokens, number, options)
                times[way].append(1e3 * spent / tokens)
            first, self.found[kind, number] = (found[way] for way in self.ways)
            equal += first == self.found[kind, number]
            print(f"{kind} {number}: " + ", ".join(f"{way} {times[way][-1]:.2f} ms" for way in self.ways), flush=True)
        ms: Data = {way: {"ms": statistics.median(spent), "all": spent} for way, spent in times.items()}
        return {"texts": texts, "tokens": tokens, "equal": equal, **ms}

    def release(self) -> None:
        """Let the model go."""
        self.decodings, self._model = {}, None
        device.forget_peak()

    def memory(self, tokens: int) -> Data:
        """GiB of the card that each way takes at most, weights included, by itself."""
        peaks: Data = {}
        for way in self.ways:
            self.renew(way)
            device.forget_peak()
            for seed in range(2):
                self.text(way, tokens, seed, TEXTS["greedy"])
            peaks[way] = device.memory()["peak_gib"]
        return peaks


def measured(model: Model, tokens: int, texts: int) -> Data:
    """Greedy and sampled texts, and what the statistics say of the heads."""
    with mock.patch.object(fused_steps.Progress, "early", 1), mock.patch.object(fused_steps.Progress, "after", 1):
        for way in model.ways:
            for options in TEXTS.values():
                model.text(way, tokens, 0, options)  # captures, and fuses at once
    found: Data = {kind: model.compared(kind, tokens, texts) for kind in TEXTS}
    for way, decoding in model.decodings.items():
        counted = decoding.statistics
        found[f"statistics, {way}"] = {
            "fused": counted.fused,
            "not_fused": list(counted.not_fused),
            "captured": counted.captured,
            "reasons": list(counted.reasons),
            "in_two_stages": counted.heads_in_two_stages,
            "whole": counted.whole_heads,
            "words_and_tokens": None if decoding.head is None else decoding.head.counts(),
        }
    return found


def on_host(folder: Path, weights: Data | None) -> Any:
    """The model with its embedding and its head in host memory."""
    import torch
    from accelerate import dispatch_model

    if weights is not None:
        placement = models.device_map("gpu", folder) | dict.fromkeys(ON_HOST, "cpu")
        return models.load("gpu", folder, weights, placement)
    loaded, main = models.load("bf16", folder), torch.device("cpu")
    placement = tiny.device_map(loaded, "none", main=main, offloaded="cpu") | dict.fromkeys(ON_HOST, "cpu")
    return dispatch_model(loaded, placement, main_device=main, skip_keys=tiny.skip_keys(loaded))


def host(card: Model, folder: Path, weights: Data | None, tokens: int, texts: int) -> Data:
    """The same texts of a model with its head in host memory."""
    found: Data = {"peak_gib": card.memory(tokens)}
    card.release()
    loaded = on_host(folder, weights)
    loaded.generation_config.eos_token_id = None
    model = Model(loaded, HOST)
    found |= measured(model, tokens, texts)
    found["as_on_the_card"] = sum(one == card.found[key] for key, one in model.found.items())
    found["peak_gib"] |= model.memory(tokens)
    return found


def main() -> int:
    """Measure, and write the results."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="E2B", choices=models.SHAPES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=4, help="of each kind")
    parser.add_argument("--tokens", type=int, default=500, help="of each text")
    parser.add_argument("--host", action="store_true", help="also with embedding and head in host memory")
    parser.add_argument("--kernels", type=int, default=40, help="hidden states for each head; 0: no kernels alone")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    result = common.header(Path(__file__), sys.modules[__name__], args.shape, common.shown(args))
    result |= {"machine": device.machine(), "kernels": []}
    for number, kind in enumerate(("gaussian", "heavy tails", "outlier columns")):
        for name in HEADS if on_gpu and args.kernels else ():
            one = kernels(name, kind, args.kernels, timed=number == 0)
            result["kernels"].append(one)
            common.write(result, args.out)
            print(one, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        weights: Data | None = {} if on_gpu else None
        models.build(args.shape, Path(folder), weights)
        loaded = models.load("gpu" if on_gpu else "bf16", Path(folder), weights)
        if weights is not None:
            kept = {name: weight.cpu() for name, weight in weights.items()} if args.host else {}
            weights.clear()
            weights |= kept
        loaded.generation_config.eos_token_id = None
        with recorders(on_gpu=on_gpu):
            model = Model(loaded, CARD)
            del loaded
            result |= measured(model, args.tokens, args.texts)
            if args.host:
                result["host"] = host(model, Path(folder), weights, args.tokens, args.texts)
                print({name: found for name, found in result["host"].items() if name not in TEXTS})
    common.write(result, args.out)
    print({kind: found for kind, found in result.items() if kind in TEXTS or kind.startswith("statistics")})
    both = (result, result["host"]) if args.host else (result,)
    wrong = any(one[kind]["equal"] != args.texts for one in both for kind in TEXTS)
    wrong |= args.host and result["host"]["as_on_the_card"] != args.texts * len(TEXTS)
    best = [found for one in result["kernels"] for name, found in one.items() if name.startswith("best")]
    wrong |= any(found["same_token"] != args.kernels or found["all_kept"] != args.kernels for found in best)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
