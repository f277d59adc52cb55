"""Static caches that are filled in chunks. Each cache and model: tests/one_device/test_caches.py."""

from __future__ import annotations

from gemma4_compat.patches.generation.transformers_static_chunks import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"same slice shapes|AmbiguousGlobalPerLayerAttributeError: 'head_dim'"
    exact = False  # tokens are compared
