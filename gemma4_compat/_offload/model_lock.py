"""The lock of a split model: one thread at a time uses its offloaded weights.

accelerate's hooks and streaming put weights into modules for a forward and take them out after it, and bitsandbytes
keeps state on its modules, so two threads cannot be in one model at once. Every call of a module that reaches
offloaded weights runs in :meth:`ModelLock.run`, so ``finally`` gives the lock back, whatever ends the call: an
exception, Ctrl-C, one that torch.compile has compiled. ``generate`` holds it for one forward at a time: threads take
turns, token by token, in the order in which they came.

A backward pass takes the lock when its first gradient reaches an offloaded layer. When a backward pass ends, or fails,
the autograd engine drops its callbacks, and with them the lock.

Nobody waits forever (:mod:`gemma4_compat._engine.runtime.locks`):

* The engine has one thread per accelerator, which runs every backward pass there. It never waits for a backward pass
  that may need it: such passes share the lock. Nor does it wait for a forward whose thread waits for the engine.
* Two threads that wait for each other, each in a forward of one model inside a forward of the other, get an error.
* A forked child process has only the lock of the thread that forked it.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.runtime import in_place, locks
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._offload import torch_internals

_CALL = "_call_impl"  # of a module: what its call runs, with all hooks
_guarded: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()  # by dispatched model


def install(model: Any, lock: ModelLock, *, streamed: Callable[[Any], bool]) -> None:
    """Have every call of a dispatched model that reaches offloaded weights take the lock, except calls inside a layer.

    ``streamed``: whether a layer's streaming has guarded it already.
    """
    uninstall(model)
    entries: weakref.WeakSet[Any] = weakref.WeakSet()

    def visit(module: Any) -> bool:
        if streamed(module):
            return True
        inside = [visit(child) for child in module.children()]
        if any(inside) or module_hooks.offload_hook(module) is not None:
            guard(module, lock)
            entries.add(module)
            return True
        return False

    if visit(model):
        _guarded[model] = entries


def uninstall(model: Any) -> None:
    """Remove the lock of a dispatched model. Does nothing for a module inside it."""
    for module in _guarded.pop(model, ()):
        release(module)


def guard(module: Any, lock: ModelLock) -> None:
    """Have each call of this module take the lock, until :func:`release`."""
    _compile_only_what_it_calls()
    in_place.replace(module, _CALL, functools.partial(_call, lock))


def release(module: Any) -> None:
    """Undo :func:`guard`."""
    in_place.restore(module, _CALL, _call)


def of(model: Any) -> ModelLock | None:
    """The lock that a call of this module takes; None if it takes none."""
    found: Any = in_place.replacement(vars(model).get(_CALL), _call)
    return None if found is None else found.args[0]


def _call(lock: ModelLock, below: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return lock.run(below, *args, **kwargs)


@functools.cache
def _compile_only_what_it_calls() -> None:
    """torch.compile leaves out the functions around a locked call, and compiles what they call."""
    for function in (_call, locks.Lock.run, in_place._bottom):
        torch_internals.skipped(function)


class ModelLock(locks.Lock):
    """Held by the forwards of one thread, or by backward passes."""

    def __init__(self) -> None:
        super().__init__(locks.MODEL)
        self._backwards: dict[int, _Backward] = {}  # by graph task
        self._later: list[Callable[[], None]] = []  # called once nobody holds it

    def holders(self) -> set[int]:
        """The threads that hold it."""
        return super().holders() | self._in_backward()

    def _in_backward(self) -> set[int]:
        """The threads of backward passes. A copy is looked at: a pass ends while others wait."""
        return {running.thread for running in self._backwards.copy().values()}

    def _is_free(self) -> bool:
        return not self._entries and not self._backwards

    def _take(self, entry: object) -> None:
        if torch_internals.graph_task() == -1:
            super()._take(entry)
        elif threading.get_ident() not in super().holders():  # recomputed by checkpointing
            self.begin_backward()

    def begin_backward(self, at_end: Callable[[int], None] | None = None) -> None:
        """Take the lock for the backward pass that is running in this thread, until the pass ends.

        Args:
            at_end: called with the id of the pass's graph task when it ends or fails, before another thread gets the
                lock. A second request for the same pass is ignored.
        """
        task, thread = torch_internals.graph_task(), threading.get_ident()
        in_engine = isinstance(threading.current_thread(), threading._DummyThread)

        def may_begin(first: bool) -> bool:
            if others := self._in_backward():
                return in_engine or thread in others
            forwards = super(ModelLock, self).holders()
            if not forwards:
                return first
            return thread in forwards or (in_engine and any(map(_waits_for_engine, forwards)))

        def has_begun(first: bool) -> bool:
            if task not in self._backwards and may_begin(first):
                torch_internals.queue_callback(_Callback(weakref.ref(self), task))
                self._backwards[task] = _Backward(thread)
            return task in self._backwards

        if task not in self._backwards:
            self._wait(has_begun)
        with locks.mutex:
            running = self._backwards[task]
            if at_end is not None and at_end not in running.at_end:
                running.at_end.append(at_end)

    def end_backward(self, task: int) -> None:
        """A backward pass has ended. Does nothing the second time."""
        running = self._backwards.get(task)
        if running is None:
            return
        try:
            while running.at_end:
                running.at_end.pop()(task)
        finally:
            self._backwards.pop(task, None)
            self._after_release()

    def when_free(self, function: Callable[[], None]) -> None:
        """Call ``function``, which must be short, while nobody holds the lock: now, or on release."""
        self._later.append(function)
        self._after_release()

    def _after_release(self) -> None:
        """Run what waited for a free lock, if it is free now, and wake the waiters."""
        if self._later:
            with locks.mutex:
                while self._later and self._is_free():
                    self._later.pop()()
        super()._after_release()

    def _forked(self, survivor: int) -> None:
        super()._forked(survivor)
        self._backwards = {task: running for task, running in self._backwards.items() if running.thread == survivor}


class _Backward:
    """A backward pass: the thread in which it took the lock, and its callbacks."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.at_end: list[Callable[[int], None]] = []


class _Callback:
    """Only the engine's queue holds it: called at the end of a backward pass, deleted after a failed one."""

    def __init__(self, lock: weakref.ref[ModelLock], task: int) -> None:
        self._lock, self._task = lock, task

    def __call__(self) -> None:
        lock = self._lock()
        if lock is not None:
            lock.end_backward(self._task)

    __del__ = __call__


def _waits_for_engine(thread: int) -> bool:
    """Whether a thread has called the autograd engine and is not in Python since: it goes on only after the engine.

    The one frame that is looked at is where the thread is, and it cannot leave it before the engine does.
    """
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code is _engine_call()


@functools.cache
def _engine_call() -> Any:
    from torch.autograd import graph

    return graph._engine_run_backward.__code__
