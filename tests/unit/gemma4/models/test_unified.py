"""The 12B, whose classes are in a module of their own (F30): what users do with the others, on its small twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_models

transformers = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

if not hasattr(transformers, "Gemma4UnifiedConfig"):
    pytest.skip("this transformers has no gemma4_unified", allow_module_level=True)

from gemma4_compat._lab.scenarios import compare_quantized_tower, features, relative  # noqa: E402
from gemma4_compat._lab.workspace import difference  # noqa: E402
from gemma4_compat.patches.multimodal.transformers_quantized_vision_unified import BOUND  # noqa: E402

QUANTIZATIONS = [None, "4bit", "4bit-double", "8bit"]


@pytest.fixture(scope="module")
def unified(workspace: Any) -> Any:
    return workspace.unified()


@pytest.fixture(scope="module")
def one_device(unified: Any) -> Callable[[str | None, str | None], Any]:
    from peft import PeftModel

    known: dict[tuple[str | None, str | None], Any] = {}

    def outputs(quantization: str | None, adapter: str | None) -> Any:
        key = (quantization, adapter)
        if key not in known:
            model = unified.load(quantization)
            if adapter is not None:
                model = PeftModel.from_pretrained(model, unified.adapter(adapter))
            known[key] = unified.outputs(model)
        return known[key]

    return outputs


def test_its_checkpoint_is_of_its_own_classes(unified: Any) -> None:
    model = unified.load()
    assert type(model).__module__ == "transformers.models.gemma4_unified.modeling_gemma4_unified"
    assert tiny.towers(model) == ["embed_vision", "embed_audio"]
    batch = tiny.unified_inputs(unified.main)
    assert {name: value.shape for name, value in batch.items()} == {
        name: value.shape for name, value in unified.inputs().items()
    }


def test_a_checkpoint_of_it_is_built_alone(tmp_path: Path) -> None:
    import torch

    model = tiny.load(tiny_models.build_unified_checkpoint(tmp_path))
    with torch.no_grad():
        assert model(**tiny.unified_inputs()).logits.isfinite().all()


@pytest.mark.parametrize("offload", ["towers", "layers", "both"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_offloaded_it_answers_as_on_one_device(
    unified: Any, one_device: Callable[..., Any], quantization: str | None, offload: str
) -> None:
    model = unified.split(quantization, offload)
    assert difference(one_device(quantization, None), unified.outputs(model)) == 0.0


@pytest.mark.parametrize("adapter", ["language", "towers", "all"])
@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_with_an_adapter_too(
    unified: Any, one_device: Callable[..., Any], quantization: str | None, adapter: str
) -> None:
    from peft import PeftModel

    base = unified.split(quantization)
    placement = dict(base.hf_device_map)
    model = PeftModel.from_pretrained(base, unified.adapter(adapter))
    assert base.hf_device_map == placement
    assert difference(one_device(quantization, adapter), unified.outputs(model)) == 0.0
    assert difference(one_device(quantization, None), one_device(quantization, adapter)) > 0, "it does something"


@pytest.mark.parametrize("sense", ["vision", "audio"])
@pytest.mark.parametrize("quantization", ["4bit", "4bit-double", "8bit"])
def test_quantized_embedders_give_what_their_dequantized_weights_give(
    unified: Any, quantization: str, sense: str
) -> None:
    error, contrast = compare_quantized_tower(unified, quantization, sense)
    assert error < BOUND
    assert contrast > 0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_pixels_of_any_dtype_are_seen_alike(unified: Any, dtype: str) -> None:
    import torch

    batch = unified.inputs()
    model = tiny.load(unified.checkpoint, "4bit", device=unified.main, towers=True)
    expected = features(model, batch, "vision")
    pixels = batch["pixel_values"].to(getattr(torch, dtype))
    assert relative(features(model, {**batch, "pixel_values": pixels}, "vision"), expected) < 0.01


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_quantized_embedders_offloaded(unified: Any, tmp_path: Path, quantization: str) -> None:
    import torch

    batch = unified.inputs()
    model = tiny.load(unified.checkpoint, quantization, device=unified.main, towers=True)
    with torch.no_grad():
        expected = model(**batch).logits
    split = unified.dispatch(model)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(split(**batch).logits, expected)


@pytest.mark.parametrize("name", ["embed_vision.patch_dense", "multimodal_embedder.embedding_projection"])
def test_an_adapter_on_a_quantized_embedder(unified: Any, name: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    batch = unified.inputs()
    model = tiny.load(unified.checkpoint, "4bit", device=unified.main, towers=True)
    expected = features(model, batch, "vision")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=[name]))
    assert relative(features(adapted.base_model.model, batch, "vision"), expected) == 0.0
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_()
    assert relative(features(adapted.base_model.model, batch, "vision"), expected) > 0.01


def test_a_quantized_embedder_compiles(unified: Any) -> None:
    import torch

    torch.compiler.reset()
    batch = unified.inputs()
    model = tiny.load(unified.checkpoint, "8bit", device=unified.main, towers=True)
    expected = features(model, batch, "vision")
    embedder = model.model.embed_vision
    embedder.forward = torch.compile(embedder.forward, backend="eager")
    assert relative(features(model, batch, "vision"), expected) < 1e-6


@pytest.mark.parametrize("parts", [("model.language_model.embed_tokens", "lm_head"), ("model.embed_vision",)])
def test_other_parts_offloaded(unified: Any, one_device: Callable[..., Any], parts: tuple[str, ...]) -> None:
    model = unified.load()
    placement = tiny.device_map(model, "none", main=unified.main, offloaded=unified.offloaded)
    model = unified.dispatch_map(model, {**placement, **dict.fromkeys(parts, unified.offloaded)})
    assert difference(one_device(None, None), unified.outputs(model)) == 0.0


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_attention_implementation_by_name(unified: Any, implementation: str) -> None:
    import torch

    other = "sdpa" if implementation == "eager" else "eager"
    batch = unified.inputs()
    found = []
    for name in (implementation, other):
        model = tiny.load(unified.checkpoint, device=unified.main, attn_implementation=name).float()
        assert model.config._attn_implementation == name
        with torch.no_grad():
            found.append(model(**batch).logits)
    assert relative(*found) < 1e-4


def test_in_float16_it_answers_about_images_and_sounds(unified: Any) -> None:
    import torch

    model = transformers.Gemma4UnifiedForConditionalGeneration.from_pretrained(
        unified.checkpoint, dtype=torch.float16, device_map={"": unified.main}
    ).eval()
    exact = transformers.Gemma4UnifiedForConditionalGeneration.from_pretrained(
        unified.checkpoint, dtype=torch.float32, device_map={"": unified.main}
    ).eval()
    batch = unified.inputs()
    with torch.no_grad():
        assert relative(model(**batch).logits.float(), exact(**batch).logits) < 0.05


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients_are_those_without(unified: Any, reentrant: bool) -> None:
    import torch

    def gradients(checkpointed: bool) -> dict[str, Any]:
        model = unified.load().train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        batch = unified.inputs()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}

    right, found = gradients(False), gradients(True)
    assert right.keys() == found.keys()
    assert all(torch.equal(right[name], found[name]) for name in right)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_by_name_gives_the_same_tokens(unified: Any, cache: str) -> None:
    import torch

    model, batch = unified.load(), unified.inputs()
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**batch, **options, use_cache=False)
    assert torch.equal(model.generate(**batch, **options, cache_implementation=cache), expected)
