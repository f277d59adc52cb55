"""Which configurations are a Gemma 4's, and which are made of its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat._gemma4.models import family

KINDS = ["sliding_attention", "full_attention"]


class Layers(list[Any]):
    """Per-layer settings, one for each layer."""


def text(wide: int | None, *, by_layer: bool, **fields: Any) -> SimpleNamespace:
    if by_layer:  # such a configuration refuses to say one width for all
        layers = Layers(SimpleNamespace(head_dim=width) for width in (256, wide or 256))
        return SimpleNamespace(layer_types=KINDS, per_layer_config=layers, **fields)
    return SimpleNamespace(layer_types=KINDS, head_dim=256, global_head_dim=wide, **fields)


@pytest.mark.parametrize("by_layer", [False, True])
def test_wide_heads_are_a_part_of_gemma_4(by_layer: bool) -> None:
    assert family.has_parts_config(text(512, by_layer=by_layer))
    assert family.has_parts_config(SimpleNamespace(text_config=text(512, by_layer=by_layer)))
    assert not family.has_parts_config(text(None, by_layer=by_layer))
    assert not family.is_gemma4_config(text(512, by_layer=by_layer, model_type="diffusion_gemma_text"))


def test_a_tower_is_a_part_of_gemma_4() -> None:
    tower = SimpleNamespace(model_type="gemma4_vision")
    other = SimpleNamespace(model_type="embedding_gemma2", vision_config=tower, audio_config=None)
    assert family.has_parts_config(other)
    assert not family.is_gemma4_config(other)
    assert not family.has_parts_config(SimpleNamespace(model_type="gemma3", vision_config=SimpleNamespace()))


def test_a_model_without_a_configuration_has_none() -> None:
    assert not family.has_parts(object())
    assert family.has_parts(SimpleNamespace(config=SimpleNamespace(model_type="gemma4_text")))
