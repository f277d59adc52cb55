"""Assisted generation with caches of all origins. Each cache and model: tests/one_device/test_caches.py."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from gemma4_compat.patches.generation.transformers_assisted_cache import PATCH, keep_everything
from tests.conftest import is_affected
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"ValueError: Cannot `crop` a `DynamicSlidingWindowLayer`"
    exact = False  # tokens are compared


def generate(model: Any, **options: Any) -> Any:
    batch = tiny.inputs(model.device, text_only=True)
    return model.generate(**batch, max_new_tokens=10, do_sample=False, **options)


@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_an_assistant_and_prompt_lookup(workspace: Any, variant: str) -> None:
    import torch

    model = tiny.load(
        workspace.cached(tiny_models.build_checkpoint, text_variant=variant), device=workspace.main
    ).float()
    assistant = workspace.load_text().float()
    expected = generate(model)
    assert torch.equal(expected, generate(model, prompt_lookup_num_tokens=2))
    assert torch.equal(expected, generate(model, assistant_model=assistant))


@pytest.mark.skipif(not is_affected(PATCH), reason="sliding layers can be cropped in this release")
def test_a_cache_that_has_forgotten_is_refused_and_unchanged(workspace: Any) -> None:
    import torch
    from transformers import DynamicCache

    model = workspace.load().float()
    ids = tiny.inputs(model.device, text_only=True)["input_ids"]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :12], past_key_values=cache)
    before = [layer.keys.clone() for layer in cache.layers[:4]]
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"holds 12 tokens.*DynamicCache\(\)"):
        generate(model, prompt_lookup_num_tokens=2, past_key_values=cache)
    assert all(torch.equal(old, layer.keys) for old, layer in zip(before, cache.layers))


def test_a_layer_that_has_forgotten_nothing_keeps_what_it_holds() -> None:
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=tiny_configs.config())
    value = torch.randn(1, 1, 5, 32)
    cache.update(value, 2 * value, 0)
    keep_everything(cache)
    keys, values = cache.update(value, value, 0)
    assert not any(cache.is_sliding)
    assert torch.equal(keys, torch.cat([value, value], dim=-2))
    assert torch.equal(values[:, :, :5], 2 * value)


def test_other_caches_are_left_alone() -> None:
    from transformers import DynamicCache, StaticCache

    for cache in (DynamicCache(), StaticCache(config=tiny_configs.config(), max_cache_len=8)):
        layers = list(cache.layers)
        keep_everything(cache)
        assert cache.layers == layers
