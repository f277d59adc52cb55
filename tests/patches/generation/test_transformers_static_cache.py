"""Static caches on the models that have no KV-shared layers. Each cache and model: tests/one_device/test_caches.py."""

from __future__ import annotations

from gemma4_compat.patches.generation.transformers_static_cache import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"IndexError: list index out of range"
    exact = False  # tokens are compared: the logits differ by rounding, see tests/one_device/test_caches.py


def test_another_model_without_shared_layers_and_one_that_has_never_heard_of_them() -> None:
    from transformers import LlamaConfig, StaticCache
    from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig

    shape = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": [32] * 4, "num_kv_shared_layers": 0}
    types = ["sliding_attention", "full_attention"] * 2
    cache = StaticCache(Gemma3nTextConfig(**shape, layer_types=types), max_cache_len=2048)
    assert cache.is_sliding == [True, False, True, False]
    assert len(StaticCache(config=LlamaConfig(num_hidden_layers=3), max_cache_len=8).layers) == 3


def test_a_model_with_shared_layers() -> None:
    from transformers import StaticCache

    from gemma4_compat._lab import tiny_configs

    cache = StaticCache(config=tiny_configs.config(), max_cache_len=8)
    assert cache.is_sliding[:4] == [True, True, False, True]  # some releases have placeholders for the shared ones
