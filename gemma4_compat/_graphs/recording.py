"""A captured step: the kernels of a forward, launched again without its Python."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from gemma4_compat._engine.runtime import locks

_Result = TypeVar("_Result")


class Recording(Protocol):
    """A step that was captured, and can be run again on the same memory."""

    def __init__(self, device: Any, pool: Any) -> None: ...

    def capture(self, run: Callable[[], _Result]) -> _Result:
        """Record what ``run`` does on the device, without doing it. Its Python runs once.

        Returns:
            what ``run`` returned. The tensors in it have no values before the first replay.

        Raises:
            Exception: ``run`` raised, or did what cannot be recorded. Nothing on the device has changed.
        """

    def replay(self) -> None:
        """Run the recording on the device, in the order of the current stream."""

    @staticmethod
    def unsupported_reason() -> str | None:
        """Why nothing can be recorded here; None if it can."""

    @staticmethod
    def new_pool() -> Any:
        """A memory pool for recordings that are never replayed at the same time."""


class CudaRecording:
    """A ``torch.cuda.CUDAGraph``.

    Args:
        device: ``torch.device`` with an index.
        pool: from :meth:`new_pool`.
    """

    def __init__(self, device: Any, pool: _CudaPool) -> None:
        import torch

        self._device, self._pool = device, pool
        self._graph = torch.cuda.CUDAGraph()

    @staticmethod
    def unsupported_reason() -> str | None:
        """Rules out releases where a failed capture could not be cleaned up."""
        import torch

        absent = [names[0] for names in (_END_ALLOCATION, _RELEASE_POOL) if _private(names) is None]
        return f"torch {torch.__version__} lacks torch._C.{' and torch._C.'.join(absent)}" if absent else None

    @staticmethod
    def new_pool() -> Any:
        """The pool of no graph yet."""
        return _CudaPool()

    def capture(self, run: Callable[[], _Result]) -> _Result:
        """Record the kernels that ``run`` launches from this thread on this device."""
        import torch

        stream = _streams.get(self._device)
        if stream is None:
            stream = _streams[self._device] = torch.cuda.Stream(self._device)
        with without_collection(), torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # a capture cannot give cached memory to the graph's pool
            with torch.cuda.stream(stream), self._pool.used() as pool:
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = run()
                    self._graph.capture_end()
                except BaseException:
                    self._abandon(pool)
                    raise
                self._pool.graphs.add(self._graph)
        return result

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()

    def _abandon(self, pool: tuple[int, int]) -> None:
        """End a capture into this pool that has failed."""
        import torch

        try:
            self._graph.capture_end()
        except RuntimeError:
            # CUDA has ended it, and PyTorch (seen with 2.11) stops there: the allocator keeps filling the pool, and
            # random numbers are still drawn as in a capture.
            for names in (_END_ALLOCATION, _RELEASE_POOL):
                function = _private(names)
                assert function is not None  # :meth:`unsupported_reason` has seen to it
                function(self._device.index, pool)
            another = torch.cuda.CUDAGraph()
            another.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            torch.zeros(1, device=self._device)
            another.capture_end()


class _CudaPool:
    """Memory that graphs share. PyTorch's id for it (``torch.cuda.graph_pool_handle``) is spent with its last graph: a
    capture with it ends in an internal assert.

    Attributes:
        graphs: that are there, of those captured with the id.
    """

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._id: tuple[int, int] | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[tuple[int, int]]:
        """The id for a capture inside."""
        import torch

        held = list(self.graphs)  # until the capture holds the pool
        if self._id is None or not held:
            self._id = torch.cuda.graph_pool_handle()
        yield self._id


#: Functions of torch._C, by release, the newest name first.
_END_ALLOCATION = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")  # the second before torch 2.8
_RELEASE_POOL = ("_cuda_releasePool",)


def _private(names: tuple[str, ...]) -> Callable[[int, Any], None] | None:
    import torch

    return next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)


#: One per device: cuBLAS allocates a workspace for each stream that it sees.
_streams: dict[Any, Any] = {}

#: Held during a capture: a process runs one at a time.
capturing = locks.Lock(locks.CAPTURING)

#: By device type. `_lab/stand_ins/tape.py` adds one for the CPU.
RECORDERS: dict[str, type[Recording]] = {"cuda": CudaRecording}


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection inside: in a capture it may delete a graph or an event, which breaks it, and where much is
    made that stays, it takes as long as all of that (0.3 s of a first text).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
