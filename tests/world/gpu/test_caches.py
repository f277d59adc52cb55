"""Caches that need a GPU: kept on the host between layers (docs/CACHES.md), and compiled.

The oracle is the default cache on the GPU: its tokens, and its logits but for rounding. Copies are delayed at random
on their own stream, so that a layer read before they are done would show.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.one_device.test_caches import MODELS, Models, assert_same, generate, prompt, second_turn
from tests.world.gpu.conftest import run

OFFLOADED = {
    "offloaded": {"cache_implementation": "offloaded"},
    "offloaded_static": {"cache_implementation": "offloaded_static", "disable_compile": True},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.fixture(scope="module")
def models(workspace: Any) -> Models:
    return Models(workspace)


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copies to and from the host take up to 10 million cycles longer; which there were."""
    import torch
    from transformers.cache_utils import CacheLayerMixin

    seen: list[str] = []
    choose = random.Random(0)

    def delayed(name: str, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def copy(layer: Any) -> None:
            seen.append(name)
            torch.cuda._sleep(choose.randrange(10_000_000))
            original(layer)

        return copy

    for name in ("offload", "prefetch"):
        monkeypatch.setattr(CacheLayerMixin, name, delayed(name, getattr(CacheLayerMixin, name)))
    return seen


@pytest.mark.parametrize("split", [False, True], ids=["one device", "split"])
@pytest.mark.parametrize("kind", OFFLOADED)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_answers(models: Models, delays: list[str], name: str, kind: str, split: bool) -> None:
    model = models(name, split)
    batches = ["long", "padded"] + (["image"] if not name.endswith("text") else [])
    for way in batches:
        expected = generate(models(name), prompt(models(name), way))
        assert_same(expected, generate(model, prompt(models(name), way), **OFFLOADED[kind]))
    assert bool(delays) == kind.startswith("offloaded")


@pytest.mark.parametrize("name", MODELS)
def test_a_second_turn(models: Models, delays: list[str], name: str) -> None:
    model = models(name)
    expected = second_turn(model, generate(model, prompt(model, "long")))
    first = generate(model, prompt(model, "long"), **OFFLOADED["offloaded"])
    assert_same(expected, second_turn(model, first, past_key_values=first.past_key_values))
    assert delays


def test_a_static_cache_that_upstream_compiles(tmp_path: Any, record: Callable[[str, Any], None]) -> None:
    """On a GPU `generate` compiles a model with a static cache by itself; with the shim as without."""
    run("scenarios", "tiny", str(tmp_path), shim=False)
    without, repaired = (run("scenarios", "compiled", str(tmp_path), shim=shim) for shim in (False, True))
    record("tiny, compiled static cache", {"without": without, "with": repaired})
    assert repaired["error"] is None, repaired
    assert repaired["same_tokens"]
    assert without["error"] is not None or without["same_tokens"]
