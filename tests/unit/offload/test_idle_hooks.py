"""accelerate's hooks that have nothing to do are bypassed in a forward, and in their place after it."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._offload.transfer import idle_hooks

pytest.importorskip("accelerate", reason="needs accelerate")


def dispatched(folder: Path) -> Any:
    """Three linears, the last one offloaded."""
    import torch
    from accelerate import dispatch_model

    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).eval()
    return dispatch_model(module, {"0": "cpu", "1": "cpu", "2": "disk"}, offload_dir=str(folder))


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return dispatched(tmp_path)


def is_bypassed(module: Any) -> bool:
    return vars(module)["forward"] is vars(module)["_old_forward"]


def states(model: Any) -> list[bool]:
    return [is_bypassed(module) for module in model]


def watch(model: Any) -> list[list[bool]]:
    """What :func:`states` says in the middle of forwards from now on."""
    seen: list[list[bool]] = []
    model[1].register_forward_hook(lambda *_: seen.append(states(model)))
    return seen


def x() -> Any:
    import torch

    return torch.ones(1, 4)


def test_hooks_that_only_move_inputs_are_bypassed_in_a_forward(model: Any) -> None:
    import torch

    seen = watch(model)
    expected = model(x())
    assert seen == [[False] * 3]
    assert idle_hooks.install(model)
    assert torch.equal(model(x()), expected)
    assert seen[1:] == [[True, True, False]], "the third onloads weights"
    assert states(model) == [False] * 3
    assert torch.equal(model[0](x()), model[0]._old_forward(x()))
    idle_hooks.uninstall(model)
    model(x())
    assert seen[2:] == [[False] * 3]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_installed_twice_there_is_one(model: Any) -> None:
    assert idle_hooks.install(model)
    assert idle_hooks.install(model)
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1


@pytest.mark.parametrize("what", ["device", "user hook", "no hook"])
def test_nothing_is_done_where_modules_compute_elsewhere_or_have_a_hook_of_the_user(model: Any, what: str) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules

    if what == "device":
        model[1]._hf_hook.execution_device = "meta"
    elif what == "user hook":
        add_hook_to_module(model[1], ModelHook())
    else:
        remove_hook_from_submodules(model)
    assert not idle_hooks.install(model)
    assert not model._forward_hooks


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_after_an_exception_hooks_are_back_at_the_latest_after_the_next_forward(
    model: Any, kind: type[BaseException]
) -> None:
    idle_hooks.install(model)

    def fail(*_: Any) -> None:
        raise kind("stop")

    for _ in range(3):
        handle = model[1].register_forward_hook(fail)
        with pytest.raises(kind, match="stop"):
            model(x())
        handle.remove()
        if kind is ValueError:
            assert states(model) == [False] * 3
    model(x())
    assert states(model) == [False] * 3


def test_a_hook_put_on_in_the_middle_of_a_forward_stays(model: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    idle_hooks.install(model)
    hook = ModelHook()

    def replace(*_: Any) -> None:
        remove_hook_from_module(model[0])
        add_hook_to_module(model[0], hook)

    handle = model[1].register_forward_hook(replace)
    model(x())
    handle.remove()
    assert model[0]._hf_hook is hook
    assert not is_bypassed(model[0])
    model(x())
    assert states(model) == [False] * 3


def test_with_two_threads_in_it_the_last_one_puts_them_back(model: Any) -> None:
    idle_hooks.install(model)
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is other:
            inside.set()
            assert go_on.wait(30)

    other = threading.Thread(target=lambda: model(x()))
    model[1].register_forward_hook(wait)
    other.start()
    assert inside.wait(30)
    model(x())
    assert states(model) == [True, True, False], "the other thread is still in there"
    go_on.set()
    other.join()
    assert states(model) == [False] * 3


def test_who_looks_at_a_model_sees_its_hooks_whoever_is_in_it(model: Any) -> None:
    """Two look, and stop one by one, while forwards of other threads begin and end."""
    idle_hooks.install(model)
    seen = watch(model)
    bypassed, in_place = [True, True, False], [False] * 3

    def forward_of_another_thread() -> None:
        other = threading.Thread(target=lambda: model(x()))
        other.start()
        other.join()

    def look(*_: Any) -> None:
        handle.remove()
        with contextlib.ExitStack() as first:
            first.enter_context(idle_hooks.put_back(model))
            with idle_hooks.put_back(model):
                seen.append(states(model))
                first.close()
                seen.append(states(model))
                forward_of_another_thread()
                seen.append(states(model))
        seen.append(states(model))

    handle = model[1].register_forward_hook(look)
    model(x())
    assert seen == [bypassed, *[in_place] * 4, bypassed]
    with idle_hooks.put_back(model):
        forward_of_another_thread()
    model(x())
    assert seen[6:] == [in_place, bypassed]
    assert states(model) == in_place


def test_a_model_that_is_looked_at_inside_its_wrapper(tmp_path: Path) -> None:
    """As replays look at a model in a dispatched PeftModel, while another thread is in that."""
    import torch
    from accelerate import dispatch_model

    class Model(torch.nn.Sequential):
        def generate(self) -> None:
            """As transformers' models."""

    inner = Model(*(torch.nn.Linear(4, 4) for _ in range(3))).eval()
    placement = {"0.0": "cpu", "0.1": "cpu", "0.2": "disk"}
    wrapper = dispatch_model(torch.nn.Sequential(inner), placement, offload_dir=str(tmp_path))
    assert idle_hooks.install(wrapper)
    seen = []

    def look(*_: Any) -> None:
        seen.append(states(inner))
        with idle_hooks.put_back(inner):
            seen.append(states(inner))

    inner[1].register_forward_hook(look)
    wrapper(x())
    assert seen == [[True, True, False], [False] * 3]
    idle_hooks.uninstall(wrapper)
    with idle_hooks.put_back(inner):
        wrapper(x())
    assert seen[2:] == [[False] * 3] * 2


def test_a_deep_copy_keeps_its_hooks(model: Any) -> None:
    import torch

    idle_hooks.install(model)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x()), model(x()))
    assert states(model) == [False] * 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_somebody_put_around_accelerates_still_runs(model: Any, when: str) -> None:
    import torch

    expected = model(x())
    if when == "after":
        idle_hooks.install(model)
    inner, seen = model[0].forward, []

    def spy(inputs: Any) -> Any:
        seen.append(states(model))
        return inner(inputs)

    model[0].forward = spy
    if when == "before":
        idle_hooks.install(model)
    for _ in range(2):
        assert torch.equal(model(x()), expected)
        assert model[0].forward is spy
    assert seen == [[False, True, False]] * 2


def test_a_watched_forward() -> None:
    import torch
    from accelerate.hooks import ModelHook, add_hook_to_module

    module = torch.nn.Linear(4, 4)
    add_hook_to_module(module, ModelHook())
    outer, outputs = module.forward, []
    forward = idle_hooks.HookedForward(module)
    forward.watch(outputs.append)
    for watched in (False, True):
        forward.unwrap(watched=watched)
        assert is_bypassed(module) is not watched
        output = module(x())
        forward.wrap()
        assert module.forward is outer
    assert outputs == [output]


def test_unwrapped_by_two_each_puts_back_what_it_took() -> None:
    import torch
    from accelerate.hooks import ModelHook, add_hook_to_module

    module = torch.nn.Linear(4, 4)
    add_hook_to_module(module, ModelHook())
    outer = module.forward
    first, second = idle_hooks.HookedForward(module), idle_hooks.HookedForward(module)
    first.unwrap()
    second.unwrap()
    first.wrap()
    assert module.forward is outer
    second.wrap()
    assert module.forward is outer


def test_a_model_that_nobody_holds_is_gone(tmp_path: Path) -> None:
    import torch

    held = dispatched(tmp_path)
    assert idle_hooks.install(held)
    held(torch.ones(1, 4))
    with idle_hooks.put_back(held):
        assert states(held) == [False, False, False]
    gone = weakref.ref(held)
    del held
    gc.collect()
    assert gone() is None
