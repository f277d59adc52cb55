"""Memory of streamed layers: how many module groups are on the device, and what forwards leave behind."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat._memory.formulas import MEASURED
from gemma4_compat._offload.transfer import streaming
from tests.conftest import census
from tests.patches.offload.streamed_models import (
    INFERENCE,
    QUANTIZATIONS,
    TRAINING,
    adapted,
    bytes_on_device,
    checkpoint,
    groups,
    split,
    trained,
    weights,
)


def test_at_most_two_groups_are_on_the_device_and_one_is_prefetched_for_the_next_token(
    workspace: Any, streamers: list[streaming.LayerStreamer]
) -> None:
    import torch

    model = split(workspace, offload="all layers")
    seen: dict[int, int] = {}

    def look(*_: Any) -> None:
        for index, streamer in enumerate(streamers):
            loaded = [group for group in groups(streamer) if group.on_device]
            assert bytes_on_device(streamer) == streamer.buffer_size * len(loaded)
            seen[index] = max(seen.get(index, 0), len(loaded))

    for module in model.modules():
        module.register_forward_hook(look)
    batch = tiny.inputs(workspace.main)
    with torch.no_grad():
        for _ in range(3):
            model(**batch)
            left = {len(groups(streamer)): [group.on_device for group in groups(streamer)] for streamer in streamers}
            assert left == {2: [False, False], 6: [True, False, False, False, False, False]}
        model.generate(**batch, max_new_tokens=4, do_sample=False)
    assert set(seen.values()) == {2}


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_at_most_two_groups_are_on_the_device_in_a_training_step(
    workspace: Any,
    streamers: list[streaming.LayerStreamer],
    monkeypatch: pytest.MonkeyPatch,
    checkpointing: bool | None,
) -> None:
    """As many as plans count."""
    from accelerate.hooks import AlignDevicesHook

    model = adapted(workspace, split(workspace, offload="all layers"))
    checkpoint(model, checkpointing)
    most = 0
    start_copy = streaming.CopyStream.start_copy

    def counted(self: Any, group: Any, size: int) -> None:
        nonlocal most
        start_copy(self, group, size)
        most = max(most, *(sum(group.on_device for group in groups(streamer)) for streamer in streamers))

    onloaded: list[Any] = []
    pre_forward = AlignDevicesHook.pre_forward

    def noted(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if self.offload:
            onloaded.extend(module.parameters(recurse=False))
        return pre_forward(self, module, *args, **kwargs)

    monkeypatch.setattr(streaming.CopyStream, "start_copy", counted)
    monkeypatch.setattr(AlignDevicesHook, "pre_forward", noted)
    trained(workspace, model, steps=2)
    assert most == MEASURED.slots == 2
    outside = [weight for name, weight in model.named_parameters() if weight.device.type == "meta"]
    outside = [weight for weight in outside if not any(weight is own._meta for own in weights(streamers))]
    assert len(onloaded) <= 4 * len(outside), (
        "accelerate onloaded a weight of a streamed layer by itself, in a recomputation"
    )
    assert sorted(len(groups(streamer)) for streamer in streamers) == [2, 2, 6]
    assert [bytes_on_device(streamer) for streamer in streamers] == [0, 0, 0], "after a backward pass"


@INFERENCE
def test_twenty_forwards_leave_nothing_behind(workspace: Any, quantization: str | None, store: str) -> None:
    import torch

    model = split(workspace, quantization, "all layers", store)
    batch = tiny.inputs(workspace.main)
    with torch.no_grad():
        for _ in range(2):
            model(**batch)
        before = census()
        for _ in range(20):
            model(**batch)
    assert census() == before


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_forwards_leave_no_weights_of_the_disk_in_memory(
    workspace: Any, streamers: list[streaming.LayerStreamer], quantization: str | None
) -> None:
    """Not even those that bitsandbytes repacked for the CPU."""
    import torch

    model = split(workspace, quantization, "all layers", "disk")
    batch = tiny.inputs(workspace.main)
    with torch.no_grad():
        model(**batch)
    kept = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for weight in weights(streamers)
        if weight._parameter is not None
        for tensor in (weight._parameter.data, *vars(weight._parameter).values())
        if isinstance(tensor, torch.Tensor)
    }
    assert sum(kept.values()) <= max(streamer.buffer_size for streamer in streamers)


@TRAINING
def test_training_steps_leave_nothing_behind(workspace: Any, quantization: str | None, store: str) -> None:
    model = adapted(workspace, split(workspace, quantization, "all layers", store))
    batch = tiny.inputs(workspace.main)

    def step(*, backward: bool = True) -> None:
        loss = model(**batch, labels=batch["input_ids"]).loss
        if backward:
            loss.backward()

    for _ in range(2):
        step()
    before = census()
    for _ in range(5):
        step()
    assert census() == before
    for _ in range(3):
        step(backward=False)
    step()
    assert census() == before
