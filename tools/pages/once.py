"""What full layers would keep if keys and values were made of one projection: the table in docs/CACHES.md.

In full layers with ``attention_k_eq_v`` keys and values are norms of the same numbers, ``k_proj``'s. ``python -m
tools.pages.once`` writes what these take instead, and what PyTorch moves to make keys and values of them.
``tests/unit/memory/test_kept_once.py`` proves that the bits are the same.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._gemma4.models import build, variants
from gemma4_compat._gemma4.quantization import config
from gemma4_compat._memory import layout
from gemma4_compat._memory.blueprint import describe
from gemma4_compat._memory.formulas import Load
from tools.claims.form import own_layers, text_of
from tools.pages.markers import ROOT, between

PAGE = ROOT / "docs" / "CACHES.md"
START, END = "<!-- once: start (python -m tools.pages.once) -->", "<!-- once: end -->"
CONTEXTS = (8192, 32_768, 131_072, 262_144)
_ITEM, _FACTOR = 2, 4  # bytes of a number in bf16, and of what a norm multiplies a row by, in float32
_TOKENS = 4096  # for which bytes are counted: they are proportional
_HEAD = ("variant", "tokens", "keys and values", "once", "once, and one layer's keys and values")
_MOVED = ("reads now", "moves to make them, and reads", "with a custom kernel")


def factor(rows: Any, eps: float) -> Any:
    """What ``Gemma4RMSNorm`` multiplies rows (..., width) by: float32 (..., 1)."""
    import torch

    return torch.pow(rows.float().pow(2).mean(-1, keepdim=True) + eps, -0.5)


def remade(rows: Any, factors: Any, weight: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """Keys and values of full attention, (batch, heads, tokens, width), in the steps of ``Gemma4TextAttention``.

    Each operation after :func:`factor` takes one number at a time, so the bits do not depend on how many rows there
    are.

    Args:
        rows: of ``k_proj``, (batch, tokens, heads, width).
        factors: of :func:`factor`, when the rows were made.
        weight: of ``k_norm``, (width).
        cos: of the rows' positions, (batch, tokens, width).
        sin: the same.
    """
    from transformers.models.gemma4 import modeling_gemma4 as gemma4

    normed = rows.float() * factors
    keys = (normed * weight.float()).type_as(rows)
    keys = gemma4.apply_rotary_pos_emb(keys, cos, sin, unsqueeze_dim=2)
    return keys.transpose(1, 2), normed.type_as(rows).transpose(1, 2)


def differing(dtype_name: str = "bfloat16") -> float:
    """The share of the numbers of keys that are others where keys are made of values, which are rounded once more:
    random rows in the width of the released models, and random weights of their norm.
    """
    import torch

    dtype, generator = getattr(torch, dtype_name), torch.Generator().manual_seed(0)
    rows = torch.randn(1, 512, 4, 512, generator=generator).to(dtype)
    weight = 1 + 0.3 * torch.randn(512, generator=generator).to(dtype)
    angles = torch.randn(1, 512, 512, generator=generator)
    turns = angles.cos().to(dtype), angles.sin().to(dtype)
    keys, values = remade(rows, factor(rows, 1e-6), weight, *turns)
    again = remade(values.transpose(1, 2), torch.ones(()), weight, *turns)[0]
    return float((again != keys).float().mean())


def moved(function: Callable[[], Any]) -> int:
    """Bytes that PyTorch's operations read and write, each by itself."""
    import torch
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if not func.is_view:
                tensors = (one for one in _pytree.tree_leaves((args, kwargs, found)) if isinstance(one, torch.Tensor))
                self.nbytes += sum(one.nbytes for one in tensors)
            return found

    with Counting() as counting:
        function()
    return counting.nbytes


def moved_a_token(heads: int, width: int) -> float:
    """Bytes that :func:`remade` moves for each token of a layer, in bf16."""
    import torch

    def made(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, factors = made(1, _TOKENS, heads, width), made(1, _TOKENS, heads, 1, dtype=torch.float32)
    turns = made(1, _TOKENS, width), made(1, _TOKENS, width)
    return moved(lambda: remade(rows, factors, made(width), *turns)) / _TOKENS


def figures(shape: str, context: int) -> tuple[float, ...]:
    """GiB of full layers: kept now, kept once, that and the keys and values of one layer; and what a token moves:
    now, in PyTorch's operations, and with a kernel that makes keys and values where it reads them.
    """
    text = text_of(shape)
    layers, heads = own_layers(shape).count("full_attention"), text.num_global_key_value_heads
    each = heads * text.global_head_dim * _ITEM
    both, once = 2 * each, each + heads * _FACTOR
    remaking = layers * (moved_a_token(heads, text.global_head_dim) + both)
    bytes_of_a_token = layers * both, layers * once, layers * once + both, layers * both, remaking, layers * once
    return tuple(context * nbytes / 2**30 for nbytes in bytes_of_a_token)


def longest(shape: str, gib: float) -> tuple[int, int]:
    """Tokens of the longest text in so many GiB, everything on the card, as docs/CACHES.md plans texts: now, and if
    full layers kept their projection once. To 1,024.
    """
    model = build.on_meta(shape)[0]
    names = config.linear_names(model, config.default_skip_modules(model))
    blueprint = describe(model, "4bit", names, experts=True)

    def fits(context: int, saves: bool) -> bool:
        load = Load(context=context, prefill_chunk=layout.PREFILL_CHUNK, fast=True, own_in_chunks=True)
        now, once, *_ = figures(shape, context)
        return layout.smallest_budget(blueprint, load, layers_leave=False) / 2**30 - saves * (now - once) <= gib

    most = text_of(shape).max_position_embeddings // 1024
    kept, once = (
        bisect.bisect(range(1, most + 1), 0, key=lambda n: not fits(1024 * n, saves)) for saves in (False, True)
    )
    return 1024 * kept, 1024 * once


def price(shape: str) -> float:
    """GiB that a token moves more in PyTorch's operations, for each GiB that is saved."""
    now, _, peak, reads, moves, _ = figures(shape, 1024)
    return (moves - reads) / (now - peak)


def shapes() -> list[str]:
    """Variants whose full layers take values from ``k_proj``."""
    return [shape for shape in variants.NAMES if text_of(shape).attention_k_eq_v]


def table() -> str:
    """In GiB, of full layers."""
    head = (*_HEAD, *(f"a token {words}" for words in _MOVED))
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *_rows()])


def _rows() -> Iterator[str]:
    for shape in shapes():
        for context in CONTEXTS:
            found = (f"{gib:.2f}" for gib in figures(shape, context))
            yield f"| {shape} | {context:,} | {' | '.join(found)} |"


def page(text: str) -> str:
    """``text`` with the table as it should be."""
    return between(text, START, END, table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
