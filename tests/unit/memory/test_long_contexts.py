"""Long contexts in the shapes of the released models: what K and V take, and a chunk of the prompt, on meta."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._engine import versions
from gemma4_compat._gemma4.models import build, variants
from gemma4_compat._generation.prompts import chunks
from gemma4_compat._memory import formulas, layout
from gemma4_compat._memory.blueprint import describe
from gemma4_compat._memory.formulas import Load
from gemma4_compat._plan import plan
from gemma4_compat._plan.text import plan_text
from tests.unit.memory.measured import watched
from tests.unit.memory.models import VARIANTS, run
from tools.pages import contexts

CONTEXT = 131_072
GIB = 1 << 30


@functools.cache
def text_model(variant: str) -> Any:
    """A variant's language model in real shapes."""
    import torch
    import transformers

    name = "Gemma4UnifiedForCausalLM" if variant == variants.UNIFIED else "Gemma4ForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(
            variants.config(variant).text_config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()


def kernel(query: Any, key: Any, value: Any, attn_mask: Any = None, **_options: Any) -> Any:
    """What ``scaled_dot_product_attention`` allocates on a GPU: a mask as numbers (PyTorch's
    ``convert_boolean_attn_mask``) and the copy that ``_memory.formulas`` infers; a sum in float32; the output.
    """
    import torch

    numbers = None if attn_mask is None else torch.zeros_like(attn_mask, dtype=query.dtype).clone()
    found = torch.empty_like(query, dtype=torch.float32), torch.empty_like(query)
    del numbers
    return found[1]


def cache_of(model: Any, context: int, held: int) -> Any:
    """A static cache in which so many tokens are, with its memory."""
    import torch
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=context)
    for layer, module in zip(cache.layers, model.model.layers):
        if not hasattr(layer, "cumulative_length"):  # it shares another's keys
            continue
        attention = module.self_attn
        width = attention.head_dim
        empty = torch.empty(1, attention.k_proj.out_features // width, 0, width, dtype=torch.bfloat16, device="meta")
        layer.lazy_initialization(empty, empty)
        layer.get_seq_length = lambda: held  # its value decides whether there is a mask
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = held
    return cache


def kept(variant: str, context: int) -> int:
    model = describe(text_model(variant))
    load = Load(context=context, fast=True)
    return sum(formulas.kv_cache(block, load, 2, prefill=False) for block in model.layers)


def bytes_of(cache: Any) -> int:
    """Of its keys and values; on meta every storage has the address 0."""
    layers = [layer for layer in cache.layers if hasattr(layer, "cumulative_length")]
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


@pytest.mark.parametrize("context", [300, 8192, 32_768, CONTEXT])
@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_and_values_take_what_is_planned(variant: str, context: int) -> None:
    """To the byte: shared layers hold none, sliding layers a window."""
    assert kept(variant, context) == bytes_of(cache_of(text_model(variant), context, 0))


@pytest.mark.parametrize(
    ("variant", "gib"), [("E2B", 0.76), ("E4B", 2.02), ("12B", 2.31), ("26B-A4B", 2.70), ("31B", 10.78)]
)
def test_keys_and_values_of_131072_tokens(variant: str, gib: float) -> None:
    if variant not in VARIANTS:
        pytest.skip("this transformers does not have it")
    assert kept(variant, CONTEXT) / GIB == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize("chunk", [256, 2048])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_chunk_at_the_end_of_a_long_prompt_takes_what_is_planned(
    variant: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 5 %, without the cache, in the layers of a forward whose last position is asked for."""
    import torch

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    model, held = text_model(variant), CONTEXT - chunk
    cache = cache_of(model, CONTEXT, held)
    described, text = describe(model), model.model
    ids = torch.zeros(1, chunk, dtype=torch.long, device="meta")
    positions = torch.arange(held, CONTEXT, device="meta")[None]
    options = {"logits_to_keep": 1} if described.one_query else {}
    with torch.no_grad(), watched() as counts:
        embedded = text.embed_tokens(ids)
        rows = text.get_per_layer_inputs(ids, embedded) if described.per_layer_width else None
        options |= {} if rows is None else {"per_layer_inputs": rows}
        text(inputs_embeds=embedded, position_ids=positions, past_key_values=cache, use_cache=True, **options)
    load = Load(context=CONTEXT, prefill_chunk=chunk, fast=True)
    planned = formulas.activations(described, described.layers, load, prefill=True, head=False)
    assert planned - kept(variant, CONTEXT) == pytest.approx(counts["peak"], rel=0.05)


# ------------------------------------------------------------------------------------------------------------ chunks


@pytest.mark.parametrize(("variant", "vram"), [("E2B", "4GiB"), ("E4B", "8GiB"), ("26B-A4B", "12GiB")])
def test_a_prompt_that_does_not_fit_at_once_is_planned_in_chunks(variant: str, vram: str) -> None:
    found = gemma4_compat.plan_device_map(variant, vram, context=CONTEXT)
    assert found.prefill_chunk in chunks.SIZES
    assert f"model.generation_config.prefill_chunk_size = {found.prefill_chunk}" in found.code
    assert ("gemma4_compat.decode_fast(model)" in found.code) is found.fast
    if _blueprint(variant).one_query_packed:  # before, a token's step copies keys and values for each head
        assert found.fast
        assert found.streamed == ()
    assert found.use[0].peak <= found.use[0].budget
    assert found.longest_context >= CONTEXT
    assert "The prompt is read in chunks: at once it would not fit" in " ".join(plan_text(found).split())
    larger = [size for size in chunks.SIZES if found.prefill_chunk < size <= 2048]
    for size in larger:
        given = gemma4_compat.plan_device_map(variant, 1 << 40, context=CONTEXT, prefill_chunk=size)
        used = layout.placed_use(_blueprint(variant), found.layout, given.load)
        assert used[0].peak > used[0].budget


def _blueprint(variant: str) -> Any:
    return plan._blueprint(build.on_meta(variant)[0], "4bit", None, experts=True)


def test_layers_stay_where_chunks_keep_them() -> None:
    """The E4B read at once streams layers in 4 GiB, and each token would wait for them."""
    whole = gemma4_compat.plan_device_map("E4B", "4GiB", prefill_chunk=8192)
    found = gemma4_compat.plan_device_map("E4B", "4GiB")
    assert len(whole.streamed) > len(found.streamed) == 0
    assert found.prefill_chunk in (512, 1024)


@pytest.mark.parametrize(
    ("streamed", "chunked", "chunk", "better"),
    [(40, 0, 128, True), (40, 40, 1024, False), (40, 38, 1024, False), (40, 36, 1024, True), (40, 36, 512, False)],
)
def test_chunks_bring_streamed_layers_once_each(streamed: int, chunked: int, chunk: int, better: bool) -> None:
    """Of 8,192 tokens. A hundred tokens of an answer bring fewer layers by more than the further chunks bring."""
    load = Load(context=8192)
    one, other = (_placed(count) for count in (streamed, chunked))
    assert plan._is_better((one, load, ""), (other, replace(load, prefill_chunk=chunk), "")) is better
    assert plan._is_better((one, load, plan._NO_ROOM), (one, load, ""))
    assert not plan._is_better((one, load, ""), (other, load, plan._NO_ROOM))


def _placed(streamed: int) -> layout.Layout:
    return layout.Layout(device_map={}, use={}, cpu=0, disk=0, streamed=("a layer",) * streamed)


def test_what_fits_is_read_at_once_and_the_longest_context_in_chunks_is_said() -> None:
    found = gemma4_compat.plan_device_map("E2B", "4GiB")
    assert found.prefill_chunk is None
    assert found.longest_chunked > found.longest_context
    assert f"and {found.longest_chunked} tokens fit" in " ".join(plan_text(found).split())


def test_media_are_not_planned_in_chunks() -> None:
    with pytest.raises(Gemma4CompatError, match="with a context of 131072 and a batch of 1 does not fit"):
        gemma4_compat.plan_device_map("E2B", "4GiB", context=CONTEXT, vision=True)


def test_a_refusal_says_what_fits_in_chunks() -> None:
    with pytest.raises(Gemma4CompatError, match="read in chunks of 128 tokens") as caught:
        gemma4_compat.plan_device_map("E4B", "4GiB", context=CONTEXT)
    context = int(str(caught.value).partition("a context of ")[2].partition("or a context of ")[2].split()[0])
    assert 8192 < context < CONTEXT
    assert gemma4_compat.plan_device_map("E4B", "4GiB", context=context).prefill_chunk == 128


def test_the_code_of_a_plan_in_chunks_runs(workspace: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"context": 2000, "quantize": None}
    whole, chunked = (
        gemma4_compat.plan_device_map(str(workspace.checkpoint), {"cpu": 1 << 40}, prefill_chunk=size, **options)
        for size in (None, 128)
    )
    budget = (whole.use["cpu"].peak + chunked.use["cpu"].peak) // 2
    found = gemma4_compat.plan_device_map(str(workspace.checkpoint), {"cpu": budget}, cpu=0, **options)
    assert found.prefill_chunk is not None
    assert run(found)["model"].generation_config.prefill_chunk_size == found.prefill_chunk


def test_the_page_has_the_figures_of_this_release() -> None:
    if versions.installed("transformers") != contexts.RELEASE:
        pytest.skip(f"the page is for transformers {contexts.RELEASE}")
    text = contexts.PAGE.read_text(encoding="utf-8")
    assert contexts.page(text) == text, "python -m tools.pages.contexts"
    assert contexts.PLANNED.read_text(encoding="utf-8") == contexts.planned_text(), "python -m tools.pages.contexts"
    assert f"transformers {contexts.RELEASE}" in text
