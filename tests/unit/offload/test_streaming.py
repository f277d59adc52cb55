"""Streaming of plain layers with accelerate's hooks: which group is on the device when, and without memory for it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._offload import torch_internals
from gemma4_compat._offload.transfer import module_groups, streaming
from gemma4_compat._offload.transfer.copy_stream import CopyStream

pytest.importorskip("accelerate", reason="needs accelerate")


def toy(layers: int = 5, *, order: list[int] | None = None) -> Any:
    """A stack of residual blocks, run in ``order``."""
    import torch
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
            self.activation = nn.ReLU()

        def forward(self, x: Any) -> Any:
            return x + self.down(self.activation(self.up(x)))

    class Toy(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.layers = nn.ModuleList(Block() for _ in range(layers))

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for index in range(layers) if order is None else order:
                x = self.layers[index](x)
            return x

    torch.manual_seed(0)
    return Toy().eval()


@pytest.fixture
def dispatched(tmp_path: Path) -> Callable[..., Any]:
    """``dispatched(model, offloaded)``: those layers (default: all) off the device, in host memory or on disk."""
    from accelerate import dispatch_model

    def dispatch(model: Any, offloaded: Any = None, *, on_disk: bool = False, **options: Any) -> Any:
        count = len(model.layers)
        chosen = range(count) if offloaded is None else offloaded
        placement = {f"layers.{index}": "disk" if index in chosen else "cpu" for index in range(count)}
        state = None if on_disk else {name: value.clone() for name, value in model.state_dict().items()}
        dispatch_model(model, {"first": "cpu", **placement}, state_dict=state, offload_dir=str(tmp_path), **options)
        return model

    return dispatch


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Copies to the device and memory freed there, by the group's position in its list."""
    found: list[tuple[str, int]] = []
    positions: dict[int, int] = {}
    kept: list[Any] = []
    start_copy, free, new_group = (
        streaming.CopyStream.start_copy,
        streaming.CopyStream.free,
        streaming.LayerStreamer._new_group,
    )

    def noted_group(self: Any, position: int, layer: Any) -> Any:
        group = new_group(self, position, layer)
        kept.append(group)  # no id is used twice
        positions[id(group)] = position
        return group

    def noted_copy(self: Any, group: Any, size: int) -> None:
        start_copy(self, group, size)
        found.append(("copy", positions[id(group)]))

    def noted_free(self: Any, group: Any) -> None:
        if group.on_device:
            found.append(("free", positions[id(group)]))
        free(self, group)

    monkeypatch.setattr(streaming.LayerStreamer, "_new_group", noted_group)
    monkeypatch.setattr(streaming.CopyStream, "start_copy", noted_copy)
    monkeypatch.setattr(streaming.CopyStream, "free", noted_free)
    return found


def test_memory_is_written_after_what_still_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With deterministic algorithms torch fills memory when it is allocated, on the stream that allocates."""
    from types import SimpleNamespace

    import torch

    done: list[str] = []
    stream = SimpleNamespace(wait_event=lambda event: done.append(f"wait for {event}"))
    fake = SimpleNamespace(
        Stream=lambda _device: stream,
        stream=lambda _stream: contextlib.nullcontext(),
        Event=lambda: SimpleNamespace(record=lambda _stream: done.append("copied")),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    copies = CopyStream(torch.device("cuda", 0))
    copies._computed = {"a stream": "its computations"}
    group = SimpleNamespace(
        allocate=lambda size: done.append(f"allocate {size}"), copy_from_host=lambda: done.append("copy"), copied=None
    )
    copies.start_copy(group, 8)
    assert done == ["wait for its computations", "allocate 8", "copy", "copied"]
    assert group.on_device


def streamer_of(model: Any, *, cyclic: bool = False) -> streaming.LayerStreamer:
    """Like ``install``, but returns the streamer."""
    streaming.uninstall(model)
    layers = [layer for layer in model.layers if any(p.device.type == "meta" for p in layer.parameters())]
    streamer = streaming.LayerStreamer(layers, cyclic=cyclic)
    for layer in layers:
        layer.register_forward_pre_hook(streamer.pre_forward, prepend=True)
        layer.register_forward_hook(streamer.post_forward, always_call=True)
    return streamer


def x() -> Any:
    import torch

    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def on_device(streamer: streaming.LayerStreamer) -> list[int]:
    return [index for index, group in enumerate(streamer._groups) if group is not None and group.on_device]


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("cyclic", [False, True])
def test_the_next_group_is_prefetched_before_the_layer_runs(
    dispatched: Callable[..., Any], events: list[tuple[str, int]], cyclic: bool, on_disk: bool
) -> None:
    import torch

    with torch.no_grad():
        expected = toy(3)(x())
        model = dispatched(toy(3), on_disk=on_disk)
        streamer = streamer_of(model, cyclic=cyclic)
        assert torch.equal(model(x()), expected)
        first = [("copy", 0), ("copy", 1), ("free", 0), ("copy", 2), ("free", 1)]
        assert events == [*first, *([("copy", 0)] if cyclic else []), ("free", 2)]
        assert on_device(streamer) == ([0] if cyclic else [])
        events.clear()
        assert torch.equal(model(x()), expected)
        assert events == [*(first[1:] if cyclic else first), *([("copy", 0)] if cyclic else []), ("free", 2)]


@pytest.mark.parametrize("cyclic", [False, True])
def test_a_backward_pass_begins_with_the_last_group_of_the_forward(
    dispatched: Callable[..., Any], events: list[tuple[str, int]], cyclic: bool
) -> None:
    import torch

    plain, inputs = toy(3), x().requires_grad_()
    expected = plain(inputs)
    (right,) = torch.autograd.grad(expected.sum(), inputs)
    model = dispatched(toy(3).requires_grad_(False))
    streamer = streamer_of(model, cyclic=cyclic)
    for _ in range(2):
        events.clear()
        output = model(inputs)
        assert on_device(streamer) == ([2] if cyclic else [])
        (found,) = torch.autograd.grad(output.sum(), inputs)
        assert torch.equal(output, expected)
        assert torch.equal(found, right)
        copies = [position for what, position in events if what == "copy"]
        assert copies == [0, 1, 2, *(() if cyclic else (2,)), 1, 0]
        assert on_device(streamer) == []
    model(inputs)
    events.clear()
    with torch.no_grad():  # the backward pass never comes
        model(inputs)
    freed = [("free", 2)] if cyclic else []
    assert events[: len(freed) + 2] == [*freed, ("copy", 0), ("copy", 1)]


def test_layers_between_that_are_not_offloaded(dispatched: Callable[..., Any], events: list[tuple[str, int]]) -> None:
    import torch

    with torch.no_grad():
        expected = toy(6)(x())
        model = dispatched(toy(6), (1, 4))
        streamer = streamer_of(model)
        assert torch.equal(model(x()), expected)
    assert events == [("copy", 0), ("copy", 1), ("free", 0), ("free", 1)], "positions among the offloaded ones"
    assert [weight.device.type for weight in model.layers[0].parameters()] == ["cpu"] * 3
    assert on_device(streamer) == []


def test_neighbours_pass_over_layers_that_are_left_to_accelerate() -> None:
    a, b, c = (module_groups.ModuleGroup.__new__(module_groups.ModuleGroup) for _ in range(3))
    streamer = streaming.LayerStreamer([])
    streamer._groups = [None, a, None, b, None, c, None]
    assert [streamer._neighbour(index, 1) for index in (0, 1, 3, 5)] == [a, b, c, None]
    assert [streamer._neighbour(index, -1) for index in (6, 5, 3, 1)] == [c, b, a, None]
    streamer._cyclic = True
    assert [streamer._neighbour(index, 1) for index in (1, 3, 5)] == [b, c, a]
    assert streamer._neighbour(1, -1) is None, "a backward pass is over after the first layer"
    streamer._groups = [None, a]
    assert streamer._neighbour(1, 1) is a


def test_a_group_prefetched_in_vain_is_freed(dispatched: Callable[..., Any], events: list[tuple[str, int]]) -> None:
    import torch

    order = [3, 0, 0, 2, 4, 1]
    with torch.no_grad():
        expected = toy(order=order)(x())
        model = dispatched(toy(order=order))
        streamer = streamer_of(model)
        assert torch.equal(model(x()), expected)
    inside = 0
    for what, _ in events:
        inside += 1 if what == "copy" else -1
        assert inside <= 2
    assert events[:5] == [("copy", 3), ("copy", 4), ("free", 3), ("free", 4), ("copy", 0)]
    assert on_device(streamer) == [2], "layer 2 would have been the next"


def test_without_memory_for_the_next_group_it_is_copied_when_it_is_needed(
    dispatched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    with torch.no_grad():
        expected = toy()(x())
        model = dispatched(toy())
        streamer = streamer_of(model, cyclic=True)
        allocate, refused = module_groups.ModuleGroup.allocate, []

        def scarce(self: Any, size: int) -> None:
            if on_device(streamer):
                refused.append(self)
                raise torch.OutOfMemoryError("a second group")
            allocate(self, size)

        monkeypatch.setattr(module_groups.ModuleGroup, "allocate", scarce)
        for _ in range(3):
            assert torch.equal(model(x()), expected)
        assert len(refused) == 15
        assert on_device(streamer) == []
        monkeypatch.setattr(module_groups.ModuleGroup, "allocate", allocate)
        assert torch.equal(model(x()), expected)
        assert on_device(streamer) == [0]


def test_without_memory_for_the_group_itself_the_error_is_the_users_and_the_next_forward_is_right(
    dispatched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    with torch.no_grad():
        expected = toy()(x())
        model = dispatched(toy())
        streamer_of(model)

        def never(*_: Any) -> None:
            raise torch.OutOfMemoryError("no group")

        with monkeypatch.context() as patched:
            patched.setattr(module_groups.ModuleGroup, "allocate", never)
            with pytest.raises(torch.OutOfMemoryError, match="no group"):
                model(x())
        assert torch.equal(model(x()), expected)


def test_the_backward_pass_goes_the_other_way(dispatched: Callable[..., Any], events: list[tuple[str, int]]) -> None:
    import torch

    gradients = []
    for offloaded in (False, True):
        model = dispatched(toy(4)) if offloaded else toy(4)
        streamer = streamer_of(model)
        given = x().requires_grad_()
        out = model(given)
        events.clear()
        out.square().sum().backward()
        gradients.append(given.grad)
    assert torch.equal(*gradients)
    begins = [("copy", 3), ("copy", 2), ("free", 3), ("copy", 1), ("free", 2), ("copy", 0)]
    assert events == [*begins, ("free", 1), ("free", 0)]
    assert on_device(streamer) == []


def test_groups_keep_their_tensors_and_lose_their_memory(dispatched: Callable[..., Any]) -> None:
    import torch

    model = dispatched(toy(2))
    streamer = streamer_of(model)
    with torch.no_grad():
        model(x())
        group = streamer._groups[0]
        assert group is not None
        views, buffer = group._views, group._buffer
        assert buffer.untyped_storage().nbytes() == 0
        assert {view.untyped_storage().data_ptr() for view in views} == {0}
        model(x())
    assert group._views is views
    assert group._buffer is buffer
    for offset in group._offsets:
        assert offset % module_groups.ALIGNMENT == 0
    assert group.size == sum(-(-source.size // 512) * 512 for source in group._sources)


def test_packed_host_memory_is_what_accelerate_gives_from_then_on(dispatched: Callable[..., Any]) -> None:
    import torch

    expected = {name: value.clone() for name, value in toy(3).state_dict().items()}
    model = dispatched(toy(3))
    streamer = streamer_of(model)
    with torch.no_grad():
        model(x())
    for index, group in enumerate(streamer._groups):
        assert group is not None
        module = model.layers[index].up
        kept = module._hf_hook.weights_map["weight"]
        assert kept.untyped_storage().data_ptr() == group._host_buffer.untyped_storage().data_ptr()
        assert torch.equal(kept, expected[f"layers.{index}.up.weight"])
        kept.mul_(2)  # one memory: the next forward sees it
    changed = toy(3)
    with torch.no_grad():
        for layer in changed.layers:
            layer.up.weight.mul_(2)
        assert torch.equal(model(x()), changed(x()))


@pytest.mark.parametrize(
    "change",
    ["tied", "buffers", "other device", "no hook of its own"],
)
def test_layers_that_are_left_to_accelerate(dispatched: Callable[..., Any], change: str) -> None:
    import torch

    with torch.no_grad():
        expected = toy(3)(x())
        model = dispatched(toy(3))
        hook = model.layers[1].up._hf_hook
        if change == "tied":
            hook.tied_params_names.add("weight")
            hook.tied_params_map = {}
        elif change == "buffers":
            hook.offload_buffers = True
        elif change == "other device":
            hook.execution_device = "meta"
        else:
            from accelerate.hooks import remove_hook_from_module

            remove_hook_from_module(model.layers[1])
        streamer = streamer_of(model)
        if change == "other device":
            assert module_groups.ModuleGroup.from_layer(model.layers[1]) is None
            return
        assert torch.equal(model(x()), expected)
    assert [group is None for group in streamer._groups] == [False, True, False]


@pytest.mark.parametrize("when", ["before the first forward", "between two"])
def test_a_forward_that_somebody_put_around_accelerates_runs_and_its_layer_is_left_to_accelerate(
    dispatched: Callable[..., Any], when: str
) -> None:
    import torch

    with torch.no_grad():
        expected = toy(3)(x())
        model = dispatched(toy(3))
        streamer = streamer_of(model)
        if when == "between two":
            assert torch.equal(model(x()), expected)
        seen = []
        parts = model.layers[1].up, model.layers[2].activation, model.layers[2]  # two without weights of their own
        for part in parts:
            forward = part.forward

            def spy(*args: Any, part: Any = part, forward: Any = forward) -> Any:
                seen.append(part)
                return forward(*args)

            part.forward = spy
        for _ in range(2):
            assert torch.equal(model(x()), expected)
    assert seen == [parts[0], parts[2], parts[1]] * 2
    assert [group is None for group in streamer._groups] == [False, True, False]


def test_install_says_how_many_and_uninstall_leaves_no_hooks(dispatched: Callable[..., Any]) -> None:
    model = dispatched(toy(4), (0, 2, 3))
    for _ in range(2):
        assert streaming.install(model) == 3
        assert [len(layer._forward_hooks) for layer in model.layers] == [1, 0, 1, 1]
        assert [len(layer._forward_pre_hooks) for layer in model.layers] == [1, 0, 1, 1]
    streaming.uninstall(model)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)
    assert streaming.install(toy(2)) == 0


def test_a_deleted_model_is_gone_after_one_collection(dispatched: Callable[..., Any]) -> None:
    import torch

    model = dispatched(toy())
    assert streaming.install(model) == 5
    with torch.no_grad():
        model(torch.ones(1, 8))
    gone = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert {reference() for reference in gone} == {None}


def test_a_list_inside_a_streamed_layer_has_no_groups_of_its_own(dispatched: Callable[..., Any]) -> None:
    import torch
    from torch import nn

    class Outer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))

        def forward(self, x: Any) -> Any:
            for layer in self.inner:
                x = layer(x)
            return x

    model = toy(2)
    model.layers = nn.ModuleList(Outer() for _ in range(2))
    with torch.no_grad():
        expected = model(x())
        dispatched(model)
        assert streaming.install(model) == 2
        assert torch.equal(model(x()), expected)


def test_whether_a_backward_pass_is_running() -> None:
    import torch

    seen = []
    value = torch.ones(1, requires_grad=True)
    doubled = value * 2
    doubled.register_hook(lambda _gradient: seen.append(torch_internals.graph_task() != -1))
    assert torch_internals.graph_task() == -1
    doubled.backward()
    assert seen == [True]
    assert torch_internals.graph_task() == -1
