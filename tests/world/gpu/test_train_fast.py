"""train_fast on a GPU: replayed layers have the bits of layers without a graph, and the memory comes back."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
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


def is_near(found: list[Any], left_out: list[Any]) -> bool:
    """Whether steps agree of which one leaves out what masks hide, and one adds up zeros there, for its graph."""
    apart = sum(float((one - other).norm()) ** 2 for one, other in zip(found, left_out, strict=True))
    return apart <= 0.1**2 * sum(float(other.norm()) ** 2 for other in left_out)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_layers_have_the_bits(dtype: Any) -> None:
    """While kernels are being compiled, and afterwards."""
    model = adapted(dtype).train()
    ids = torch.randint(3, 1024, (2, 256), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    given = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    right = step(model, given)
    only(model, graphs=True)
    counted = gemma4_compat.statistics(model).training
    for _ in range(300):
        assert all(one.equal(other) for one, other in zip(right, step(model, given), strict=True))
        counted = gemma4_compat.statistics(model).training
        if counted.captured and counted.fused == 2 * counted.captured:
            break
        time.sleep(0.1)
    assert counted.not_fused == ()
    assert counted.fused == 2 * counted.captured > 0
    assert all(one.equal(other) for one, other in zip(right, step(model, given), strict=True))


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
@pytest.mark.parametrize("used", ["_by_windows", "attention"])
def test_bits_of_windows_or_products(padding: int, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for module, name in ((windows, "_by_windows"), (products, "attention")):
        monkeypatch.setattr(module, name, spied(ran, name, getattr(module, name)))
    parts = {"windows": True, "products": used == "attention"}
    model = only(adapted(torch.bfloat16).train(), **parts)
    ids = torch.randint(3, 1024, (1, windows.LEAST_ON_GPU), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    given = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    right = step(model, given)
    assert all(one.equal(other) for one, other in zip(right, step(model, given), strict=True))
    assert set(ran) == {used}
    only(model, graphs=True, max_tokens=ids.numel(), **parts)
    if padding and used == "attention":
        left_out, right = right, step(model, given)
        assert is_near(right, left_out)
    replays_have_the_bits(model, given, right)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("padding", [0, 500])
def test_packed_texts_share_a_graph(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph captured with some texts has the bits of a step without one for others, and there is no large mask."""
    ran: list[str] = []
    for module, name in ((windows, "_by_windows"), (products, "attention")):
        monkeypatch.setattr(module, name, spied(ran, name, getattr(module, name)))
    model, tokens = adapted(torch.bfloat16).train(), windows.LEAST_ON_GPU
    batches = [packed_batch(lengths, padding) for lengths in ((1000, 96, 3000), (2048, 2048), (64,) * 64)]
    only(model, windows=True, products=True)
    left_out = [step(model, given) for given in batches]
    only(model, graphs=True, windows=True, products=True, max_tokens=tokens)
    shapes = packed_masks(model, lambda: step(model, batches[0]))
    assert shapes == {(torch.int32, (1, 2, 1, tokens))}
    assert set(ran) == {"attention"}
    right = [step(model, given) for given in batches]
    assert all(map(is_near, right, left_out))
    replays_have_the_bits(model, batches[0], right[0])
    before = gemma4_compat.statistics(model).training
    for given, expected in zip(batches, right, strict=True):
        assert all(one.equal(other) for one, other in zip(expected, step(model, given), strict=True))
    after = gemma4_compat.statistics(model).training
    assert (after.captured, after.eager) == (before.captured, before.eager)
    assert after.reasons == ()


def packed_batch(lengths: Sequence[int], padding: int) -> dict[str, Any]:
    """One row of these texts, the last of which ends with so much padding."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = torch.randint(3, 1024, positions.shape, generator=torch.Generator().manual_seed(len(lengths)))
    mask = torch.ones_like(ids)
    mask[:, ids.shape[1] - padding :] = 0
    labels = ids.masked_fill((positions == 0) | (mask == 0), -100)
    given = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "labels": labels}
    return {name: one.to(DEVICE) for name, one in given.items()}


def packed_masks(model: Any, run: Callable[[], Any]) -> set[Any]:
    """Dtype and shape of the masks that layers get."""
    seen: set[Any] = set()

    def note(_layer: Any, _given: Any, named: dict[str, Any]) -> None:
        seen.add((named["attention_mask"].dtype, tuple(named["attention_mask"].shape)))

    hooks = [one.register_forward_pre_hook(note, with_kwargs=True) for one in layers.decoder_layers(model)]
    run()
    for hook in hooks:
        hook.remove()
    return seen
