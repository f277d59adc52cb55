"""Locks that nobody waits for forever, and the one order in which they are taken.

=================  =====================================  ==========================================================
rank               which                                  held while
=================  =====================================  ==========================================================
:data:`MODEL`      one for each split model               a forward runs, or a backward pass (`_offload.model_lock`)
:data:`DECODING`   one for each model that replays        a step or prompt is looked up, captured, replayed
:data:`TRAINING`   one for each model of `train_fast`     a layer's graph is looked up or captured
:data:`CAPTURING`  one for the process                    CUDA records a graph, which it does one at a time
=================  =====================================  ==========================================================

A thread that holds one takes only locks further down, or another of the same rank (a model that calls another model).
Inside a capture nobody waits: what is not free is an error there, so the capture fails and the step runs without it.
Every other lock of the package guards a few lines that take none of these.

A lock is given back by ``finally``: never because of what another thread's stack looks like. Threads that would wait
for each other in a circle get an error instead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from gemma4_compat._errors import Gemma4CompatError

_Result = TypeVar("_Result")

MODEL, DECODING, TRAINING, CAPTURING = range(4)

POLL = 0.05  # seconds between two looks, for releases that were interrupted before they could tell

#: Guards the attributes of all locks; held for a few lines at a time.
mutex = threading.RLock()
_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
#: What looks at each lock that a thread gets, with the ranks that it held before; tests check the order.
watch: Callable[[Lock, list[int]], None] | None = None


class Lock:
    """Held by one thread at a time, as often as it likes. Others get it in the order in which they came.

    Args:
        rank: one of :data:`MODEL`, :data:`DECODING`, :data:`TRAINING`, :data:`CAPTURING`.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._entries: dict[object, int] = {}  # what holds it, and in which thread
        self._queue: dict[Any, int] = {}  # what wakes those who wait, in order, and in which thread they do
        with mutex:
            _locks.add(self)

    def run(self, function: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> _Result:
        """Call ``function`` while this thread holds the lock.

        Raises:
            Gemma4CompatError: waiting for the lock would never end.
        """
        entry = object()
        try:
            self._take(entry)
            return function(*args, **kwargs)
        finally:
            self._entries.pop(entry, None)  # the first thing, in one call of C: Ctrl-C comes before or after it
            self._after_release()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, this thread holds the lock.

        Raises:
            Gemma4CompatError: waiting for the lock would never end.
        """
        entry = object()
        try:
            self._take(entry)
            yield
        finally:
            self._entries.pop(entry, None)
            self._after_release()

    def holders(self) -> set[int]:
        """The threads that hold it."""
        return set(self._entries.copy().values())

    def _is_free(self) -> bool:
        return not self._entries

    def _take(self, entry: object) -> None:
        thread = threading.get_ident()
        with mutex:
            held = thread in self._entries.values()
            if not held and watch is not None:
                watch(self, [lock.rank for lock in _held_by(thread)])
            if held or (not self._queue and self._is_free()):
                self._entries[entry] = thread
                return
        self._wait(functools.partial(self._took, entry, thread))

    def _took(self, entry: object, thread: int, first: bool) -> bool:
        if first and self._is_free():
            self._entries[entry] = thread
        return entry in self._entries

    def _after_release(self) -> None:
        if self._queue:
            with mutex:
                for waiter in list(self._queue):
                    if waiter.locked():
                        waiter.release()

    def _wait(self, has_begun: Callable[[bool], bool]) -> None:
        """Call ``has_begun(first)`` with :data:`mutex` held until it is true; ``first``: nobody has waited longer.

        The mutex is not held around the wait: Ctrl-C between its release and the wait, as in
        ``threading.Condition.wait``, would leave a ``with`` that gives back what it does not have.

        Raises:
            Gemma4CompatError: it never would be, or the thread is in a capture.
        """
        waiter, thread = threading.Lock(), threading.get_ident()
        waiter.acquire()
        try:
            while True:
                with mutex:
                    if has_begun(next(iter(list(self._queue)), waiter) is waiter):
                        return
                    if any(lock.rank == CAPTURING for lock in _held_by(thread)):
                        raise Gemma4CompatError(
                            "another thread is in a model that is called while a CUDA graph is captured"
                        )
                    self._queue[waiter] = thread
                    self._refuse_deadlock(thread)
                waiter.acquire(timeout=POLL)
        finally:
            self._queue.pop(waiter, None)  # as in `run`
            self._after_release()

    def _refuse_deadlock(self, thread: int) -> None:
        found, seen = [self], set()
        while found:
            lock = found.pop()
            if id(lock) in seen:
                continue
            seen.add(id(lock))
            for holder in lock.holders():
                if holder == thread:
                    raise Gemma4CompatError(
                        "two threads would wait for each other forever: each is in a forward of one model and calls "
                        "the model that the other is in. Call one of the two models inside forwards of the other "
                        "only, not the other way round as well."
                    )
                found += [other for other in list(_locks) if holder in other._queue.values()]

    def _forked(self, survivor: int) -> None:
        """Adapt to a forked child process, which has one thread."""
        self._queue.clear()
        self._entries = {entry: thread for entry, thread in self._entries.items() if thread == survivor}

    def __deepcopy__(self, _memo: Any) -> Any:
        return self


def _held_by(thread: int) -> list[Lock]:
    return [lock for lock in list(_locks) if thread in lock.holders()]


def _after_fork() -> None:
    global mutex
    mutex = threading.RLock()
    for lock in list(_locks):
        lock._forked(threading.get_ident())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
