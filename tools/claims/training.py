"""Of the pages on training and float16, and on the trained tiny models."""

from __future__ import annotations

import json
import math
import re
import statistics
import struct
from typing import Any

from gemma4_compat._gemma4.attention import flash, packing, windows
from gemma4_compat._gemma4.models import variants
from gemma4_compat._training import chunks, mlp, parts
from gemma4_compat._training.captured import fusing, layers
from tools.claims.form import Claim, in_file, result, text_of
from tools.pages.markers import ROOT
from tools.trained_model import batches, media

_TRAINING, _FLOAT16, _TRAINED = "docs/TRAINING.md", "docs/FLOAT16.md", "docs/TRAINED_MODEL.md"
_ON_H200 = "*-h200"
_WINDOWS_TEST = "tests/unit/gemma4/attention/test_windows.py"
#: Its largest number.
FLOAT16 = 65_504


def by_windows() -> tuple[Any, ...]:
    """The longest prompt and training of a measurement; how many times as fast they are, and with 8,192 tokens."""
    found = result(f"{_ON_H200}/sliding_windows.json")
    (longest,) = {max(map(int, found[kind])) for kind in ("prompt", "training")}
    prompt, training = found["prompt"], found["training"]
    times = [one[tokens]["ratio"] for tokens in (str(longest), "8192") for one in (prompt, training)]
    return f"{longest:,}", *times[:2], "8,192", *times[2:]


def seconds(way: str, case: str, file: str = "reproducible-E2B.json") -> float:
    """A step of one way, the median of a run."""
    cells = result(f"{_ON_H200}/{file}")["cells"].values()
    return statistics.median(
        one for cell in cells if (cell["case"], cell["way"]) == (case, way) for one in cell["seconds"]
    )


def times_as_long(way: str, first: str, case: str, file: str = "reproducible-E2B.json") -> float:
    """A step of one way, of a step of the other in the same run."""
    return seconds(way, case, file) / seconds(first, case, file)


def reproducible() -> tuple[str, ...]:
    """Seconds of a step with attention that adds in one order and with PyTorch's: of 2,048, 512 and 8,192 tokens."""
    short = (seconds(way, case) for case in ("2048", "512") for way in ("free", "whole"))
    long = (seconds(way, "8192", "reproducible-E2B-8192.json") for way in ("unfilled", "free"))
    return tuple(f"{one:.2f}" for one in (*short, *long))


_FUSED = "reproducible-E2B-fused.json"


def fused(tokens: int, *ways: str) -> tuple[str, ...]:
    """Milliseconds of a step of so many tokens with these kernels."""
    return tuple(f"{1000 * seconds(way, f'{tokens} fused', _FUSED):.0f}" for way in ways)


def reserved_by_fused() -> float:
    """GiB that fused layers reserve more in a step of 8,192 tokens."""
    cells = result(f"{_ON_H200}/{_FUSED}")["cells"]
    found = (cells[f"8192 fused, {way}, 1"]["memory"]["peak_reserved_gib"] for way in ("fused", "unfused"))
    return next(found) - next(found)


def beside_unsloth() -> tuple[float, ...]:
    """Tokens a second of ours and a step; unsloth's; seconds of its first step; GiB reserved by it and by ours."""
    ours, theirs = result("*-h200-trainers/trainers-fast-E2B.json")["runs"]
    assert (ours["way"], theirs["way"], ours["sequence"]) == ("fast", "unsloth-compiled", theirs["sequence"])
    speeds = (one["sequence"] / statistics.median(one["seconds"]) for one in (ours, theirs))
    reserved = (one["memory"]["peak_reserved_gib"] for one in (theirs, ours))
    fast, slow = speeds
    return fast, ours["sequence"], slow, theirs["settling_s"][0], *reserved


def of_windows() -> tuple[str, ...]:
    """How far gradients are from float64, of those of one call: on average, and at most."""
    return in_file(_WINDOWS_TEST, r"mean\(\) <= ([\d.]+) \* .*\n.*max\(\) <= ([\d.]+) \*")


def bytes_by_text() -> int:
    """Bytes per token of what stands for the mask of packed texts."""
    import torch

    return int(packing.by_text(torch.zeros(1, 1, dtype=torch.int64), None).nbytes)


def half_of_the_scores() -> tuple[int, int]:
    """Tokens from which blocks of queries compute at most half of the scores, by the width of the window."""
    narrow, wide = sorted({text_of(shape).sliding_window for shape in variants.NAMES})
    return 2 * 2 * narrow, 2 * 2 * wide


def padded() -> tuple[tuple[int, ...], tuple[int, ...], list[float]]:
    """Lengths whose gradients were NaN under cuDNN, those that were not, and how many of the gradients."""
    found = dict(result("*-h100-padding/cudnn.json")["measured"])
    lengths = found.pop("padding under cuDNN, NaN without the patch by length")
    bad, good = (tuple(int(one) for one, nan in lengths.items() if nan is kind) for kind in (True, False))
    return bad, good, [one["NaN without the patch"] for one in found.values()]


def with_experts() -> tuple[float, ...]:
    """Tokens a second of steps of the 26B-A4B that fitted 8 GiB, the least and the most."""
    files = sorted((ROOT / "benchmarks" / "results").glob(f"{_ON_H200}/long_steps-26B-A4B*.json"))
    cells = [json.loads(file.read_text(encoding="utf-8"))["cells"]["2048 chunked"] for file in files]
    return tuple(sorted(cell["tokens_per_second"] for cell in cells))


def fits(where: str) -> int:
    """GiB that a step of the E4B with 32,768 tokens and all switches fits."""
    files = sorted((ROOT / "benchmarks" / "results").glob(f"{_ON_H200}/long_steps-E4B-*.json"))
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    cells = [run["fits"].get("32768 all", {}) for run in runs if run["where"] == where]
    return min(int(budget) for cell in cells for budget, found in cell.items() if found["fits"])


def width(shape: str) -> int:
    """Of the MLPs of layers that share keys and values."""
    text = text_of(shape)
    return int(text.intermediate_size * (2 if text.use_double_wide_mlp else 1))


def weights(part: str) -> float:
    """Millions of weights of the trained E2B or of its assistant."""
    content = (ROOT / "tests" / "data" / "trained_model" / part / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    tensors = json.loads(content[8 : 8 + length])
    return sum(math.prod(one["shape"]) for name, one in tensors.items() if name != "__metadata__") / 1e6


def asked() -> tuple[Any, ...]:
    """Questions of the measurement: all, and of each of four kinds."""
    each = int(in_file("tools/trained_model/measure.py", r"_EACH, _TOGETHER = (\d+)")[0])
    return each, each // 4


def step(way: str, tokens: str = "2,048") -> float:
    """GiB that a step of the E4B reserves at most, from the table of trainers."""
    page = (ROOT / "docs" / "benchmarks" / "trainers.md").read_text(encoding="utf-8")
    found = re.findall(rf"\n\| \[E4B.*\| {way} \| {tokens} \| .*? \| [\d.]+ \| ([\d.]+) \|", page)
    return max(map(float, found))


CLAIMS = (
    Claim(
        _TRAINING,
        "a step of an E2B with 8,192 tokens takes {} ms, and {} ms without them, with the same losses and the same "
        "adapter, and {:.2f} GiB more; with 2,048 tokens {} and {} ms",
        lambda: (
            *fused(8192, "fused", "unfused"),
            reserved_by_fused(),
            *fused(2048, "fused", "unfused"),
        ),
    ),
    Claim(
        _TRAINING,
        "steps of 8,192 and 2,048 tokens take {} and {} ms",
        lambda: (*fused(8192, "pytorch"), *fused(2048, "pytorch")),
    ),
    Claim(
        _TRAINING,
        "an E2B trains {:,.0f} tokens a second with {:,} tokens a step, and unsloth, compiled and under TRL, {:,.0f}. "
        "Its first step took {:.0f} s; it reserved {:.1f} GiB, and ours {:.1f}",
        beside_unsloth,
    ),
    Claim(
        _TRAINING,
        "less than 1/{} of the bytes, and 1/{} of the kernels",
        lambda: tuple(
            in_file("tests/unit/kernels/test_runs.py", rf"assert (\d) \* {one}\(fused\) < ")[0]
            for one in ("moved", "len")
        ),
    ),
    Claim(_TRAINING, "a gradient may be {:.0f} times as far from the first as the second is", lambda: (fusing.APART,)),
    Claim(
        _TRAINING,
        "a step of an E2B takes {} s with 2,048 tokens, and {} s with PyTorch's attention; with 512, {} s and {} s "
        "(raw; ); with 8,192 it took {} s, and {} s",
        reproducible,
    ),
    Claim(
        _TRAINING,
        "an E2B with all layers streamed trains {:.0f} times as fast with 2,048 tokens",
        lambda: (times_as_long("eager", "replayed", "2048 streamed", "streamed-E2B.json"),),
    ),
    Claim(
        _TRAINING,
        "Packed batches train texts of 50 to 500 tokens {:.1f} times as fast as padding them does (an E2B on an H200, "
        "8,192",
        lambda: (times_as_long("padded", "packed", "row of 8192", "reproducible-E2B-packed.json"),),
    ),
    Claim(
        "docs/TRAINERS.md",
        "a step of 2,048 tokens with everything on the card reserves {:.1f} GiB without it, and {:.1f} GiB with it. "
        "TRL has a loss in chunks of its own ({:.1f} GiB).",
        lambda: tuple(map(step, ("upstream", "the same, loss in chunks", "upstream under TRL"))),
    ),
    Claim(
        "docs/TRAINERS.md",
        "use 512 tokens ({:.1f} GiB reserved)",
        lambda: (step("the same, loss in chunks", "512"),),
    ),
    Claim(
        "docs/TRAINERS.md",
        "there, the step reserves {:.1f} GiB",
        lambda: (step("table and towers on the host, loss in chunks"),),
    ),
    Claim(
        _TRAINING,
        "sliding layers by windows, from {:,} tokens (E2B, E4B on a CPU: {:,})",
        lambda: (windows.LEAST_ON_GPU, half_of_the_scores()[0]),
    ),
    Claim(
        _TRAINING,
        "A step of 2,048 tokens reserves {:.1f} GiB with the per-layer embeddings and the towers in host memory, "
        "{:.1f} GiB with everything on the card",
        lambda: tuple(map(step, ("table and towers on the host, loss in chunks", "the same, loss in chunks"))),
    ),
    Claim(_TRAINING, "at most, {:,} tokens by default", lambda: (layers.MAX_TOKENS,)),
    Claim(_TRAINING, "mean error at most {} times, largest {} times", of_windows),
    Claim(
        _TRAINING,
        "By products, layers get the number of each token's text, {} bytes per token",
        lambda: (bytes_by_text(),),
    ),
    Claim(
        _TRAINING,
        "at most {} times as far from float64 |",
        lambda: in_file("tests/unit/gemma4/attention/test_products.py", r"TIMES = ([\d.]+)"),
    ),
    Claim(_TRAINING, "by itself: above {:,} and", lambda: (mlp.TOKENS,)),
    Claim(
        _TRAINING,
        "Its result is 0 to {:.0f} % above",
        lambda: (100 * float(in_file("tests/unit/training/test_parts.py", r"<= 1(\.\d+) \* planned")[0]),),
    ),
    Claim(_TRAINING, "leaves {} GiB free", lambda: (parts.MARGIN / 2**30,)),
    Claim(_TRAINING, "batches of up to {:,} tokens. Call", lambda: (layers.MAX_TOKENS,)),
    Claim(
        _TRAINING,
        "batches of {} and {} tokens, not of {}, {}, {} or {} (an H100, torch 2.11, raw), to {:.0f} to {:.0f} % of",
        lambda: (*padded()[0], *padded()[1], 100 * min(padded()[2]), 100 * max(padded()[2])),
    ),
    Claim(_TRAINING, "Flash kernels take heads of up to {}", lambda: (flash.WIDEST,)),
    Claim(_TRAINING, "with cuDNN, for heads of up to {}", lambda: (flash.WIDEST,)),
    Claim(_TRAINING, "full-attention layers are {} wide", lambda: (text_of("E2B").global_head_dim,)),
    Claim(_TRAINING, "Heads of full layers are {} wide.", lambda: (text_of("E2B").global_head_dim,)),
    Claim(
        _TRAINING,
        "of a sliding layer sees {} or {:,} tokens",
        lambda: tuple(sorted({text_of(shape).sliding_window for shape in variants.NAMES})),
    ),
    Claim(
        _TRAINING,
        "a prompt of {} tokens {} times as fast, with the same bits, and run a training step {} times as fast; with "
        "{} tokens, {} and {} times",
        by_windows,
    ),
    Claim(
        _TRAINING,
        "from {:,} tokens on a CPU (12B, 26B-A4B, 31B: {:,}) and from {:,} on a GPU",
        lambda: (*half_of_the_scores(), windows.least("cuda", enabled=False)),
    ),
    Claim(_TRAINING, "after , from {:,} tokens on a GPU.", lambda: (windows.LEAST_ON_GPU,)),
    Claim(_TRAINING, "at most {} times that of one call, the largest {} times", of_windows),
    Claim(
        _TRAINING,
        "the mean error of outputs is at most {} times that of one call",
        lambda: in_file(_WINDOWS_TEST, r"found - exact\)\.abs\(\)\.mean\(\) <= ([\d.]+)"),
    ),
    Claim(_TRAINING, "prompts from {:,} tokens on a GPU", lambda: (windows.LEAST_ON_GPU,)),
    Claim(
        _TRAINING,
        "gradients are at most {} times as far from float64 as those of one call",
        lambda: in_file("tests/unit/gemma4/attention/test_products.py", r"TIMES = ([\d.]+)"),
    ),
    Claim(
        _TRAINING,
        "for chunks of {} MiB of logits: {} tokens in bfloat16",
        lambda: (chunks.LOGITS_BYTES >> 20, chunks.LOGITS_BYTES // (2 * text_of("E2B").vocab_size)),
    ),
    Claim(
        _TRAINING,
        "They are {:,} wide in KV-shared layers of the E2B, {:,} in the E4B",
        lambda: (width("E2B"), width("E4B")),
    ),
    Claim(_TRAINING, "computes {:,} tokens at a time", lambda: (mlp.TOKENS,)),
    Claim(_TRAINING, "Padding takes masks: {:.0f} GiB for {:,} tokens", lambda: (3 * 32_768**2 / 2**30, 32_768)),
    Claim(_TRAINING, "fits 8 GiB on an H200 and computes {:,.0f} to {:,.0f} tokens a second", with_experts),
    Claim(_TRAINING, "steps of {:,} tokens are still CPU-bound", lambda: (8192,)),
    Claim(
        _TRAINING,
        "2 times the error of ({} times, for gradients)",
        lambda: in_file("tests/world/gpu/test_flash_attention.py", r"GRADIENT_TIMES = 2, (\d)"),
    ),
    Claim(
        _TRAINING,
        "the E4B with {:,} tokens fits {} GiB with all layers streamed, and {} GiB with every sixth",
        lambda: (32_768, fits("streamed"), fits("sixth")),
    ),
    Claim(_TRAINING, "and {} layers of random weights", lambda: (text_of("E2B").num_hidden_layers,)),
    Claim(
        _TRAINING,
        "eight greedy texts of {:.0f} tokens",
        lambda: (result("*-h100/rollouts-E2B.json")[0]["tokens equal"] / 8,),
    ),
    Claim(
        _TRAINING,
        "with chunks are at most {} times as far from float32",
        lambda: in_file("tests/world/gpu/test_chunked_mlp.py", r"off\(right, found\) <= ([\d.]+)"),
    ),
    Claim(
        _TRAINING,
        "rounded once: at most {} times as far from float64",
        lambda: in_file("tests/unit/training/test_mlp_chunks.py", r"right\) <= ([\d.]+) \* off"),
    ),
    Claim(
        _TRAINING,
        "1e-3 (float16) and {} (bf16)",
        lambda: in_file("tests/patches/training/test_transformers_chunked_mlp.py", r'"bfloat16": ([\d.]+)'),
    ),
    Claim(
        _TRAINING,
        "in float32 it is at most {} times as far",
        lambda: in_file("tests/patches/training/test_transformers_chunked_mlp.py", r"away\[1\] <= ([\d.]+)"),
    ),
    Claim(_TRAINING, "sequences of at most {:,} tokens", lambda: (mlp.TOKENS,)),
    Claim(
        _TRAINING,
        "and within {} on average in bf16",
        lambda: in_file("tests/one_device/test_trained.py", r'"bfloat16", ([\d.]+), '),
    ),
    Claim(
        _TRAINING,
        "turn the same rounding into {}, upstream",
        lambda: in_file(_TRAINING, r"E4B, float32, replayed: .*? differ by ([\d.]+) on average"),
    ),
    Claim(_TRAINING, "Up to {:,} tokens decoder layers are replayed", lambda: (layers.MAX_TOKENS,)),
    Claim(_TRAINING, "From {:,} tokens on, sliding layers are", lambda: (windows.LEAST_ON_GPU,)),
    Claim(_TRAINING, "{} GiB stay free for fragmentation", lambda: (parts.MARGIN / 2**30,)),
    Claim(_TRAINING, "For each token's {:,} logits", lambda: (text_of("E2B").vocab_size,)),
    Claim(_FLOAT16, "largest number is {:,}", lambda: (FLOAT16,)),
    Claim(_FLOAT16, "until their product is {:,}", lambda: (FLOAT16,)),
    Claim(_FLOAT16, "upstream adds -{:,}", lambda: (FLOAT16,)),
    Claim(
        _FLOAT16,
        "gradient by {:.0f} in float16. With the scale at which a starts, 65,536, that overflows in a batch of fewer "
        "than {:.0f} trained tokens",
        lambda: (text_of("E2B").final_logit_softcapping,) * 2,
    ),
    Claim(_TRAINED, "{:.1f} million weights, a token a byte", lambda: (weights("model"),)),
    Claim(_TRAINED, "pictures of {} by {} pixels", lambda: (media.EDGE, media.EDGE)),
    Claim(_TRAINED, "tones of {:.0f} ms", lambda: (1000 * media.SAMPLES / media.RATE,)),
    Claim(_TRAINED, "of four layers, {:.1f} million weights", lambda: (weights("assistant"),)),
    Claim(_TRAINED, "its rows of {} tokens", lambda: (batches.LENGTH,)),
    Claim(_TRAINED, "likeliest, {} steps", lambda: in_file("tools/trained_model/assistant.py", r"STEPS = (\d+)")),
    Claim(_TRAINED, "Answers to {} questions: {} each", asked),
)

CONSTANTS: dict[str, tuple[str, ...]] = {
    "docs/TRAINERS.md": (
        "12 GB",
        "below 5.20",
    ),
    _TRAINING: (
        "without a third copy",
        "that are 64 more than a multiple",
        "a multiple of 128",
        "Pass (or 3",
        "LoRA of rank 16",
        "Steps of 32,768 tokens did not",
        "fits a step of 2,048",
        "a card of 12 GB",
        "A 12 GB card",
        "an adapter of rank 16",
        "must be 0",
    ),
    _FLOAT16: (  # published by others, except for the last four
        "2,080",
        "100 steps of",
        "loss of 3.048",
        "at 3.065",
        "unsloth 4875",
        "unsloth-zoo 600",
        "about 350",
        "unsloth-zoo 866",
        "all 48 layers",
        "56.6 in",
        "layer 7;",
        "between 0.005 and",
        "0.005 and 0.92",
        "emmy 371",
        "tower of the : 2,330",
        "by 33.94",
        "unsloth-zoo 931",
        "from -53,760",
        "to 36,352",
        "beyond 65,504 (unsloth",
        "about 800,000",
        "unsloth 4014",
        "a quarter of the published",
        "starts at 65,536",
        "halves its scale",
        "logs it as 0",
        "falls towards 0",
    ),
    _TRAINED: ("Exit code 0", "(: 198, without", "are below 0"),
}
