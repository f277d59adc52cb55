"""Streaming on a GPU: random delays of copies and kernels, memory that must not grow or cannot be pinned."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatWarning
from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from gemma4_compat._offload import host_memory
from gemma4_compat._offload.transfer import module_groups, streaming

FORWARDS = 1000
LONGEST = 400_000  # cycles; about 0.2 ms, longer than any kernel or copy of the tiny checkpoint
QUANTIZATIONS = [None, "4bit", "4bit-double", "8bit"]


def streamed(workspace: Any, quantization: str | None, offloaded: str = "cpu") -> Any:
    """Every layer of the language model and of the towers off the GPU."""
    model = workspace.load(quantization)
    placement = tiny.device_map(model, "both", main=workspace.main, offloaded=offloaded)
    placement |= {name: offloaded for name in placement if ".layers." in name}
    return workspace.dispatch_map(model, placement)


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Sleeps of random length before and after copies, on their stream, and around layers, on the computing one."""
    import torch

    chance = random.Random(0)
    counted = {"copies": 0, "computation": 0}
    copy_from_host, pre_forward, post_forward, begins = (
        module_groups.ModuleGroup.copy_from_host,
        streaming.LayerStreamer.pre_forward,
        streaming.LayerStreamer.post_forward,
        streaming.LayerStreamer._backward_begins,
    )

    def sleep(where: str) -> None:
        if chance.random() < 0.5:
            counted[where] += 1
            torch.cuda._sleep(chance.randrange(LONGEST))

    def slow_copy(self: Any) -> None:
        sleep("copies")  # the current stream is that of the copies
        copy_from_host(self)
        sleep("copies")

    def slow_pre_forward(self: Any, *args: Any) -> None:
        sleep("computation")
        pre_forward(self, *args)
        sleep("computation")

    def slow_post_forward(self: Any, *args: Any) -> None:
        sleep("computation")
        post_forward(self, *args)
        sleep("computation")

    def slow_begins(self: Any, *args: Any) -> None:
        sleep("computation")
        begins(self, *args)
        sleep("computation")

    monkeypatch.setattr(module_groups.ModuleGroup, "copy_from_host", slow_copy)
    monkeypatch.setattr(streaming.LayerStreamer, "pre_forward", slow_pre_forward)
    monkeypatch.setattr(streaming.LayerStreamer, "post_forward", slow_post_forward)
    monkeypatch.setattr(streaming.LayerStreamer, "_backward_begins", slow_begins)
    return counted


def allocated() -> int:
    """Bytes on the GPU; what earlier tests left behind is collected first."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_allocated())


@pytest.mark.parametrize("offloaded", ["cpu", "disk"])
def test_a_thousand_forwards_with_random_delays(
    workspace: Any, delays: dict[str, int], record: Callable[[str, Any], None], offloaded: str
) -> None:
    import torch

    whole, model = workspace.load("4bit-double"), streamed(workspace, "4bit-double", offloaded)
    prompts = [
        {"input_ids": torch.randint(3, 240, (1, 16), device=workspace.main)},
        {"input_ids": torch.randint(3, 240, (4, 40), device=workspace.main)},
        tiny.inputs(workspace.main),
    ]
    with torch.no_grad():
        expected = [whole(**prompt).logits for prompt in prompts]
        for prompt in prompts:
            model(**prompt)
        wrong = torch.zeros((), dtype=torch.long, device=workspace.main)  # read once, at the end: no synchronization
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        for index in range(FORWARDS):
            chosen = index % len(prompts)
            wrong += (model(**prompts[chosen]).logits != expected[chosen]).any()
    assert wrong.item() == 0
    assert allocated() == before
    assert min(delays.values()) > FORWARDS
    record(f"paging stress {offloaded}", {"forwards": FORWARDS, **delays, "peak": torch.cuda.max_memory_allocated()})


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_generate_with_random_delays(workspace: Any, delays: dict[str, int], quantization: str | None) -> None:
    reference = workspace.outputs(workspace.load(quantization))
    model = streamed(workspace, quantization)
    for _ in range(20):
        assert difference(reference, workspace.outputs(model)) == 0.0
    assert min(delays.values()) > 0


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_gradients_with_random_delays(
    workspace: Any, delays: dict[str, int], quantization: str | None, checkpointing: bool
) -> None:
    import torch
    from peft import PeftModel

    batch = tiny.inputs(workspace.main)
    results = []
    for base in (workspace.load(quantization), streamed(workspace, quantization)):
        model = PeftModel.from_pretrained(base, workspace.adapter("language"), is_trainable=True).train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        steps = []
        for step in range(12):
            model.zero_grad()
            model(**batch, labels=batch["input_ids"]).loss.backward()
            steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            if step == 3:
                kept = list(steps)
                steps.clear()
                before = allocated()
            elif step > 3:
                steps.clear()
                assert allocated() <= before
        results.append(kept)
    for whole, split in zip(*results, strict=True):
        assert whole.keys() == split.keys()
        assert [name for name in whole if not torch.equal(whole[name], split[name])] == []
    assert min(delays.values()) > 0


def test_outputs_are_right_while_another_stream_computes(workspace: Any, delays: dict[str, int]) -> None:
    import torch

    batch = tiny.inputs(workspace.main, text_only=True)
    whole, model = workspace.load("4bit"), streamed(workspace, "4bit")
    with torch.no_grad():
        expected = whole(**batch).logits
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        found = []
        for index in range(60):
            with torch.cuda.stream(streams[index % 3]):
                found.append(model(**batch).logits)
        torch.cuda.synchronize()
    assert all(torch.equal(logits, expected) for logits in found)
    assert min(delays.values()) > 0


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_at_most_two_groups_take_memory(workspace: Any, quantization: str | None) -> None:
    import torch

    model = streamed(workspace, quantization)
    batch = tiny.inputs(workspace.main, text_only=True)
    most = 0
    groups: set[Any] = set()
    start_copy = streaming.CopyStream.start_copy

    def counted(self: Any, group: Any, size: int) -> None:
        nonlocal most
        start_copy(self, group, size)
        groups.add(group)
        found = [one._buffer.untyped_storage().nbytes() for one in groups]
        assert {taken for taken in found if taken} == {size}
        most = max(most, sum(found))
        assert sum(found) <= 2 * size

    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(streaming.CopyStream, "start_copy", counted)
        for _ in range(5):
            model(**batch)
    assert len(groups) == 6
    assert most > 0


def test_host_memory_is_pinned(workspace: Any) -> None:
    import torch

    model = streamed(workspace, "4bit")
    with torch.no_grad():
        model(**tiny.inputs(workspace.main))
    layer = model.model.language_model.layers[3]
    kept = layer.mlp.up_proj._hf_hook.weights_map["weight"]
    assert kept.is_pinned()


def test_where_memory_cannot_be_pinned_there_is_one_warning_and_the_same_output(
    workspace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    class Runtime:
        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802
            return 2  # cudaErrorMemoryAllocation

    reference = workspace.outputs(workspace.load("4bit"))
    runtime = Runtime(torch.cuda.cudart())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    host_memory._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = streamed(workspace, "4bit")
        for _ in range(3):
            assert difference(reference, workspace.outputs(model)) == 0.0
    warned = [str(item.message) for item in caught if item.category is Gemma4CompatWarning]
    assert len([text for text in warned if "cannot be pinned" in text]) == 1, warned
    kept = model.model.language_model.layers[3].mlp.up_proj._hf_hook.weights_map["weight"]
    assert not kept.is_pinned()
