"""Plans for prompts that come in chunks: the cache and the temporaries against real models, the code, the hints."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._gemma4.models import build
from gemma4_compat._lab import tiny_configs
from gemma4_compat._memory import formulas, layout
from gemma4_compat._memory.blueprint import describe
from gemma4_compat._memory.formulas import Load
from gemma4_compat._plan.text import plan_text
from tests.unit.memory.measured import cached, storages, watched

GIVEN: dict[str, Any] = {"quantize": "4bit-double", "quantize_experts": True}


@pytest.mark.parametrize("chunk, prompt", [(4, 12), (8, 24), (16, 40), (64, 40)])
@pytest.mark.parametrize("window", [8, 32])
def test_the_cache_after_the_last_chunk(chunk: int, prompt: int, window: int) -> None:
    """At most what is planned, and no less than what every layer keeps: of a sliding layer a window and a chunk."""
    import torch
    from transformers import DynamicCache, Gemma4ForCausalLM
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    shape = {**tiny_configs.text_shape(), "sliding_window": window}
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        **shape, vocab_size_per_layer_input=tiny_configs.VOCABULARY, hidden_size_per_layer_input=64
    )
    model = Gemma4ForCausalLM(config).to(torch.bfloat16).eval()
    load = Load(context=prompt, prefill_chunk=chunk)
    cache = DynamicCache(config=model.config)
    held = 0
    with torch.no_grad():
        for part in torch.randint(3, 240, (1, prompt)).split(chunk, dim=1):
            model(input_ids=part, past_key_values=cache, use_cache=True)
            held = max(held, storages(cache))
    planned = cached(describe(model), load, prefill=True)
    assert held <= planned <= 1.35 * held
    assert load.chunked is (chunk < prompt)
    if load.chunked and prompt > window + chunk:
        assert planned < cached(describe(model), replace(load, prefill_chunk=None), prefill=True)


@pytest.mark.parametrize("tokens", [128, 512])
def test_all_experts_at_once_take_what_is_planned(tokens: int) -> None:
    """The inputs and outputs of each pair of token and expert, and these in fp32, weighted and in order: to 3 %."""
    import torch
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts

    config = Gemma4TextConfig(
        hidden_size=256, moe_intermediate_size=64, num_experts=16, top_k_experts=4, enable_moe_block=True
    )
    config._experts_implementation = "grouped_mm"
    module = Gemma4TextExperts(config).to(torch.bfloat16).requires_grad_(False)
    for name in ("gate_up_proj", "down_proj"):
        torch.nn.init.normal_(getattr(module, name), std=0.02)
    inputs = torch.randn(tokens, 256, dtype=torch.bfloat16)
    chosen = torch.randint(0, 16, (tokens, 4))
    with torch.no_grad(), watched() as counts:
        module(inputs, chosen, torch.rand(tokens, 4))  # the router's weights are fp32
    assert counts["peak"] == pytest.approx(formulas.grouped_experts(tokens * 4, 256, 2), rel=0.03)


def test_chunks_leave_more_experts_on_the_card() -> None:
    whole = gemma4_compat.plan_device_map("26B-A4B", "8GiB", **GIVEN)
    chunked = gemma4_compat.plan_device_map("26B-A4B", "8GiB", prefill_chunk=1024, **GIVEN)
    assert whole.prefill_chunk is None
    assert chunked.prefill_chunk == 1024
    assert len(chunked.looked_up) < len(whole.looked_up)
    assert chunked.longest_context > whole.longest_context
    assert whole.use[0].prefill > whole.chunked_prefill > whole.use[0].weights
    assert chunked.chunked_prefill == 0  # it is what was planned


def test_the_code_and_the_text_say_so() -> None:
    whole = gemma4_compat.plan_device_map("E2B", "3GiB")
    chunked = gemma4_compat.plan_device_map("E2B", "3GiB", prefill_chunk=512)
    line = "model.generation_config.prefill_chunk_size = 512"
    assert line in chunked.code
    assert "prefill_chunk_size" not in whole.code
    ast.parse(chunked.code)
    assert "prompt in chunks of 512" in plan_text(chunked)
    assert "--prefill-chunk 1024" in plan_text(whole)
    assert "--prefill-chunk" not in plan_text(gemma4_compat.plan_device_map("E2B", "3GiB", context=1024))
    assert "--prefill-chunk" not in plan_text(gemma4_compat.plan_device_map("E2B", "8GiB", vision=True))


@pytest.mark.parametrize("context", [256, 8192, 32768])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("variant", ["E2B", "31B", "26B-A4B"])
def test_a_chunk_never_needs_more(variant: str, fast: bool, context: int) -> None:
    """Not more than the whole prompt, and as much where the prompt is one chunk."""
    blueprint = describe(build.on_meta(variant)[0], "4bit-double", experts=True)
    load = Load(context=context, fast=fast)
    peaks = [
        formulas.activations(blueprint, blueprint.layers, replace(load, prefill_chunk=chunk), prefill=True, head=True)
        for chunk in (None, context, 1024, 128)
    ]
    assert peaks[0] == peaks[1]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("chunk", [0, -1])
def test_chunks_that_are_none(chunk: int) -> None:
    with pytest.raises(Gemma4CompatError, match=f"prefill_chunk is {chunk}; it must be at least 1"):
        gemma4_compat.plan_device_map("E2B", "8GiB", prefill_chunk=chunk)


@pytest.mark.parametrize("modality", ["vision", "audio"])
def test_chunks_are_planned_for_text(modality: str) -> None:
    with pytest.raises(Gemma4CompatError, match="prefill_chunk is 512 for inputs with images or audio"):
        gemma4_compat.plan_device_map("E2B", "8GiB", prefill_chunk=512, **{modality: True})


def test_what_would_fit_names_chunks() -> None:
    blueprint = describe(build.on_meta("E2B")[0], "4bit-double")
    load = Load(context=32768)
    chunked = layout.smallest_budget(blueprint, replace(load, prefill_chunk=layout.PREFILL_CHUNK))
    assert chunked < layout.smallest_budget(blueprint, load)
    with pytest.raises(Gemma4CompatError, match=r"the prompt in chunks \(prefill_chunk=1024\)"):
        layout.layout(blueprint, {0: chunked}, load)
