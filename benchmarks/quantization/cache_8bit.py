"""What would keys and values in 8 bits lose, in full layers, and what would they save?

python benchmarks/quantization/cache_8bit.py --out benchmarks/results/DATE-cpu/cache_8bit.json

One scale per token and head, signed 8 bits. Random weights in the width of a release, few layers, on the CPU. Both
errors are of the logits of the tokens after a prompt, against float32: of 8-bit keys and values in float32, and of
bf16 as everybody computes it, which is the measure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gemma4_compat._gemma4.models import variants

LAYERS, TOKENS, NEW = 6, 512, 16


def model_of(variant: str, vocabulary: int) -> Any:
    """In float32, with random weights."""
    import torch
    from transformers import Gemma4ForCausalLM

    config = variants.config(variant).text_config
    config.num_hidden_layers, config.layer_types = LAYERS, config.layer_types[:LAYERS]
    config.vocab_size = config.vocab_size_per_layer_input = vocabulary
    config.num_kv_shared_layers = 0
    torch.manual_seed(0)
    return Gemma4ForCausalLM._from_config(config, dtype=torch.float32).eval()


def in_8_bits(tensor: Any) -> Any:
    """Rounded to 255 steps of the largest number of each token and head; [batch, heads, tokens, width]."""
    import torch

    scale = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return torch.round(tensor / scale) * scale


@contextlib.contextmanager
def rounding(enabled: bool) -> Iterator[None]:
    """Inside, full layers keep what 8 bits hold."""
    from transformers.cache_utils import DynamicLayer

    update = DynamicLayer.update

    def rounded(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        sliding = getattr(self, "is_sliding", False)
        return update(self, *((keys, values) if sliding else map(in_8_bits, (keys, values))), *args, **kwargs)

    if enabled:
        DynamicLayer.update = rounded
    try:
        yield
    finally:
        DynamicLayer.update = update


def logits(model: Any, ids: Any, prompt: int) -> Any:
    """(new, vocabulary) in float64: of the tokens after the prompt, one at a time."""
    import torch
    from transformers import DynamicCache

    cache, found = DynamicCache(config=model.config), []
    with torch.no_grad():
        for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
            found.append(model(part, past_key_values=cache, logits_to_keep=1).logits[0, -1].double())
    return torch.stack(found[1:])


def measured(variant: str, prompt: int, new: int, vocabulary: int) -> dict[str, Any]:
    import torch

    model = model_of(variant, vocabulary)
    ids = torch.randint(0, vocabulary, (1, prompt + new))
    exact = logits(model, ids, prompt)
    with rounding(True):
        rounded = logits(model, ids, prompt)
    plain = logits(model.bfloat16(), ids, prompt)
    full = [kind for kind in model.config.layer_types if kind == "full_attention"]
    found: dict[str, Any] = {"variant": variant, "layers": LAYERS, "full": len(full), "prompt": prompt, "new": new}
    for name, other in (("in_8_bits", rounded), ("bf16", plain)):
        off = (other - exact).abs()
        same = (other.argmax(-1) == exact.argmax(-1)).double().mean()
        found[name] = {
            "mean": off.mean().item() / exact.std().item(),
            "largest": off.max().item() / exact.std().item(),
            "same_token": same.item(),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default="E2B,E4B", help="variants, separated by commas")
    parser.add_argument("--prompt", type=int, default=TOKENS, help="tokens before those that are compared")
    parser.add_argument("--new", type=int, default=NEW, help="tokens that are compared")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = [measured(name, given.prompt, given.new, given.vocabulary) for name in given.variants.split(",")]
    for one in found:
        print(one["variant"], *(f"{name}: {one[name]}" for name in ("in_8_bits", "bf16")), sep="\n  ")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
