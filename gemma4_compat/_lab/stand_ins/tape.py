"""A stand-in for a CUDA graph: a tape records the operations of a step on the CPU and replays them.

Like a graph, it holds addresses, not modules: a replay reads the current contents of a weight's memory, and ignores a
weight, adapter or hook that has replaced it. It keeps only the memory alive that the step allocated. As in a capture,
the step's changes to memory are not carried out, but its changes to Python objects are. Operations that no capture
permits are refused: reading a value in Python, or ``torch.tensor(a_list)``, which copies from the host.

It differs in that host and device are one. So a copy from the host is an ordinary operation, and operations that would
be permitted on the host, such as ``.item()``, are also refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

_Event = torch.Event

_GARBAGE = 0xFF  # the byte in memory that no kernel has written: NaN in any floating dtype, -1 in integers
_under_way = threading.Lock()


@contextlib.contextmanager
def standing_in(recorders: dict[str, Any]) -> Iterator[None]:
    """Inside, tapes record on the CPU, unless a recorder exists already, and events work there (nothing is ever late).

    Args:
        recorders: ``gemma4_compat._graphs.recording.RECORDERS``.
    """
    with mock.patch.dict(recorders, {"cpu": Tape} | recorders), mock.patch.object(torch, "Event", _event):
        yield


def _event(device: Any = None, **options: Any) -> Any:
    kind = None if device is None else torch.device(device).type
    return mock.Mock(spec=("record", "synchronize")) if kind == "cpu" else _Event(device=device, **options)


class Tape:
    """A recorded step, with the protocol of ``gemma4_compat._graphs.recording``.

    Attributes:
        replays: how often it was replayed.
    """

    def __init__(self, device: Any = None, pool: Any = None) -> None:
        self.replays = 0
        self._recorder: _Recorder | None = None

    @staticmethod
    def unsupported_reason() -> str | None:
        """None: a CPU can always record."""
        return None

    @staticmethod
    def new_pool() -> Any:
        """None: each tape has its own memory."""

    def capture(self, run: Callable[[], T]) -> T:
        """Call ``run`` once and record it. The tensors that it returns are garbage until a replay.

        Raises:
            RuntimeError: it did something that no capture permits, caught or not; or another capture is under way.
        """
        if not _under_way.acquire(blocking=False):  # per process, as for CUDA graphs in torch
            raise RuntimeError("only one capture may be under way")
        recorder = _Recorder()
        try:
            with recorder.watching(), recorder:
                result = run()
            if recorder.refused:
                raise RuntimeError(recorder.refused)
        finally:
            try:
                recorder.undo()
            finally:
                _under_way.release()
        self._recorder = recorder
        return result

    def replay(self) -> None:
        """Replay the recorded operations on the memory as it is now.

        Raises:
            RuntimeError: nothing is recorded, or memory from before the capture has been freed during it or since.
        """
        if self._recorder is None:
            raise RuntimeError("a replay without a capture")
        self._recorder.replay()
        self.replays += 1


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records what is done to which storage: one from before, one returned by an operation, or one from a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = ""  # why the capture is invalid, even if the error was caught
        self._operations: list[tuple[Any, Any, Any, list[tuple[int, Any]]]] = []
        # Memory from before: the storage (weakly referenced), its address and size, and the tensors in recorded
        # operations that a replay places there, each with its offset, sizes and strides.
        self._before: dict[int, tuple[Any, int, int]] = {}
        self._placed: list[tuple[Any, int, tuple[Any, ...]]] = []
        self._saved: dict[int, tuple[Any, Any]] = {}  # storage, and its bytes before the first write
        self._results: dict[int, Any] = {}  # storages returned by operations
        self._aliases: dict[int, list[Any]] = {}  # aliases of those in recorded operations
        # The contents of a storage resized in the capture belong to the graph and stay: recorded operations use
        # another storage instead. Holds both, with the aliases that still have to move there.
        self._pool: dict[int, tuple[Any, Any]] = {}
        self._moves: list[tuple[list[Any], Any]] = []

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _needs_a_value(op, args, kwargs):
            self._refuse(f"operation not permitted when stream is capturing: {op}")
        if _is_unknown(args, kwargs):
            self._refuse(f"a tape cannot tell whose memory this is: {op}")
        if op is torch.ops.aten.lift_fresh.default:  # a constant
            self._results[args[0].untyped_storage()._cdata] = args[0].untyped_storage()
        written = [] if torch.Tag.inplace_view in op.tags else list(_written(op, args, kwargs))
        for tensor in written:
            self._save(tensor.untyped_storage())
        inputs = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        output = op(*args, **kwargs)
        if any(tensor.layout is not torch.strided for tensor in _tensors(output)):
            self._refuse(f"a tape has no sparse tensors: {op}")
        fresh = []
        for position, tensor in enumerate(_pytree.tree_leaves(output)):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in inputs:
                storage = tensor.untyped_storage()
                self._results[storage._cdata] = storage
                fresh.append((position, tensor))
        if op.overloadpacket.__name__.startswith(("empty", "new_empty")):
            return output  # no kernel runs
        if written or fresh:  # not a view, which shares the memory
            args, kwargs, fresh = _pytree.tree_map_only(torch.Tensor, self._alias, (args, kwargs, fresh))
            self._operations.append((op, args, kwargs, fresh))
        return output

    def _refuse(self, reason: str) -> NoReturn:
        self.refused = reason
        raise RuntimeError(reason)

    def _save(self, storage: Any) -> None:
        key = storage._cdata
        if not any(key in known for known in (self._results, self._pool, self._saved)):
            self._saved[key] = storage, storage.clone()

    def _alias(self, tensor: Any) -> Any:
        """A tensor over the same memory that stays there, whatever Python does to this one (``.data = ``)."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        alias = torch.ops.aten.alias.default(tensor)
        if key in self._pool and size:
            return alias.set_(self._pool[key][1], *_layout(alias))
        if key in self._results:
            self._aliases.setdefault(key, []).append(alias)
        elif size:
            self._before.setdefault(key, (storage, storage.data_ptr(), size))
            self._placed.append((alias, key, _layout(alias)))
        return alias

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notice memory that this thread frees or allocates by ``UntypedStorage.resize_``, which is not an operation.

        Also report that a stream is capturing, which transformers checks before it reads a mask.
        """
        thread, original = threading.get_ident(), torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            if threading.get_ident() == thread and size != storage.nbytes():
                self._resized(storage, size)
            return original(storage, size)

        def is_current_stream_capturing() -> bool:
            return threading.get_ident() == thread

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resize_),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", is_current_stream_capturing),
        ):
            yield

    def _resized(self, storage: Any, size: int) -> None:
        key = storage._cdata
        self._saved.pop(key, None)
        if key in self._before:
            self._before[key] = storage, 0, -1  # freed, so no replay may read it
        if self._aliases.get(key):
            self._moves.append((self._aliases.pop(key), torch.UntypedStorage(storage.nbytes())))
        self._pool[key] = storage, torch.UntypedStorage(size)

    def undo(self) -> None:
        """Restore the bytes of memory from before; memory allocated since holds garbage, because no kernel ran."""
        with torch.inference_mode():
            for aliases, storage in self._moves:
                for alias in aliases:
                    alias.set_(storage, *_layout(alias))
            written = {tensor.untyped_storage()._cdata for *_, fresh in self._operations for _, tensor in fresh}
            for key, storage in self._results.items():
                if key in written:
                    storage.fill_(_GARBAGE)
            for storage, _ in self._pool.values():
                storage.fill_(_GARBAGE)
            for storage, saved in self._saved.values():
                storage.copy_(saved)
            self._let_go()
        for known in (self._results, self._aliases, self._saved, self._pool, self._moves):
            known.clear()
        self._before = {key: (StorageWeakRef(storage), *place) for key, (storage, *place) in self._before.items()}

    def replay(self) -> None:
        memory = {}
        for key, (reference, address, size) in self._before.items():
            storage = memory[key] = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None or (storage.data_ptr(), storage.nbytes()) != (address, size):
                raise RuntimeError("an illegal memory access was encountered: the replay reads memory that was freed")
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):  # only kernels, nothing around them
            for tensor, key, layout in self._placed:
                tensor.set_(memory[key], *layout)
            try:
                self._run()
            finally:
                self._let_go()

    def _run(self) -> None:
        for op, args, kwargs, results in self._operations:
            output = op(*args, **kwargs)
            if results:
                leaves = [output] if isinstance(output, torch.Tensor) else _pytree.tree_leaves(output)
                for position, tensor in results:
                    tensor.copy_(leaves[position])

    def _let_go(self) -> None:
        nothing = torch.UntypedStorage(0)
        for tensor, _, _ in self._placed:
            tensor.set_(nothing, 0, (0,))


def _needs_a_value(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host would have to wait for the device, for a value or for the shape of the result."""
    aten, tags = torch.ops.aten, op.tags
    if op.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index_put):
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        # With a number as value, `x[mask] = 0` is `masked_fill_`.
        return bool(masked and (op.overloadpacket is aten.index or args[2].dim() > 0))
    if op.overloadpacket is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    if op.name().startswith("bitsandbytes::int8_vectorwise_quant"):  # it searches for outliers itself
        threshold = args[1] if len(args) > 1 else kwargs.get("threshold", 0.0)
        return bool(threshold > 0)
    if op is aten.lift_fresh.default:  # torch.tensor: a single number can be an argument of a kernel
        return bool(args[0].dim() > 0)
    return op is aten.equal.default or any(
        tag in tags for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    )


def _is_unknown(args: Any, kwargs: Any) -> bool:
    """Whether the operation makes a tensor from a storage, as ``copy.deepcopy`` does: one from before, or a new one
    that no operation returned; or has a sparse tensor.
    """
    given = _pytree.tree_leaves((args, kwargs))
    storages = (torch.UntypedStorage, torch.TypedStorage)
    return any(isinstance(leaf, storages) for leaf in given) or any(
        tensor.layout is not torch.strided for tensor in _tensors(given)
    )


def _written(op: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The tensors that an operation writes into, by its schema."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[position] if position < len(args) else kwargs.get(argument.name))


def _tensors(tree: Any) -> Iterator[Any]:
    return (leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.size(), tensor.stride()
