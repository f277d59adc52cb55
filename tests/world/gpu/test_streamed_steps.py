"""train_fast on a GPU with streamed layers: the bits of eager steps whatever is late, and the memory comes back."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.modeling_layers")

import gemma4_compat
from gemma4_compat._gemma4.state import checkpointing
from gemma4_compat._offload.transfer import module_groups, streaming
from gemma4_compat._training.captured import layers
from tests.patches.training.parts import only
from tests.unit.training.test_train_fast import adapted
from tests.world.gpu.test_chunked_mlp import DEVICE, deterministic
from tests.world.gpu.test_paging import LONGEST, allocated, delays, streamed
from tests.world.gpu.test_train_fast import replays_have_the_bits, step

__all__ = ["delays", "deterministic"]
pytestmark = pytest.mark.skipif(not checkpointing.is_in_forward(), reason="train_fast beside checkpointing: 5.23")


def made(workspace: Any, quantization: str | None, *, checkpointed: bool = True, offloaded: str = "cpu") -> Any:
    torch.manual_seed(0)
    return adapted(streamed(workspace, quantization, offloaded), checkpointed=checkpointed)


def text(tokens: int = 96) -> dict[str, Any]:
    ids = torch.randint(3, 90, (2, tokens), generator=torch.Generator().manual_seed(tokens)).to(DEVICE)
    return {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": torch.zeros_like(ids),
    }


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("quantization", [None, "4bit", "4bit-double"])
def test_bits(workspace: Any, quantization: str | None, checkpointed: bool) -> None:
    model, given = made(workspace, quantization, checkpointed=checkpointed), text()
    right = step(model, given)
    assert all(one.equal(other) for one, other in zip(right, step(model, given), strict=True))
    only(model, graphs=True)
    replays_have_the_bits(model, given, right)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("offloaded", ["cpu", "disk"])
def test_random_delays(
    workspace: Any, delays: dict[str, int], monkeypatch: pytest.MonkeyPatch, offloaded: str
) -> None:
    """Graphs wait for the copies of their layers, and copies for graphs that still read. Memory does not grow."""
    copy_to = module_groups.ModuleGroup.copy_to

    def slow(self: Any, memory: Any) -> None:
        torch.cuda._sleep(LONGEST)
        copy_to(self, memory)
        torch.cuda._sleep(LONGEST)

    monkeypatch.setattr(module_groups.ModuleGroup, "copy_to", slow)
    model, batches = made(workspace, "4bit-double", offloaded=offloaded), [text(96), text(64)]
    right = [step(model, given) for given in batches]
    only(model, graphs=True)
    for _ in range(layers.CAPTURED_AT + 1):
        for given in batches:
            step(model, given)
    assert gemma4_compat.statistics(model).training.reasons == ()
    model.zero_grad()
    before, counted = allocated(), gemma4_compat.statistics(model).training
    for _ in range(20):
        for given, expected in zip(batches, right, strict=True):
            assert all(one.equal(other) for one, other in zip(expected, step(model, given), strict=True))
    model.zero_grad()
    assert allocated() <= before
    after = gemma4_compat.statistics(model).training
    assert (after.captured, after.eager, after.reasons) == (counted.captured, counted.eager, ())
    assert min(delays.values()) > 0


@pytest.mark.usefixtures("deterministic")
def test_one_buffer_more_until_it_is_undone(workspace: Any) -> None:
    model, given = made(workspace, "4bit"), text()
    right = step(model, given)
    left = []
    for _ in range(2):  # cuBLAS keeps its workspaces of the stream that captures
        only(model, graphs=True)
        replays_have_the_bits(model, given, right)
        model.zero_grad()
        gc.collect()
        left.append(allocated())
        gemma4_compat.train_fast(model, enabled=False)
        left.append(allocated())
    (largest,) = {streamer.buffer_size for streamer in streaming.streamers(model) if streamer.groups()}
    assert left[3] + largest < left[2]
    assert left[3] <= left[1]
