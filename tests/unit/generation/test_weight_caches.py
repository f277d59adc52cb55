"""Replay where a library keeps a module's weights in a cache of its own, as compressed-tensors does."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

import gemma4_compat
from tests.unit.generation.calls import Models, assert_equal, generate, steps, text


class Cache(MutableMapping[str, Any]):
    """``compressed_tensors.offload.cache.OffloadCache``: gives weights on one device, and holds them on another."""

    onload_device = torch.device("cpu")

    def __init__(self, values: dict[str, Any], offload_device: str) -> None:
        self.offloaded_values, self.offload_device = values, torch.device(offload_device)

    def __getitem__(self, name: str) -> Any:
        return self.offloaded_values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.offloaded_values[name] = value

    def __delitem__(self, name: str) -> None:
        del self.offloaded_values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.offloaded_values)

    def __len__(self) -> int:
        return len(self.offloaded_values)


def cached(model: Any, offload_device: str = "cpu") -> Any:
    """With all weights in caches that hold them there."""
    for module in model.modules():
        for kind in ("_parameters", "_buffers"):
            vars(module)[kind] = Cache(vars(module)[kind], offload_device)
    return model


def test_steps_are_replayed(models: Models, tapes: Any) -> None:
    plain, model = models.fresh(None), gemma4_compat.decode_fast(cached(models.fresh(None)), exact=True)
    for _ in range(2):
        assert_equal(generate(model, text(model)), generate(plain, text(plain)))
    assert steps(model).replayed
    assert steps(model).reasons == ()
    for one in (model, plain):
        norm = one.get_decoder().layers[0].input_layernorm
        norm.weight = torch.nn.Parameter(norm.weight.detach() * 2, requires_grad=False)
    assert_equal(generate(model, text(model)), generate(plain, text(plain)))


def test_weights_that_are_copied_for_every_token(models: Models, tapes: Any) -> None:
    plain, model = models.fresh(None), gemma4_compat.decode_fast(cached(models.fresh(None), "meta"), exact=True)
    for _ in range(2):
        assert_equal(generate(model, text(model)), generate(plain, text(plain)))
    assert not steps(model).replayed
    (reason,) = steps(model).reasons
    assert reason.endswith(" come out of a Cache for every token")
