"""What benchmarks/decoding/fused_prompts.py says of two sets of graphs."""

from __future__ import annotations

import types
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from benchmarks.decoding import fused_prompts


class Model:
    """Its fused graphs take half as long, and have other logits from a seed on."""

    def __init__(self, other_from: int) -> None:
        self.other_from = other_from
        self.order: list[tuple[str, int]] = []
        statistics = types.SimpleNamespace(prompts_fused=1, not_fused=())
        self.decodings = {"fused": types.SimpleNamespace(statistics=statistics)}

    def read(self, way: str, _length: int, seed: int) -> tuple[float, Any]:
        self.order.append((way, seed))
        other = way == "fused" and seed >= self.other_from
        return 1.0 if way == "fused" else 2.0, torch.tensor([seed + other])


@pytest.mark.parametrize(("other_from", "equal"), [(1000, True), (101, False)])
def test_ways_take_turns_and_one_difference_is_told(other_from: int, equal: bool) -> None:
    model: Any = Model(other_from)
    found = fused_prompts.measured(model, 64, 3, on_gpu=False)
    assert found["equal"] is equal
    assert (found["captured"]["ms"], found["fused"]["ms"], found["graphs_fused"]) == (2.0, 1.0, 1)
    turns = [way for way, seed in model.order if seed >= 100]
    assert turns == ["captured", "fused", "fused", "captured", "captured", "fused"]
