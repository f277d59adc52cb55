"""The lock of a split model: who waits for whom, and that nobody waits forever."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._engine.runtime import locks
from gemma4_compat._offload import model_lock
from tests.unit.offload.threads import run_together

pytest.importorskip("accelerate", reason="needs accelerate")


@pytest.fixture
def split(tmp_path: Path) -> Callable[[], Any]:
    """A new model of three linears, the last two offloaded, with its lock."""
    import torch
    from accelerate import dispatch_model

    def make() -> Any:
        torch.manual_seed(0)
        module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).eval()
        model = dispatch_model(module, {"0": "cpu", "1": "disk", "2": "disk"}, offload_dir=str(tmp_path))
        model.lock = model_lock.ModelLock()
        model_lock.install(model, model.lock, streamed=lambda _: False)
        return model

    return make


@pytest.fixture
def model(split: Callable[[], Any]) -> Any:
    return split()


def x() -> Any:
    import torch

    return torch.ones(1, 4)


def is_free(model: Any) -> bool:
    return not model.lock.holders() and not model.lock._queue


def in_thread(work: Callable[[], Any]) -> None:
    """Run it in another thread; raises what it raised, and TimeoutError after 20 seconds."""
    (raised,) = run_together([work], limit=20)
    if raised is not None:
        raise raised


def test_what_takes_the_lock(model: Any) -> None:
    seen = []
    for module in (model, *model):
        module.register_forward_pre_hook(lambda *_: seen.append(model.lock.holders()))
        module.register_forward_hook(lambda *_: seen.append(model.lock.holders()))
    model(x())
    me = {threading.get_ident()}
    assert seen == [me] * 8, "the model's own hooks run inside, too"
    seen.clear()
    for module in model:
        module(x())
    assert seen == [set(), set(), me, me, me, me]
    assert [model_lock.of(module) for module in (model, *model)] == [model.lock, None, model.lock, model.lock]
    assert is_free(model)
    model_lock.uninstall(model[1])
    assert model_lock.of(model[1]) is model.lock, "a module inside it keeps the lock"
    model_lock.uninstall(model)
    assert not any("_call_impl" in vars(module) for module in model.modules())


def test_a_model_without_offloaded_parts_has_no_lock() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model_lock.install(model, model_lock.ModelLock(), streamed=lambda _: False)
    assert not any("_call_impl" in vars(module) for module in model.modules())


def test_one_thread_at_a_time_in_the_order_of_their_coming(model: Any) -> None:
    inside, go_on, order = threading.Event(), threading.Event(), []

    def first(*_: Any) -> None:
        inside.set()
        assert go_on.wait(20)

    handle = model[0].register_forward_hook(first)
    threads = [threading.Thread(target=lambda: model(x()))]
    threads[0].start()
    assert inside.wait(20)
    handle.remove()
    model[0].register_forward_hook(lambda *_: order.append(threading.current_thread()))
    for number in range(1, 4):
        threads.append(threading.Thread(target=lambda: model(x())))
        threads[-1].start()
        while len(model.lock._queue) < number:
            time.sleep(0.001)
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert order == threads[1:]
    assert is_free(model)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_after_an_exception_another_thread_gets_it(model: Any, kind: type[BaseException]) -> None:
    import torch

    expected, kept = model(x()), []

    def fail(*_: Any) -> None:
        raise kind("stop")

    for module in (model, model[1]):
        for prepend in (False, True):  # also before accelerate's hook
            handle = model[1].register_forward_pre_hook(fail, prepend=prepend)
            with pytest.raises(kind, match="stop") as raised:
                module(x())
            handle.remove()
            kept.append(raised.value)  # with its traceback, as a notebook keeps it
            assert is_free(model)
            answers = []
            in_thread(lambda answers=answers: answers.append(model(x())))
            assert torch.equal(answers[0], expected)
            assert is_free(model)


def test_ctrl_c_anywhere_leaves_it_free() -> None:
    """A signal is handled between any two instructions: of the lock, too, and while it is waited for."""
    import torch

    model, lock = torch.nn.Sequential(torch.nn.Linear(4, 4)), model_lock.ModelLock()
    model_lock.guard(model, lock)
    chance, stop = random.Random(0), threading.Event()

    def hold() -> None:
        while not stop.is_set():
            lock.run(time.sleep, 0.001)

    interrupted = 0
    with ctrl_c_raises():
        for waits in (False, True):
            stop.clear()
            other = threading.Thread(target=hold if waits else lambda: None, daemon=True)
            other.start()
            try:
                for _ in range(200):
                    interrupted += is_interrupted(chance.uniform(1e-5, 2e-3), lambda: model(x()))
                    assert threading.get_ident() not in {*lock.holders(), *lock._queue.values()}
            finally:
                stop.set()
                other.join(20)
            assert not other.is_alive()
    assert interrupted == 400
    assert not lock.holders()


def is_interrupted(after: float, function: Callable[[], Any]) -> bool:
    """Call a function until Ctrl-C comes, in so many seconds. It comes late on a machine that is busy."""
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        for _ in range(20):
            function()
        time.sleep(1)
    except KeyboardInterrupt:
        return True
    return False


@contextlib.contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Inside, the alarm of ``setitimer`` is Ctrl-C."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_nobody_else_enters_while_a_generator_yields_in_a_forward(model: Any) -> None:
    """Once the waiters walked the stack of the thread that was inside, and a generator's frame ended the walk."""
    inside, most = set(), [0]

    def numbers(seconds: float) -> Iterator[int]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            yield sum(range(50))

    def work(*_: Any) -> None:
        inside.add(threading.get_ident())
        for _ in numbers(6 * locks.POLL):
            most[0] = max(most[0], len(inside))

    model[1].register_forward_pre_hook(work)
    model[1].register_forward_hook(lambda *_: inside.discard(threading.get_ident()))
    assert run_together([lambda: [model(x()) for _ in range(3)]] * 3, limit=60) == [None] * 3
    assert most == [1]


def test_a_forward_in_itself_that_fails_leaves_the_outer_one_its_lock(model: Any) -> None:
    """Also where it fails before the lock's hook."""
    seen = []

    def fail(*_: Any) -> None:
        raise ValueError("stop")

    def again(*_: Any) -> None:
        handle.remove()
        for part in (model, model[1]):
            failing = part.register_forward_pre_hook(fail, prepend=True)
            with pytest.raises(ValueError, match="stop"):
                model(x())
            failing.remove()
            seen.append(model.lock.holders())

    handle = model[0].register_forward_hook(again)
    model(x())
    assert seen == [{threading.get_ident()}] * 2
    assert is_free(model)


def test_a_forward_in_a_forward(model: Any) -> None:
    import torch

    expected, answers = model(x()), []

    def again(*_: Any) -> None:
        handle.remove()
        answers.append(model(x()))
        assert model.lock.holders() == {threading.get_ident()}

    handle = model[0].register_forward_hook(again)
    answers.append(model(x()))
    assert all(torch.equal(answer, expected) for answer in answers)
    assert is_free(model)


def test_two_models_in_both_orders_are_an_error(split: Callable[[], Any]) -> None:
    one, two = split(), split()
    both = threading.Barrier(2, timeout=20)

    def calls(other: Any) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            both.wait()
            other(x())

        return hook

    one[0].register_forward_hook(calls(two[1]))
    two[0].register_forward_hook(calls(one[1]))
    raised = run_together([lambda: one(x()), lambda: two(x())], limit=20)
    assert sorted(type(error).__name__ for error in raised) == ["Gemma4CompatError", "NoneType"]
    (error,) = (error for error in raised if error is not None)
    assert isinstance(error, Gemma4CompatError)
    assert "wait for each other" in str(error)
    assert is_free(one)
    assert is_free(two)


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_pass_holds_it_until_it_is_over(model: Any, fails: bool) -> None:
    import torch

    ended, seen, other = [], [], threading.Thread(target=lambda: model(x()))

    def begin(_: Any) -> None:
        for _ in range(2):
            model.lock.begin_backward(ended.append)
        other.start()
        time.sleep(0.1)
        seen.append((other.is_alive(), list(ended)))
        model(x())  # a hook that calls the model is part of the backward pass

    def fail(_: Any) -> None:
        if fails:
            raise ValueError("stop")

    value = torch.ones(1, requires_grad=True)
    inner = value * 2
    inner.register_hook(fail)
    outer = inner * 3
    outer.register_hook(begin)
    try:
        outer.sum().backward()
        assert not fails
    except ValueError:
        assert fails
    assert seen == [(True, [])]
    assert len(ended) == 1
    other.join(20)
    assert not other.is_alive()
    assert is_free(model)


def test_a_loss_in_chunks_holds_it_in_its_backward_pass(model: Any) -> None:
    """It brings the head to its device without a call of the head."""
    import torch

    from gemma4_compat._training import modules

    held = []

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, value: Any) -> Any:
            return value * 2

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            with modules.onloaded(model[2]):
                held.append((model.lock.holders(), model[2].weight.device.type))
            held.append(model.lock.holders())
            return gradient * 2

    Loss.apply(torch.ones(1, requires_grad=True)).sum().backward()
    me = {threading.get_ident()}
    assert held == [(me, "cpu"), me]
    with modules.onloaded(model[2]):
        assert model.lock.holders() == me
    assert is_free(model)


def test_what_is_for_later_is_done_when_it_is_free(model: Any) -> None:
    done: list[int] = []
    model.lock.when_free(lambda: done.append(0))
    assert done == [0]
    model[1].register_forward_hook(lambda *_: model.lock.when_free(lambda: done.append(1)))
    model[2].register_forward_hook(lambda *_: done.append(2))
    model(x())
    assert done == [0, 2, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_has_no_lock_of_another_thread(model: Any) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        assert go_on.wait(20)

    handle = model[0].register_forward_hook(wait)
    other = threading.Thread(target=lambda: model(x()))
    other.start()
    assert inside.wait(20)
    child = os.fork()
    if child == 0:
        free = is_free(model)
        os._exit(0 if free and model.lock.run(model.lock.holders) == {threading.get_ident()} else 1)
    go_on.set()
    other.join(20)
    handle.remove()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_free(model)


def test_a_deep_copy_and_a_pickle_without_accelerates_hooks(model: Any) -> None:
    import torch
    from accelerate.hooks import remove_hook_from_submodules

    expected = model(x())
    lock = vars(model).pop("lock")
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x()), expected)
    model_lock.uninstall(model)
    remove_hook_from_submodules(model)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x()), expected)
    assert not lock.holders()
