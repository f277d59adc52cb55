"""Stops read one step late: the rest is in tests/unit/generation/test_deferred_stop.py."""

from __future__ import annotations

from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = "transformers-deferred-stop"
    original = r"16 tokens that are decoded by replay: the host waits for 16 of them"
