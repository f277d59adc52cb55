"""Paging on plain layers with accelerate's hooks: which page is on the device when, and what happens without room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._offload import streaming

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
    """What went to the device and away from it, by the page's position in its list."""
    found: list[tuple[str, int]] = []
    positions: dict[int, int] = {}
    kept: list[Any] = []
    load, free, new_page = streaming._Device.load, streaming._Device.free, streaming.Pager._new_page

    def noted_page(self: Any, position: int, layer: Any) -> Any:
        page = new_page(self, position, layer)
        kept.append(page)  # no id is used twice
        positions[id(page)] = position
        return page

    def noted_load(self: Any, page: Any, size: int) -> None:
        load(self, page, size)
        found.append(("load", positions[id(page)]))

    def noted_free(self: Any, page: Any) -> None:
        if page.loaded:
            found.append(("free", positions[id(page)]))
        free(self, page)

    monkeypatch.setattr(streaming.Pager, "_new_page", noted_page)
    monkeypatch.setattr(streaming._Device, "load", noted_load)
    monkeypatch.setattr(streaming._Device, "free", noted_free)
    return found


def pager_of(model: Any, *, again: bool = False) -> streaming.Pager:
    """Like ``install``, with a hand on the pager."""
    streaming.uninstall(model)
    layers = [layer for layer in model.layers if any(p.device.type == "meta" for p in layer.parameters())]
    pager = streaming.Pager(layers, again=again)
    for layer in layers:
        layer.register_forward_pre_hook(pager.enter, prepend=True)
        layer.register_forward_hook(pager.leave, always_call=True)
    return pager


def x() -> Any:
    import torch

    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def loaded(pager: streaming.Pager) -> list[int]:
    return [index for index, page in enumerate(pager._pages) if page is not None and page.loaded]


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_the_next_page_is_fetched_before_the_layer_runs(
    dispatched: Callable[..., Any], events: list[tuple[str, int]], again: bool, on_disk: bool
) -> None:
    import torch

    with torch.no_grad():
        expected = toy(3)(x())
        model = dispatched(toy(3), on_disk=on_disk)
        pager = pager_of(model, again=again)
        assert torch.equal(model(x()), expected)
        first = [("load", 0), ("load", 1), ("free", 0), ("load", 2), ("free", 1)]
        assert events == [*first, *([("load", 0)] if again else []), ("free", 2)]
        assert loaded(pager) == ([0] if again else [])
        events.clear()
        assert torch.equal(model(x()), expected)
        assert events == [*(first[1:] if again else first), *([("load", 0)] if again else []), ("free", 2)]


def test_layers_between_that_are_not_offloaded(dispatched: Callable[..., Any], events: list[tuple[str, int]]) -> None:
    import torch

    with torch.no_grad():
        expected = toy(6)(x())
        model = dispatched(toy(6), (1, 4))
        pager = pager_of(model)
        assert torch.equal(model(x()), expected)
    assert events == [("load", 0), ("load", 1), ("free", 0), ("free", 1)], "positions among the offloaded ones"
    assert [weight.device.type for weight in model.layers[0].parameters()] == ["cpu"] * 3
    assert loaded(pager) == []


def test_neighbours_pass_over_layers_that_are_left_to_accelerate() -> None:
    a, b, c = (streaming.Page.__new__(streaming.Page) for _ in range(3))
    pager = streaming.Pager([])
    pager._pages = [None, a, None, b, None, c, None]
    assert [pager._neighbour(index, 1) for index in (0, 1, 3, 5)] == [a, b, c, None]
    assert [pager._neighbour(index, -1) for index in (6, 5, 3, 1)] == [c, b, a, None]
    pager._again = True
    assert [pager._neighbour(index, 1) for index in (1, 3, 5)] == [b, c, a]
    assert pager._neighbour(1, -1) is None, "a backward pass is over after the first layer"
    pager._pages = [None, a]
    assert pager._neighbour(1, 1) is a


def test_a_page_fetched_in_vain_is_given_back(dispatched: Callable[..., Any], events: list[tuple[str, int]]) -> None:
    import torch

    order = [3, 0, 0, 2, 4, 1]
    with torch.no_grad():
        expected = toy(order=order)(x())
        model = dispatched(toy(order=order))
        pager = pager_of(model)
        assert torch.equal(model(x()), expected)
    inside = 0
    for what, _ in events:
        inside += 1 if what == "load" else -1
        assert inside <= 2
    assert events[:5] == [("load", 3), ("load", 4), ("free", 3), ("free", 4), ("load", 0)]
    assert loaded(pager) == [2], "layer 2 would have been the next"


def test_without_memory_for_the_next_page_it_is_fetched_when_it_is_needed(
    dispatched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    with torch.no_grad():
        expected = toy()(x())
        model = dispatched(toy())
        pager = pager_of(model, again=True)
        allocate, refused = streaming.Page.allocate, []

        def scarce(self: Any, size: int) -> None:
            if loaded(pager):
                refused.append(self)
                raise torch.OutOfMemoryError("a second page")
            allocate(self, size)

        monkeypatch.setattr(streaming.Page, "allocate", scarce)
        for _ in range(3):
            assert torch.equal(model(x()), expected)
        assert len(refused) == 15
        assert loaded(pager) == []
        monkeypatch.setattr(streaming.Page, "allocate", allocate)
        assert torch.equal(model(x()), expected)
        assert loaded(pager) == [0]


def test_without_memory_for_the_page_itself_the_error_is_the_users_and_the_next_forward_is_right(
    dispatched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    with torch.no_grad():
        expected = toy()(x())
        model = dispatched(toy())
        pager_of(model)

        def never(*_: Any) -> None:
            raise torch.OutOfMemoryError("no page")

        with monkeypatch.context() as patched:
            patched.setattr(streaming.Page, "allocate", never)
            with pytest.raises(torch.OutOfMemoryError, match="no page"):
                model(x())
        assert torch.equal(model(x()), expected)


def test_the_backward_pass_goes_the_other_way(dispatched: Callable[..., Any], events: list[tuple[str, int]]) -> None:
    import torch

    gradients = []
    for offloaded in (False, True):
        model = dispatched(toy(4)) if offloaded else toy(4)
        pager = pager_of(model)
        given = x().requires_grad_()
        out = model(given)
        events.clear()
        out.square().sum().backward()
        gradients.append(given.grad)
    assert torch.equal(*gradients)
    begins = [("load", 3), ("load", 2), ("load", 1), ("free", 3), ("load", 0), ("free", 2)]
    assert events == [*begins, ("free", 0), ("free", 1)]
    assert loaded(pager) == []


def test_pages_keep_their_tensors_and_lose_their_memory(dispatched: Callable[..., Any]) -> None:
    import torch

    model = dispatched(toy(2))
    pager = pager_of(model)
    with torch.no_grad():
        model(x())
        page = pager._pages[0]
        assert page is not None
        views, buffer = page._views, page._buffer
        assert buffer.untyped_storage().nbytes() == 0
        assert {view.untyped_storage().data_ptr() for view in views} == {0}
        model(x())
    assert page._views is views
    assert page._buffer is buffer
    for offset in page._offsets:
        assert offset % streaming._ALIGNMENT == 0
    assert page.size == sum(-(-t.numel() * t.element_size() // 512) * 512 for t in page._sources)


def test_packed_host_memory_is_what_accelerate_gives_from_then_on(dispatched: Callable[..., Any]) -> None:
    import torch

    expected = {name: value.clone() for name, value in toy(3).state_dict().items()}
    model = dispatched(toy(3))
    pager = pager_of(model)
    with torch.no_grad():
        model(x())
    for index, page in enumerate(pager._pages):
        assert page is not None
        module = model.layers[index].up
        kept = module._hf_hook.weights_map["weight"]
        assert kept.untyped_storage().data_ptr() == page._host.untyped_storage().data_ptr()
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
        pager = pager_of(model)
        if change == "other device":
            assert streaming.Page.of(model.layers[1]) is None
            return
        assert torch.equal(model(x()), expected)
    assert [page is None for page in pager._pages] == [False, True, False]


@pytest.mark.parametrize("when", ["before the first forward", "between two"])
def test_a_forward_that_somebody_put_around_accelerates_runs_and_its_layer_is_left_to_accelerate(
    dispatched: Callable[..., Any], when: str
) -> None:
    import torch

    with torch.no_grad():
        expected = toy(3)(x())
        model = dispatched(toy(3))
        pager = pager_of(model)
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
    assert [page is None for page in pager._pages] == [False, True, False]


def test_install_says_how_many_and_uninstall_leaves_no_hooks(dispatched: Callable[..., Any]) -> None:
    model = dispatched(toy(4), (0, 2, 3))
    for _ in range(2):
        assert streaming.install(model) == 3
        assert [len(layer._forward_hooks) for layer in model.layers] == [1, 0, 1, 1]
        assert [len(layer._forward_pre_hooks) for layer in model.layers] == [1, 0, 1, 1]
    streaming.uninstall(model)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)
    assert streaming.install(toy(2)) == 0


def test_a_list_inside_a_paged_layer_has_no_pages_of_its_own(dispatched: Callable[..., Any]) -> None:
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


def test_tensors_of_an_output() -> None:
    import torch

    a, b, c = (torch.zeros(1) for _ in range(3))
    assert list(streaming._tensors((a, None, {"x": b, "y": [c, "text"]}))) == [a, b, c]
    assert list(streaming._tensors(None)) == []


def test_whether_a_backward_pass_is_running() -> None:
    import torch

    seen = []
    value = torch.ones(1, requires_grad=True)
    doubled = value * 2
    doubled.register_hook(lambda _gradient: seen.append(streaming._in_backward()))
    assert not streaming._in_backward()
    doubled.backward()
    assert seen == [True]
    assert not streaming._in_backward()
