"""What the planner counts beside the weights, against real models: KV cache, temporaries, an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._gemma4.models import build, variants
from gemma4_compat._lab import tiny_configs
from gemma4_compat._memory import formulas
from gemma4_compat._memory.blueprint import adapter_sizes, describe, rounded
from gemma4_compat._memory.formulas import Load
from tests.unit.memory.measured import cached, storages, watched
from tests.unit.memory.models import VARIANTS, on_meta, planned

# ----------------------------------------------------------------------------------------------------------- KV cache


@pytest.mark.parametrize("context", [3, 7, 8, 9, 40])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("window", [8, 32])
def test_the_cache_holds_what_is_planned(context: int, batch: int, window: int) -> None:
    import torch
    from transformers import DynamicCache, Gemma4ForCausalLM
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    shape = {**tiny_configs.text_shape(), "sliding_window": window, "head_dim": 128, "global_head_dim": 256}
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        **shape, vocab_size_per_layer_input=tiny_configs.VOCABULARY, hidden_size_per_layer_input=64
    )
    model = Gemma4ForCausalLM(config).to(torch.bfloat16).eval()
    blueprint = describe(model)
    cache = DynamicCache(config=model.config)
    ids = torch.randint(3, 240, (batch, context))
    load = Load(context=context, batch=batch)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        assert storages(cache) == cached(blueprint, load, prefill=True)
        model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    assert storages(cache) == cached(blueprint, Load(context=context + 1, batch=batch), prefill=False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_large_variants_hold_keys_and_values_both(variant: str) -> None:
    """``attention_k_eq_v`` saves a projection, not cache."""
    blueprint = planned(on_meta(variant), None)
    full = [block.attention for block in blueprint.layers if block.attention and block.attention.window is None]
    config = on_meta(variant).config.get_text_config()
    if getattr(config, "attention_k_eq_v", False):
        assert {attention.kv_width for attention in full} == {512 * {"12B": 1, "26B-A4B": 2, "31B": 4}[variant]}
    assert all(attention.head_dim == 512 for attention in full)
    assert sum(block.attention.shared for block in blueprint.layers if block.attention) == config.num_kv_shared_layers


# -------------------------------------------------------------------------------------------------------- temporaries


@pytest.mark.parametrize("tokens", [512, 2048])
@pytest.mark.parametrize("variant", ["E2B", "E4B"])
def test_temporaries_of_a_prefill_are_as_measured(variant: str, tokens: int) -> None:
    """To 6 %. The real model in bf16 on meta, with eager attention, whose scores are tensors like others."""
    import torch
    from transformers import Gemma4ForCausalLM

    config = variants.config(variant).text_config
    with torch.device("meta"):
        model = Gemma4ForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
        ids = torch.zeros(1, tokens, dtype=torch.long)
    blueprint = planned(model, None)
    load = Load(context=tokens, attention="eager")
    text = model.model
    options = {"logits_to_keep": 1} if blueprint.one_query else {}
    with torch.no_grad(), watched() as counts:
        # As the whole model does it, which looks for image tokens first: meta cannot.
        embedded = text.embed_tokens(ids)
        rows = text.get_per_layer_inputs(ids, embedded)
        text(inputs_embeds=embedded, per_layer_inputs=rows, use_cache=True, **options)
    expected = formulas.activations(blueprint, blueprint.layers, load, prefill=True, head=True)
    assert expected == pytest.approx(counts["peak"], rel=0.06)


@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_temporaries_of_the_vision_tower_are_as_measured(variant: str) -> None:
    """To 6 %, eager: its encoder on meta, with as many patches as an image has at most."""
    import torch

    model, *_ = build.on_meta(variant)
    blueprint = planned(model, None)
    tower = model.model.vision_tower
    tower.config._attn_implementation = "eager"
    count = formulas.MEASURED.image_tokens * blueprint.patches
    hidden = torch.zeros(1, count, tower.config.hidden_size, dtype=torch.bfloat16, device="meta")
    positions = torch.zeros(1, count, 2, dtype=torch.long, device="meta")
    with torch.no_grad(), watched() as counts:
        tower.encoder(inputs_embeds=hidden, attention_mask=None, pixel_position_ids=positions)
    expected = formulas.tower_activations(blueprint, Load(vision=True, attention="eager"))
    assert expected == pytest.approx(counts["peak"], rel=0.06)


def test_temporaries_of_the_audio_tower_are_as_measured() -> None:
    import torch

    model, *_ = build.on_meta("E2B")
    frames = torch.zeros(1, formulas.MEASURED.audio_frames, 128, dtype=torch.bfloat16, device="meta")
    mask = torch.ones(frames.shape[:2], dtype=torch.bool, device="meta")
    with torch.no_grad(), watched() as counts:
        model.model.audio_tower(frames, mask)
    expected = formulas.tower_activations(planned(model, None), Load(audio=True))
    assert expected == pytest.approx(counts["peak"], rel=0.06)


# ------------------------------------------------------------------------------------------------------------- adapter


@pytest.mark.parametrize("targets", ["language", "towers", "all"])
def test_an_adapter_takes_what_peft_loads(workspace: Any, targets: str) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.load(None), workspace.adapter(targets))
    weights = [tensor for name, tensor in model.named_parameters() if "lora_" in name]
    expected = sum(rounded(tensor.numel() * tensor.element_size()) for tensor in weights)
    sizes = adapter_sizes(workspace.adapter(targets))
    assert sum(sizes.values()) == expected
    plan = gemma4_compat.plan_device_map(
        str(workspace.checkpoint), "1GiB", quantize=None, adapter=workspace.adapter(targets), context=64
    )
    assert plan.use[0].adapter == expected


def test_an_adapter_of_another_model_is_refused(workspace: Any) -> None:
    with pytest.raises(Gemma4CompatError, match="was made for another model"):
        describe(on_meta("E2B"), adapter={"model.layers.77.mlp.up_proj": 8})


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Gemma4CompatError, match="is not a saved adapter"):
        gemma4_compat.plan_device_map("E2B", "8GiB", adapter=tmp_path)
