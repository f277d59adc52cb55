"""One captured step: the kernels of a forward, launched again without its Python."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

_Result = TypeVar("_Result")


class Recording(Protocol):
    """A step that was run once, and can be run again on the same memory."""

    def __init__(self, device: Any, pool: Any) -> None: ...

    def capture(self, run: Callable[[], _Result]) -> _Result:
        """Record what ``run`` does on the device, without doing it. Its Python runs once.

        Returns:
            what ``run`` returned. The tensors in it have no values before the first replay.

        Raises:
            Exception: ``run`` raised, or did what cannot be recorded. Nothing on the device has changed.
        """

    def replay(self) -> None:
        """Do on the device what was recorded, in the order of the current stream."""

    @staticmethod
    def new_pool() -> Any:
        """What recordings that are never replayed at once share for their memory."""


class CudaRecording:
    """A ``torch.cuda.CUDAGraph``.

    Args:
        device: ``torch.device`` with an index.
        pool: of :meth:`new_pool`.
    """

    def __init__(self, device: Any, pool: Any) -> None:
        import torch

        self._device, self._pool = device, pool
        self._graph = torch.cuda.CUDAGraph()

    @staticmethod
    def new_pool() -> Any:
        """An id for ``torch.cuda.graph(pool=...)``."""
        import torch

        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], _Result]) -> _Result:
        """Record the kernels that ``run`` launches from this thread on this device."""
        import torch

        stream = _streams.get(self._device)
        if stream is None:
            stream = _streams[self._device] = torch.cuda.Stream(self._device)
        context = torch.cuda.graph(self._graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), _without_collection():
            try:
                with context:
                    return run()
            except BaseException:
                self._end_failed()
                raise

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()

    def _end_failed(self) -> None:
        """Take the allocator out of the pool: a capture that fails to end leaves it there (PyTorch 2.4 to 2.13)."""
        import torch

        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with contextlib.suppress(RuntimeError):  # it has been taken out
                end(self._device.index, self._pool)
        torch.cuda.synchronize(self._device)


#: One for each device: cuBLAS takes a workspace for each stream that it meets.
_streams: dict[Any, Any] = {}

#: By type of device. Tests add one for the CPU.
RECORDERS: dict[str, type[Recording]] = {"cuda": CudaRecording}


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection inside: it may delete a graph, or an event, which a capture does not survive."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
