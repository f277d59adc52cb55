"""The lock of a split model: one thread at a time uses its offloaded weights.

accelerate's hooks and streaming put weights into modules for a forward and take them out after it, and bitsandbytes
keeps state on its modules, so two threads cannot be in one model at once. The outermost forward (of the model, a tower
or a single layer) takes the lock; forwards inside it only check that it is held. ``generate`` holds it for one forward
at a time: threads take turns, token by token, in the order in which they came.

A backward pass takes the lock when its first gradient reaches an offloaded layer. When a backward pass ends, or fails,
the autograd engine drops its callbacks, and with them the lock.

Nobody waits forever:

* The engine has one thread per accelerator, which runs every backward pass there. It never waits for a backward pass
  that may need it: such passes share the lock. Nor does it wait for a forward that itself waits for the engine.
* A forward that was interrupted (Ctrl-C), or left without its hooks (an exception under torch.compile), still holds
  the lock. A waiter inspects the holder's stack and takes over the lock if that forward is no longer running.
* Two threads that wait for each other, each in a forward of one model inside a forward of the other, get an error.
* A forked child process has only the lock of the thread that forked it.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gemma4_compat._accelerate import attached, module_hooks
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._offload import torch_internals

POLL = 0.05  # seconds between two looks at the thread that holds a lock
_ENGINE = ("_engine_run_backward", "backward", "grad")  # functions of torch.autograd that wait for the engine

_HOOKS = attached.LOCK  # those of all modules of a model are kept by the model
_Frame = tuple[int, Any]
_mutex = threading.RLock()  # guards the attributes of all locks; held for a few lines at a time
_changed = threading.Condition(_mutex)
_waiting: dict[int, ModelLock] = {}  # by thread
_locks: weakref.WeakSet[ModelLock] = weakref.WeakSet()


def install(model: Any, lock: ModelLock, *, streamed: Callable[[Any], bool]) -> None:
    """Have every forward that reaches offloaded weights take the lock, except forwards inside a layer.

    Args:
        model: a dispatched model.
        lock: the model's lock.
        streamed: whether a layer's streaming takes the lock already.
    """
    uninstall(model)
    lock.modules.update(model.modules())
    entries: list[Any] = []

    def visit(module: Any) -> bool:
        if streamed(module):
            return True
        inside = [visit(child) for child in module.children()]
        if any(inside) or module_hooks.offload_hook(module) is not None:
            entries.append(module)
            return True
        return False

    if visit(model):
        before, after = torch_internals.uncompiled(lock.pre_forward), torch_internals.uncompiled(lock.post_forward)
        for module in entries:
            _HOOKS.add(
                model,
                module.register_forward_pre_hook(before, prepend=True),
                module.register_forward_hook(after, always_call=True),
            )


def uninstall(model: Any) -> None:
    """Remove the lock of a dispatched model. Does nothing for a module inside it."""
    _HOOKS.remove(model)


def of(model: Any) -> ModelLock | None:
    """The lock of a dispatched model; None if it has none."""
    return next((lock for lock in list(_locks) if model in lock.modules), None)


class ModelLock:
    """Held by the forwards of one thread, or by backward passes."""

    def __init__(self) -> None:
        self._thread: int | None = None  # the thread whose forward holds it
        self._outermost = 0  # the id of the module whose forward took it
        # That forward's frame, by id and code; several if the module calls itself. If it is empty while a thread is
        # set, the forward was interrupted, and the thread may be in another forward, which was taken for a part of it.
        self._entered: list[_Frame] = []
        self._backwards: dict[int, _Backward] = {}  # by graph task
        self._queue: list[object] = []  # the waiters, in order
        self._later: list[Callable[[], None]] = []  # called once nobody holds it
        self.modules: weakref.WeakSet[Any] = weakref.WeakSet()  # of its model
        _locks.add(self)

    def pre_forward(self, module: Any, _inputs: Any) -> None:
        """The hook before a module's forward: take the lock."""
        thread = threading.get_ident()
        with _mutex:
            if self._thread == thread:
                if id(module) != self._outermost and self._entered:
                    return  # the way of all forwards inside the outermost one
                around = list(_frames(_call()[-1].f_back))
                self._drop_ended(around)  # it calls itself, or it was interrupted
                if not self._entered and self._is_called_in(around):
                    return
            elif torch_internals.graph_task() != -1:  # recomputed by checkpointing
                self.begin_backward()
                return
            else:
                if self._thread is not None or self._backwards or self._queue:
                    self._wait(lambda first: first and self._thread is None and not self._backwards)
                self._thread = thread
                self._entered.clear()
            if not self._entered:
                self._outermost = id(module)
            self._entered.append(_key(_call()[0]))

    def post_forward(self, module: Any, _inputs: Any, _output: Any) -> None:
        """The hook after a module's forward, also after a failed one: the outermost one releases the lock."""
        if self._thread != threading.get_ident():  # a forward without the lock, or a recomputed one
            return
        if id(module) != self._outermost and self._entered:
            return
        with _mutex:
            call = _call()
            if len(self._entered) != 1 or self._entered[0] not in map(_key, call):
                around = list(_frames(call[-1].f_back))
                self._drop_ended(around)
                if self._entered or self._is_called_in(around):
                    return
            self._give_back()

    def hold(self, frame: Any) -> bool:
        """Take the lock for a function that acts like a forward, without a module's call.

        Args:
            frame: the function's frame, which is on the stack until :meth:`release`.

        Returns:
            False if it runs inside something that holds the lock already: then there is nothing to release.
        """
        thread = threading.get_ident()
        with _mutex:
            if self._thread == thread:
                around = list(_frames(frame))
                self._drop_ended(around)
                if self._entered or self._is_called_in(around):
                    return False
            elif self._thread is not None or self._backwards or self._queue:
                self._wait(lambda first: first and self._thread is None and not self._backwards)
            self._thread, self._outermost = thread, 0
            self._entered[:] = [_key(frame)]
        return True

    def release(self) -> None:
        """Release what :meth:`hold` took."""
        with _mutex:
            if self._thread == threading.get_ident():
                self._give_back()

    def begin_backward(self, at_end: Callable[[int], None] | None = None) -> None:
        """Take the lock for the backward pass that is running in this thread, until the pass ends.

        Args:
            at_end: called with the id of the pass's graph task when it ends or fails, before another thread gets the
                lock. A second request for the same pass is ignored.
        """
        task, thread = torch_internals.graph_task(), threading.get_ident()
        with _mutex:
            running = self._backwards.get(task)
            if running is None:
                in_engine = isinstance(threading.current_thread(), threading._DummyThread)

                def may_begin(first: bool) -> bool:
                    if self._backwards:
                        return in_engine or any(other.thread == thread for other in self._backwards.values())
                    if self._thread is None:
                        return first
                    return self._thread == thread or (in_engine and _waits_for_engine(self._thread))

                if not may_begin(not self._queue):
                    self._wait(may_begin)
                callback = _Callback(weakref.ref(self), task)
                torch_internals.queue_callback(callback)
                running = self._backwards[task] = _Backward(thread)
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
            with _mutex:
                self._backwards.pop(task, None)
                self._after_release()

    def when_free(self, function: Callable[[], None]) -> None:
        """Call ``function``, which must be short, while nobody holds the lock: now, or on release."""
        with _mutex:
            self._later.append(function)
            self._after_release()

    def _give_back(self) -> None:
        self._thread = None
        self._entered.clear()
        self._after_release()

    def _after_release(self) -> None:
        """Run what waited for a free lock, if it is free now, and wake the waiters."""
        if self._thread is None and not self._backwards:
            while self._later:
                self._later.pop()()
        if self._queue:
            _changed.notify_all()

    def _wait(self, may_go_on: Callable[[bool], bool]) -> None:
        """Return once ``may_go_on(first)`` is true; ``first`` says that nobody has waited longer.

        Raises:
            Gemma4CompatError: it never would be.
        """
        place, thread = object(), threading.get_ident()
        self._queue.append(place)
        _waiting[thread] = self
        try:
            while not may_go_on(self._queue[0] is place):
                self._refuse_deadlock(thread)
                if not _changed.wait(POLL) and self._thread is not None:
                    self._take_from_ended()
        finally:
            del _waiting[thread]
            self._queue.remove(place)
            _changed.notify_all()

    def _refuse_deadlock(self, thread: int) -> None:
        found, seen = [self], set()
        while found:
            lock = found.pop()
            if id(lock) in seen:
                continue
            seen.add(id(lock))
            for holder in (lock._thread, *(running.thread for running in lock._backwards.values())):
                if holder == thread:
                    raise Gemma4CompatError(
                        "two threads would wait for each other forever: each is in a forward of one model with "
                        "offloaded parts and calls the model that the other is in. Call one of the two models "
                        "inside forwards of the other only, not the other way round as well."
                    )
                if holder in _waiting:
                    found.append(_waiting[holder])

    def _take_from_ended(self) -> None:
        """Release the lock of a thread that is no longer in a forward of the model."""
        assert self._thread is not None
        stack = list(_stack(self._thread))
        self._drop_ended(stack)
        if not self._entered and not self._is_called_in(stack):
            self._give_back()

    def _drop_ended(self, stack: list[Any]) -> None:
        """Drop forwards that ended without their hook."""
        running = {_key(frame) for frame in stack}
        self._entered = [entry for entry in self._entered if entry in running]

    def _is_called_in(self, frames: Iterable[Any]) -> bool:
        """Whether these frames call a module of the model."""
        # The module of a call that torch.compile has compiled may be unknown.
        modules = (frame.f_locals.get("self") for frame in frames if _is_module_call(frame))
        return any(module is None or module in self.modules for module in modules)

    def forked(self, survivor: int) -> None:
        """Adapt to a forked child process, which has one thread."""
        self._queue.clear()
        self._backwards = {task: running for task, running in self._backwards.items() if running.thread == survivor}
        if self._thread != survivor:
            self._give_back()


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


def _key(frame: Any) -> _Frame:
    return id(frame), frame.f_code


def _call() -> list[Any]:
    """The frames of the module call whose hook is running, the innermost first.

    The first frame exists until the forward is over, and torch.compile may make several of one.
    """
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _is_hook(frame):
        frame = frame.f_back
    found = [frame]
    while (frame := frame.f_back) is not None and (_is_module_call(frame) or _is_dynamo(frame)):
        found.append(frame)
    return found


def _is_hook(frame: Any) -> bool:
    return frame.f_code.co_filename.startswith(_HERE) or _is_dynamo(frame)


def _is_dynamo(frame: Any) -> bool:
    return _DYNAMO in frame.f_code.co_filename


def _is_module_call(frame: Any) -> bool:
    """Whether the frame belongs to ``torch.nn.Module.__call__``."""
    import torch

    return bool(frame.f_code.co_filename == torch.nn.modules.module.__file__)


_HERE, _DYNAMO = str(Path(__file__).parent), f"{os.sep}_dynamo{os.sep}"


def _stack(thread: int) -> Iterator[Any]:
    """The frames of a thread, the innermost first; none if the thread has ended."""
    return _frames(sys._current_frames().get(thread))


def _frames(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits_for_engine(thread: int) -> bool:
    """Whether a thread is in a backward pass: its forward cannot go on before the engine does."""
    return any(
        frame.f_code.co_name in _ENGINE and f"torch{os.sep}autograd{os.sep}" in frame.f_code.co_filename
        for frame in _stack(thread)
    )


def _after_fork() -> None:
    global _mutex, _changed
    _mutex = threading.RLock()
    _changed = threading.Condition(_mutex)
    _waiting.clear()
    for lock in list(_locks):
        lock.forked(threading.get_ident())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
