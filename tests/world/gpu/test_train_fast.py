"""train_fast on a GPU: replayed layers have the bits of layers without a graph, and the memory comes back."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.modeling_layers")

import gemma4_compat
from gemma4_compat._gemma4.attention import products, windows
from gemma4_compat._gemma4.state import checkpointing
from gemma4_compat._training.captured import layers
from tests.patches.training.parts import only
from tests.unit.training.test_train_fast import spied
from tests.world.gpu.test_chunked_mlp import DEVICE, adapted, deterministic

__all__ = ["deterministic"]
pytestmark = pytest.mark.skipif(not checkpointing.is_in_forward(), reason="train_fast beside checkpointing: 5.23")


def step(model: Any, given: dict[str, Any]) -> list[Any]:
    model.zero_grad()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = model(**given, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]


def replays_have_the_bits(model: Any, given: dict[str, Any], right: list[Any]) -> None:
    for _ in range(layers.CAPTURED_AT + 2):
        assert all(one.equal(other) for one, other in zip(right, step(model, given), strict=True))
    counted = gemma4_compat.statistics(model).training
    assert counted.captured == len(layers.decoder_layers(model))
    assert counted.reasons == ()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits(dtype: Any) -> None:
    model = adapted(dtype).train()
    ids = torch.randint(3, 1024, (2, 256), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    given = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    right = step(model, given)
    assert all(one.equal(other) for one, other in zip(right, step(model, given), strict=True))
    left = []
    for _ in range(2):  # cuBLAS keeps its workspaces of the stream that captures
        only(model, graphs=True)
        replays_have_the_bits(model, given, right)
        gc.collect()
        left.append(torch.cuda.memory_allocated())
        gemma4_compat.train_fast(model, enabled=False)
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert left[3] < left[2]
    assert left[3] <= left[1]


def test_a_loop_that_keeps_its_loss() -> None:
    """It keeps the weights' gradient accumulators, which are on the stream of the step before."""
    model = only(adapted(torch.bfloat16).train(), graphs=True)
    ids = torch.randint(3, 1024, (2, 256), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    losses = []
    for _ in range(layers.CAPTURED_AT + 2):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
    counted = gemma4_compat.statistics(model).training
    assert counted.reasons == ()
    assert counted.captured == len(layers.decoder_layers(model))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("padding", [0, 500])
def test_bits_of_windows_and_products(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for module, name in ((windows, "_by_windows"), (products, "attention")):
        monkeypatch.setattr(module, name, spied(ran, name, getattr(module, name)))
    model = only(adapted(torch.bfloat16).train(), windows=True, products=True)
    ids = torch.randint(3, 1024, (1, windows.LEAST_ON_GPU), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    given = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    right = step(model, given)
    assert all(one.equal(other) for one, other in zip(right, step(model, given), strict=True))
    assert set(ran) == {"_by_windows", "attention"}
    only(model, graphs=True, windows=True, products=True, max_tokens=ids.numel())
    replays_have_the_bits(model, given, right)
