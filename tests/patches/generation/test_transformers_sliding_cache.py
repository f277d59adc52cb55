"""What the cache of a model without KV-shared layers holds after a long context."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from gemma4_compat.patches.generation.transformers_sliding_cache import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"hold 2\d\d tokens each"
    exact = False  # bytes are measured


@pytest.fixture(scope="module")
def model(workspace: Any) -> Any:
    return tiny.load(workspace.cached(tiny_models.build_checkpoint, text_variant="31B"), device=workspace.main).float()


def test_what_each_layer_holds(model: Any) -> None:
    import torch

    prompt = torch.randint(3, 240, (1, 60), generator=torch.Generator().manual_seed(0)).to(model.device)
    cache = None
    with torch.no_grad():
        whole = model(prompt, use_cache=False).logits
        for begin, end in ((0, 40), (40, 41), (41, 60)):
            out = model(prompt[:, begin:end], past_key_values=cache)
            cache = out.past_key_values
            assert torch.allclose(out.logits, whole[:, begin:end], atol=1e-4)
    kinds = model.config.get_text_config().layer_types
    assert [layer.keys.shape[-2] for layer in cache.layers] == [7 if kind[0] == "s" else 60 for kind in kinds]
    assert cache.get_seq_length() == 60


def test_the_cache_can_be_copied_and_pickled(model: Any) -> None:
    import torch

    with torch.no_grad():
        cache = model(torch.arange(3, 23, device=model.device)[None]).past_key_values
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert [layer.keys.shape for layer in other.layers] == [layer.keys.shape for layer in cache.layers]


def test_a_cache_without_a_configuration_is_as_it_was() -> None:
    from transformers import DynamicCache, LlamaConfig

    assert DynamicCache().layers == []
    assert DynamicCache(config=LlamaConfig(num_hidden_layers=3)).is_sliding == [False] * 3
    assert DynamicCache(config=tiny_configs.config()).is_sliding[:4] == [True, True, False, True]
