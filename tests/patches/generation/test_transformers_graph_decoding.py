"""The decoding step as one CUDA graph: the rest is in tests/unit/generation, real graphs in tests/world/gpu."""

from __future__ import annotations

from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = "transformers-graph-decoding"
    original = r"8 tokens with a static cache run the Python of every layer 8 times"
