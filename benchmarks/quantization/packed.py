"""What does a checkpoint in packed 4-bit integers cost: GPU memory while it loads and after, ms a token, other logits?

python benchmarks/quantization/packed.py --shape E2B --out benchmarks/results/DATE-DEVICE/packed-E2B.json

Random weights in the real shape, rounded to `w4a16` of compressed-tensors (4 bits, a scale for 32 columns), which must
be installed. The same values are loaded in each of these ways, one after the other, and decoded after `decode_fast`:

unpacked   as compressed-tensors does: the first forward writes all layers in bf16
packed     with gemma4_compat.quantize(packed=True): layers stay integers, own kernels multiply by them
exact      the same, with decode_fast(exact=True): each product unpacks its weight, with the bits of "unpacked"
split      packed, every second layer in host memory

Peaks are what PyTorch allocates, in GiB. A speed is that of the tokens between the 32nd and the last of a call: the
difference of two calls. Logits of a prompt and of the tokens after it are compared with those of "unpacked": equal, or
the largest difference, beside the largest logit. Exit code 1: something raised, or "exact" or "split" has other tokens
than it should.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import models, rounds
from benchmarks.small_card import device
from benchmarks.small_card.device import GIB, main_device
from gemma4_compat._lab import tiny, tiny_models, tiny_qat

WAYS = ("unpacked", "packed", "exact", "split")
#: Tokens of the prompt, of the shorter call, and compared.
PROMPT, SETTLED, COMPARED = 64, 32, 24


def written(shape: str, folder: Path) -> Path:
    """The packed checkpoint; its model is not written in bf16."""
    weights: dict[str, Any] = {}
    models.build(shape, folder, weights)
    if not weights:
        raise SystemExit(f"{shape} has no weights in memory")
    tied = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    return tiny_qat.build_packed_checkpoint(folder / "checkpoint", folder / "packed", tensors=tied)


def placement(way: str, model: Any) -> dict[str, Any]:
    if way != "split":
        return {"": main_device()}
    away = "disk" if main_device() == "cpu" else "cpu"
    found = tiny.device_map(model, "none", main=main_device(), offloaded=away)
    names = [name for name in found if ".layers." in name and "tower" not in name]
    return found | dict.fromkeys(names[::2], away)


def loaded(way: str, checkpoint: Path) -> Any:
    import torch
    import transformers

    kind = getattr(transformers, tiny_models.class_name(checkpoint))
    with torch.device("meta"):
        places = placement(way, kind(transformers.AutoConfig.from_pretrained(checkpoint)))
    options = {"dtype": torch.bfloat16, "device_map": places, "offload_folder": checkpoint / "offload"}
    kept = contextlib.nullcontext() if way == "unpacked" else gemma4_compat.quantize(packed=True)
    with kept:
        return kind.from_pretrained(checkpoint, **options).eval()


def generate(model: Any, tokens: int, **options: Any) -> Any:
    import torch

    given = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "eos_token_id": None}
    with torch.no_grad():
        return model.generate(**models.text_prompt(model, PROMPT, seed=0), **given, **options)


def ms_a_token(model: Any, tokens: int) -> float:
    """Of the tokens after the first ones of a text."""
    taken = []
    for number in (SETTLED, SETTLED + tokens):
        device.synchronize()
        begun = time.perf_counter()
        generate(model, number)
        device.synchronize()
        taken.append(time.perf_counter() - begun)
    return 1000 * (taken[1] - taken[0]) / tokens


def measured(way: str, checkpoint: Path, options: Any, first: dict[str, Any]) -> Data:
    """One way; ``first`` gets what "unpacked" computes."""
    import torch

    device.forget_peak()
    begun = time.perf_counter()
    model = loaded(way, checkpoint)
    found: Data = {"load_s": time.perf_counter() - begun, "loading_gib": device.memory()["peak_gib"]}
    with torch.no_grad():
        model(**models.text_prompt(model, PROMPT, seed=0), logits_to_keep=1)
    device.forget_peak()
    found["after_gib"] = device.memory()["resident_gib"]
    gemma4_compat.decode_fast(model, exact=way != "packed")
    model.generation_config.max_cache_len = PROMPT + SETTLED + options.tokens
    for _ in range(3):
        generate(model, SETTLED + options.tokens)  # captured, fused
    times = [ms_a_token(model, options.tokens) for _ in range(options.rounds)]
    found["ms_a_token"], found["times"] = statistics.median(times), times
    found["decoding_gib"] = device.memory()["peak_gib"]
    counted = gemma4_compat.statistics(model).decoding
    found["replayed"], found["fused"], found["reasons"] = counted.replayed, counted.fused, [*counted.reasons]
    said = generate(model, COMPARED, return_dict_in_generate=True, output_logits=True)
    logits, tokens = torch.stack(said.logits).float().cpu(), said.sequences.cpu()
    first.setdefault("logits", logits)
    first.setdefault("tokens", tokens)
    same = (first["tokens"] == tokens)[0, PROMPT:].tolist()
    until = sum(1 for _ in itertools.takewhile(bool, same)) + 1  # later ones have other tokens before them
    apart = (first["logits"] - logits)[:until].abs().max()
    found |= {"same_tokens": all(same), "apart": float(apart), "largest_logit": float(logits.abs().max())}
    del model, said
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def main() -> int:
    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=5)
    parser.add_argument("--ways", default=",".join(WAYS), help="of " + ", ".join(WAYS))
    parser.add_argument("--tokens", type=int, default=128, help="of the longer call, beyond those of the shorter one")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    shown = common.shown(options)
    result = common.header(Path(__file__), sys.modules[__name__], options.shape, shown, options.note)
    begun, first = time.monotonic(), dict[str, Any]()
    with common.temporary("packed-", options.work or models.work_folder(options.shape, times=0.6)) as folder:
        checkpoint = written(options.shape, folder)
        result |= {"machine": device.machine(), "file_gib": (checkpoint / "model.safetensors").stat().st_size / GIB}
        with rounds.stand_in():  # transformers has been imported
            for way in options.ways.split(","):
                if time.monotonic() - begun > 60 * options.minutes:
                    result["not_run"].append(way)
                    continue
                result[way] = measured(way, checkpoint, options, first)
                print(way, common.rounded(result[way]), flush=True)
                differs = result[way]["apart"] if way == "exact" else not result[way]["same_tokens"]
                if way in ("exact", "split") and differs:
                    result["problems"].append(f"{way}: other bits, or other tokens")
                common.write(result, options.out)
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
