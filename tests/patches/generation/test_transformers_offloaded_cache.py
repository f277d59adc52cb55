"""F24: caches on the host. Answers are compared in tests/world/gpu/test_caches.py; here who waits for whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat.patches.generation.transformers_offloaded_cache import PATCH, prefetch
from tests.conftest import is_affected
from tests.patches.promise import Promise


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"with an offloaded cache, whose copies take long, logits are off by"
    exact = False

    def expects_defect(self) -> bool:
        return is_affected(PATCH) and _cuda()


def test_the_stream_that_fetches_waits_for_those_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"stream of {device}")
    layers = [
        SimpleNamespace(is_initialized=True, device="cuda:0"),
        SimpleNamespace(is_initialized=True, device="cuda:1"),
        SimpleNamespace(is_initialized=True, device="cuda:0"),
        SimpleNamespace(is_initialized=False),  # has no device yet
    ]
    cache = SimpleNamespace(layers=layers, prefetch_stream=SimpleNamespace(wait_stream=done.append))
    prefetch(lambda self, *args: done.append(("original", self, args)), cache, 3, True)
    assert sorted(done[:2]) == ["stream of cuda:0", "stream of cuda:1"]
    assert done[2:] == [("original", cache, (3, True))]
