"""What the attention of a prompt takes, against tensors on meta: masks, and copies of masks, keys and values.

The layers up to the first full one, with the heads of the released models and little else.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

from gemma4_compat._gemma4.models import variants
from gemma4_compat._generation.prompts import prompts
from gemma4_compat._memory import formulas
from gemma4_compat._memory.blueprint import describe
from gemma4_compat._memory.formulas import Load
from tests.unit.memory.measured import watched
from tests.unit.memory.models import VARIANTS
from tests.unit.memory.test_long_contexts import cache_of, kernel, text_model

#: Positions of the cache, and tokens of a chunk.
CASES = [(2048, 512), (8192, 2048), (131_072, 128), (131_072, 2048)]


@functools.cache
def attention_of(variant: str, implementation: str) -> Any:
    """A language model that is little more than its attention."""
    import torch
    import transformers

    config = copy.deepcopy(variants.config(variant).text_config)
    layers = config.layer_types.index("full_attention") + 1
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    config.intermediate_size, config.num_kv_shared_layers, config.hidden_size_per_layer_input = 64, 0, 0
    config.enable_moe_block = False
    name = "Gemma4UnifiedForCausalLM" if variant == variants.UNIFIED else "Gemma4ForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(
            config, dtype=torch.bfloat16, attn_implementation=implementation
        )
    return model.eval()


def grown(model: Any, held: int, chunk: int) -> Any:
    """A default cache that chunks have filled with so many tokens: of a window it keeps a view of what it saw."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for layer, module in zip(cache.layers, model.model.layers):
        attention, window = module.self_attn, getattr(layer, "sliding_window", None)
        width = attention.head_dim
        kept, seen = (held, held) if window is None else (min(held, window - 1), min(held, window - 1 + chunk))
        shape = 1, attention.k_proj.out_features // width, seen, width
        keys, values = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(2))
        layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
        layer.keys, layer.values = keys[:, :, -kept:], values[:, :, -kept:]
        if window is not None:
            layer.cumulative_length = held
    return cache


def peak(model: Any, context: int, chunk: int, *, static: bool) -> int:
    """Bytes at most while the last chunk is read; without a static cache, which is there before."""
    import torch

    held = context - chunk
    cache = cache_of(model, context, held) if static else None
    ids = torch.zeros(1, chunk, dtype=torch.long, device="meta")
    positions = torch.arange(held, context, device="meta")[None]
    with torch.no_grad(), watched() as counts:
        if cache is None:
            cache = grown(model, held, chunk)
        embedded, options = model.model.embed_tokens(ids), {}
        if getattr(model.config, "hidden_size_per_layer_input", 0):
            options["per_layer_inputs"] = model.model.get_per_layer_inputs(ids, embedded)
        model.model(inputs_embeds=embedded, position_ids=positions, past_key_values=cache, use_cache=True, **options)
    return counts["peak"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention allocates what it does on a GPU."""
    import torch

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_takes_what_is_planned(variant: str, implementation: str, static: bool) -> None:
    """The plan is at most 3 % above the peak. It leaves out positions and sums of a row: at most 0.2 %."""
    model = attention_of(variant, implementation)
    described = describe(model)
    for context, chunk in CASES:
        load = Load(context=context, prefill_chunk=chunk, fast=static, attention=implementation)
        planned = formulas.activations(described, described.layers, load, prefill=True, head=False)
        if static:
            planned -= sum(formulas.kv_cache(block, load, 2, prefill=False) for block in described.layers)
        measured = peak(model, context, chunk, static=static)
        assert measured <= 1.002 * planned, (context, chunk)
        assert planned <= 1.03 * measured, (context, chunk)


@pytest.mark.parametrize("tokens", [8, 24])
def test_pytorch_makes_numbers_of_a_mask(tokens: int) -> None:
    """On the CPU, to the byte; beside them its kernel allocates the output and a float32 for each query."""
    import torch

    states = torch.zeros(1, 2, tokens, 64, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
    with torch.no_grad(), watched() as counts:
        found = torch.nn.functional.scaled_dot_product_attention(states, states, states, attn_mask=mask)
    numbers = 2 * tokens * tokens
    assert counts["peak"] == numbers + found.nbytes + 4 * 2 * tokens


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_of_prompts_leave_room_for_a_forward(variant: str) -> None:
    """The rough estimate that decides about them is not less than a forward takes in the real model."""
    model = text_model(variant)
    for chunk in (128, 1024):
        cache = cache_of(model, 131_072, 131_072 - chunk)
        estimated = prompts.activations(model, 1, chunk, cache, masks=True, copies=True)
        assert peak(model, 131_072, chunk, static=True) <= estimated, chunk


def test_masks_are_counted_once_they_are_made_and_copies_where_pytorch_computes() -> None:
    model = text_model("E4B")
    cache = cache_of(model, 131_072, 0)
    whole, without_masks, without_copies = (
        prompts.activations(model, 2, 1024, cache, masks=masks, copies=copies)
        for masks, copies in ((True, True), (False, True), (False, False))
    )
    full, sliding = 2 * 1024 * 131_072, 2 * 1024 * (512 + 1024)
    assert whole - without_masks == full + sliding
    repeated = 2 * 2 * 131_072 * 8 * 512 * 2  # keys and values, rows, positions, heads, width, bytes
    assert without_masks - without_copies > repeated + full
    short = prompts.activations(model, 2, 1024, cache_of(model, 8192, 0), masks=True, copies=True)
    assert short < whole / 4
