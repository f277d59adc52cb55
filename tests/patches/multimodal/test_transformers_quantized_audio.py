"""F10: a quantized audio tower."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat._lab.scenarios import compare_quantized_tower, features, relative
from gemma4_compat.patches.multimodal.transformers_quantized_audio import BOUND, PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"torch.finfo\(\) requires a floating point input type"
    exact = False


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double", "8bit"])
def test_features_are_those_of_the_same_weights_dequantized(workspace: Any, quantization: str) -> None:
    error, contrast = compare_quantized_tower(workspace, quantization, "audio")
    assert error < BOUND
    assert contrast > 0.5, "a sound and its negative"


def test_what_is_behind_the_padding_mask_is_not_heard(workspace: Any) -> None:
    model = tiny.load(workspace.checkpoint, "8bit", towers=True)
    batch = tiny.inputs()
    batch["input_features_mask"][:, 8:] = False
    heard = features(model, batch, "audio")
    batch["input_features"][:, 8:] = 3.0
    assert relative(features(model, batch, "audio"), heard) == 0.0
    assert len(heard) < len(features(model, tiny.inputs(), "audio"))


def test_an_unquantized_tower_takes_upstreams_own_path(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemma4_compat._gemma4.models import compute_dtype

    monkeypatch.setattr(compute_dtype, "PlainView", None)
    features(tiny.load(workspace.checkpoint), tiny.inputs(), "audio")
