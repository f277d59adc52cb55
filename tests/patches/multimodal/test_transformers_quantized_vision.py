"""F9: a quantized vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat._lab.scenarios import compare_quantized_tower, features, relative
from gemma4_compat.patches.multimodal.transformers_quantized_vision import BOUND, PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"have the same features"
    exact = False


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double", "8bit"])
def test_features_are_those_of_the_same_weights_dequantized(workspace: Any, quantization: str) -> None:
    error, contrast = compare_quantized_tower(workspace, quantization, "vision")
    assert error < BOUND
    assert contrast > 1, "an image and its negative"


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_an_offloaded_tower_sees_what_it_sees_on_one_device(workspace: Any, tmp_path: Path, quantization: str) -> None:
    batch = tiny.inputs()
    model = tiny.load(workspace.checkpoint, quantization, towers=True)
    expected = features(model, batch, "vision")
    placement = tiny.device_map(model, "towers", main="cpu", offloaded="disk")
    split = tiny.dispatch(model, placement, tmp_path)
    for _ in range(2):
        assert relative(features(split, batch, "vision"), expected) == 0.0


def test_an_adapter_on_the_first_layer_of_the_tower(workspace: Any) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    batch = tiny.inputs()
    model = tiny.load(workspace.checkpoint, "4bit", towers=True)
    expected = features(model, batch, "vision")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=r".*patch_embedder\.input_proj"))
    assert relative(features(adapted.base_model.model, batch, "vision"), expected) == 0.0
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    assert relative(features(adapted.base_model.model, batch, "vision"), expected) > 0.01


def test_it_compiles(workspace: Any) -> None:
    import torch

    torch.compiler.reset()
    model = tiny.load(workspace.checkpoint, "8bit", towers=True)
    batch = tiny.inputs()
    expected = features(model, batch, "vision")
    embedder = model.model.vision_tower.patch_embedder
    embedder.forward = torch.compile(embedder.forward, backend="eager")
    assert relative(features(model, batch, "vision"), expected) < 1e-6
