"""Plans with an assistant: its weights, what rounds with drafts keep, code and text."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat._gemma4.models import build, variants
from gemma4_compat._generation.speculative import draft_windows
from gemma4_compat._lab import tiny_configs
from gemma4_compat._memory import formulas
from gemma4_compat._memory.blueprint import Blueprint, describe
from gemma4_compat._memory.formulas import Load
from gemma4_compat._plan import assistants
from tests.unit.memory.models import VARIANTS

needs_assistants = pytest.mark.skipif(
    not hasattr(transformers, "Gemma4AssistantForCausalLM"), reason="this release has no assistants"
)
LOAD = Load(context=4096, batch=1, fast=True)


@functools.cache
def blueprint(variant: str) -> Blueprint:
    return describe(build.on_meta(variant)[0])


@functools.cache
def planned(variant: str, **options: Any) -> gemma4_compat.Plan:
    return gemma4_compat.plan_device_map(variant, "24GiB", **options)


def released(variant: str) -> Any:
    """The assistant of a variant on meta: four layers of the model's shape, 256 or 1,024 wide."""
    import torch

    unified = variant == variants.UNIFIED
    kind = "Gemma4UnifiedAssistant" if unified else "Gemma4Assistant"
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip("this release has no assistants")
    text = build.on_meta(variant)[0].config.get_text_config()
    small = bool(getattr(text, "hidden_size_per_layer_input", 0))
    width = 256 if small else 1024
    shape = text.to_dict() | {
        "hidden_size": width,
        "intermediate_size": 8 * width,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
    }
    if hasattr(text, "hidden_size_per_layer_input"):
        shape |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    given = {name: value for name, value in shape.items() if name not in ("architectures", "per_layer_config")}
    config = getattr(transformers, f"{kind}Config")(
        text_config=type(text)(**given), backbone_hidden_size=text.hidden_size, use_ordered_embeddings=small
    )
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_those_of_the_class_of_transformers(variant: str) -> None:
    model = released(variant)
    order = getattr(model, "masked_embedding", None)
    expected = sum(tensor.nbytes for tensor in model.parameters())
    expected += order.token_ordering.nbytes if order is not None else 0
    assert abs(assistants.weights(blueprint(variant)) / expected - 1) < 0.001


def test_weights_are_those_that_the_pages_state() -> None:
    """78 million for E2B's assistant, 470 for that of 31B."""
    assert round(assistants.weights(blueprint("E2B")) / 2e6) in range(77, 83)
    assert round(assistants.weights(blueprint("31B")) / 2e6) in (469, 470)


@pytest.mark.parametrize("context", [5, 40])
def test_windows_are_as_large_as_planned(context: int) -> None:
    import torch
    from transformers import StaticCache

    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(tiny_configs.config().text_config).bfloat16().eval()
    cache = StaticCache(config=model.config, max_cache_len=context)
    with torch.no_grad():
        model(torch.tensor([[3, 4]]), past_key_values=cache)
    held = draft_windows.Windows(cache, 8)._held
    expected = sum(tensor.nbytes for pair in held for tensor in pair)
    found = formulas.draft_windows(describe(model).layers, replace(LOAD, context=context), 2)
    assert expected <= found <= expected + 512 * 2 * len(held)


@needs_assistants
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_plan_leaves_room_and_loads_it(variant: str) -> None:
    without, found = planned(variant), planned(variant, assistant=True)
    (use,), (plain,) = found.use.values(), without.use.values()
    assert plain.assistant == 0
    assert use.assistant > assistants.weights(blueprint(variant))
    assert use.head == 0  # a text with drafts computes the whole head
    assert use.decode - (plain.decode - plain.head) >= use.assistant or found.device_map != without.device_map
    assert use.peak <= use.budget
    kind = "Gemma4UnifiedAssistant" if variant == variants.UNIFIED else "Gemma4Assistant"
    compile(found.code, "plan", "exec")
    assert f'{kind}ForCausalLM.from_pretrained(\n    "google/gemma-4-{variant}-it-assistant"' in found.code
    assert "decode_fast(model, assistants=True)" in found.code
    assert "ssistant" not in without.code
    assert found.as_data()["use"]["0"]["assistant"] == use.assistant


@needs_assistants
def test_less_context_fits_beside_it() -> None:
    options: dict[str, Any] = {"context": 2048, "prefill_chunk": 1024}
    without = gemma4_compat.plan_device_map("31B", "24GiB", **options)
    found = gemma4_compat.plan_device_map("31B", "24GiB", assistant=True, **options)
    assert found.device_map == without.device_map
    assert found.longest_context < without.longest_context


@needs_assistants
def test_with_experts_in_bfloat16_transformers_decodes() -> None:
    found = gemma4_compat.plan_device_map("26B-A4B", "80GiB", assistant=True, quantize_experts=False)
    (use,) = found.use.values()
    assert use.assistant == pytest.approx(assistants.weights(blueprint("26B-A4B")), abs=512)
    assert "decode_fast(model)\n" in found.code
    assert "assistant_model=assistant" in found.code


@needs_assistants
def test_on_the_command_line() -> None:
    found = CliRunner().invoke(cli.app, ["plan", "E2B", "--vram", "8GiB", "--assistant"])
    assert found.exit_code == 0
    text = " ".join(found.output.split())
    assert "The assistant takes " in text
    assert "stops where drafts do not pay" in text


@needs_assistants
def test_several_prompts_are_refused_before_anything_is_planned() -> None:
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"assistant=True with batch=2: .* Use batch=1"):
        gemma4_compat.plan_device_map("E2B", "8GiB", batch=2, assistant=True)


def test_a_release_without_assistants_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assistants, "exist", lambda: False)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match="has no assistants for Gemma 4"):
        gemma4_compat.plan_device_map("E2B", "8GiB", assistant=True)
