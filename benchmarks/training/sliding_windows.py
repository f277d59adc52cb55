"""What do windows save in the sliding layers of a long text, and products in training of its full ones?

python benchmarks/training/sliding_windows.py [--json FILE] [--device cpu] [--tokens 4096 8192] [--rounds 3]

The text model of an E2B with fewer layers, its real windows and heads, no per-layer embeddings, random weights and one
row of text in bfloat16. A prompt without gradients, and a training step with checkpointing, each with one call of
attention a layer and with the switch, in turns in one process. Seconds are the fastest and the slowest round, the
ratio is that of the fastest; the peak, on a GPU, is PyTorch's. ``bits`` says whether the logits are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

GIB = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()
    import torch

    from gemma4_compat._gemma4.attention import windows

    windows.LEAST = {"cpu": 0, "cuda": 0}  # to find from which length on it is faster
    model = build(arguments.layers, arguments.device)
    result: dict[str, Any] = {
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device,
        "threads": torch.get_num_threads(),
        "layers": model.config.layer_types,
        "prompt": {tokens: measure(prompt, model, tokens, arguments) for tokens in arguments.tokens},
        "training": {tokens: measure(training, model, tokens, arguments) for tokens in arguments.tokens},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


def build(layers: int, device: str) -> Any:
    import torch
    import transformers

    import gemma4_compat  # noqa: F401

    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        num_hidden_layers=layers,
        layer_types=["full_attention" if at % 5 == 4 else "sliding_attention" for at in range(layers)],
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        vocab_size=4096,
    )
    model = transformers.Gemma4ForCausalLM(config).to(device, torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def prompt(model: Any, ids: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False, logits_to_keep=64).logits


def training(model: Any, ids: Any) -> Any:
    found = model.train()(input_ids=ids, labels=ids, use_cache=False)
    found.loss.backward()
    model.zero_grad(set_to_none=True)
    return found.logits[:, -64:].detach()


def measure(work: Callable[..., Any], model: Any, tokens: int, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    import gemma4_compat
    from gemma4_compat._gemma4.attention import windows

    ids = torch.randint(3, 4096, (1, tokens), generator=torch.Generator().manual_seed(1)).to(arguments.device)
    times: dict[str, list[float]] = {"one call": [], "windows": []}
    peaks: dict[str, float] = {}
    logits: dict[str, Any] = {}
    os.environ["GEMMA4_COMPAT_ENABLE"] = windows.ID
    for turn in range(arguments.rounds + 1):  # the first one is not counted
        for kind in sorted(times, reverse=bool(turn % 2)):
            if kind == "one call":
                gemma4_compat.revert(windows.ID)
            else:
                gemma4_compat.install()
            if arguments.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            logits[kind] = work(model, ids)
            if arguments.device == "cuda":
                torch.cuda.synchronize()
                peaks[kind] = torch.cuda.max_memory_allocated() / GIB
            if turn:
                times[kind].append(time.perf_counter() - begin)
    best = {kind: min(each) for kind, each in times.items()}
    return {
        "seconds": {kind: [round(value, 3) for value in (min(each), max(each))] for kind, each in times.items()},
        "ratio": round(best["one call"] / best["windows"], 2),
        "peak_gib": {kind: round(value, 3) for kind, value in peaks.items()},
        "bits": torch.equal(logits["one call"], logits["windows"]),
    }


if __name__ == "__main__":
    raise SystemExit(main())
