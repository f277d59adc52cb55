"""Defer the pointwise operations of a training layer, and compute each large result where it is needed.

:class:`fusing.Fusing` computes whatever somebody holds. In training autograd holds much that is cheap to compute
again: a cast to float32 of a 16-bit tensor that is kept anyway is read as 16 bits by each kernel that needs it. So
:class:`OnDemand` writes a result only if an operation that it does not understand reads it. The same kernel writes
what the result is computed from and somebody else holds, except what comes from a single tensor. All results of a
kernel have as many elements, or one for each row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from gemma4_compat._kernels.fuse import pointwise, repeated, run_writer
from gemma4_compat._kernels.fuse.pointwise import Call, Load, Number, Part, Value, everything, in_order
from gemma4_compat._kernels.fuse.row_writer import means_of
from gemma4_compat._kernels.match.deferring import Deferring, Sink, is_held, is_view, storage_of, written_by
from gemma4_compat._kernels.programs import FAR, Kernel

#: An operand with so few of a result's elements costs nothing: a number for each row, the weight of a norm.
_FEW = 16
#: The most tensors that a result is computed from before those that it is computed from are written.
_MOST_READ = 24
#: Numbers of a weight, or of its gradient, that shares a kernel with others; and how many do.
_SMALL, _TOGETHER = 1 << 17, 48


class OnDemand(Deferring):
    """Inside, pointwise operations on ``device`` are deferred until their results are needed.

    :meth:`flush` computes what was copied to memory from before. What is not needed by then is never computed.

    Args:
        device: ``torch.device`` with an index.
        sink: receives the kernels.
        layouts: as of :class:`Deferring`.
        weights: whose small ones one kernel casts: an adapter has many.
    """

    most_elements, in_any_order = FAR - 1, True

    def __init__(self, device: Any, sink: Sink, layouts: dict[Any, tuple[Any, ...]], weights: Sequence[Any]):
        super().__init__(device, sink, layouts)
        self._small = {_place(one): one for one in weights if one.numel() <= _SMALL}
        self._cast: dict[Any, Any] = {}  # by place and dtype
        self._stores: dict[int, Value] = {}  # into memory from before, by storage

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_view(op):
            return self._view(op, args, kwargs)
        if self._launching or _reads_no_numbers(op):
            return op(*args, **kwargs)
        if op is torch.ops.aten.copy_.default and self._defer_store(*args[:2]):
            return args[0]
        call = pointwise.match(op, args, kwargs)
        if call is not None and call.name == "cast" and _place(args[0]) in self._small:
            found = self._cast_small(args[0], kwargs["dtype"])
            if found is not None:
                return found
        if call is not None and _is_for_warps(call):
            found = self._defer(call, op, args, kwargs)
            if found is not None:
                return found
        args, kwargs = self._ready(op, args, kwargs)
        return op(*args, **kwargs)

    def flush(self) -> None:
        """Compute what was copied to memory from before."""
        self._forget_unheld()
        stores = [value for value in self._stores.values() if value.memory is not None and not value.is_there]
        self._stores.clear()
        small = [value for value in stores if value.elements <= _SMALL and not means_of([value], ())]
        for value in stores:
            if all(value is not one for one in small):
                self._compute(value)
        self._write_small(small)
        self._pending.clear()

    def _view(self, op: Any, args: Any, kwargs: Any) -> Any:
        try:
            return op(*args, **kwargs)
        except RuntimeError:  # a part of a tensor that has no memory yet
            for value in filter(None, map(self._deferred, _pytree.tree_leaves((args, kwargs)))):
                self._allocate(value)
            return op(*args, **kwargs)

    def _deferred(self, leaf: Any) -> Value | None:
        return self._pending.get(storage_of(leaf)) if isinstance(leaf, torch.Tensor) else None

    def _defer_store(self, target: Any, given: Any) -> bool:
        """Whether a copy to memory from before is deferred."""
        key = storage_of(target)
        whole = target.is_contiguous() and target.nbytes == target.untyped_storage().nbytes()
        if not whole or key in self._pending or target.shape != given.shape or storage_of(given) == key:
            return False
        call = Call("move" if target.dtype == given.dtype else "cast", (given,))
        if target.device != self._device or not pointwise.supports(call, target.dtype, self._device):
            return False
        value = self._value(call, tuple(target.shape), target.dtype, range(target.ndim))
        if not self._is_plain(given) or not self._sink.accepts(value.signature):
            return False
        self._compute_held(lambda value: key in _read_by(value))
        self._stores[key] = value
        self._add(value, target)
        return True

    def _cast_small(self, weight: Any, dtype: Any) -> Any:
        """The weight in another dtype, with all small ones of its dtype; None if kernels differ from PyTorch."""
        if not self._sink.accepts(("cast", (weight.dtype,), dtype)):
            return None
        if (_place(weight), dtype) not in self._cast:
            values = []
            for place, one in self._small.items():
                if one.dtype == weight.dtype and one.device == self._device:
                    made = torch.empty(one.shape, dtype=dtype, device=self._device)
                    self._cast[place, dtype] = made
                    operand = Load(one, tuple(one.stride()), isinstance(one, torch.nn.Parameter))
                    values.append(Value("cast", (operand,), tuple(one.shape), dtype, memory=made))
            self._write_small(values)
        return torch.ops.aten.alias.default(self._cast[_place(weight), dtype])

    def _ready(self, op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of an operation that is not deferred, with their numbers in memory."""
        if not isinstance(op, torch._ops.OpOverload):
            self._compute_held(lambda _: True)
            return args, kwargs
        written = {storage_of(tensor) for tensor in written_by(op, args, kwargs)}
        if written:
            self._compute_held(lambda value: not written.isdisjoint(_read_by(value)))

        def there(leaf: Any) -> Any:
            value = self._deferred(leaf)
            if value is None:
                return leaf
            found = None if written else self._same(leaf, value)
            if found is not None:
                return found
            operands = value.operands
            self._compute(value)
            if storage_of(leaf) in written:  # others still need the numbers from before
                value.is_there, value.memory, value.operands = False, None, operands
            return leaf

        return _pytree.tree_map(there, (args, kwargs))  # type: ignore[no-any-return]

    def _compute_held(self, wanted: Callable[[Value], bool]) -> None:
        """Compute those of the deferred values that somebody holds, and for which this is true."""
        self._forget_unheld()
        for value in list(self._pending.values()):
            if not value.is_there and wanted(value):
                self._compute(value)

    def _same(self, tensor: Any, value: Value) -> Any:
        """A tensor in memory with the same numbers: one that was cast to a wider dtype and back. None without."""
        source = _source(value)
        if source is value or tensor.dtype != value.dtype:
            return None
        if isinstance(source, Value):
            self._compute(source)
            source = source.memory
        return source.as_strided(tensor.size(), tensor.stride(), source.storage_offset() + tensor.storage_offset())

    def _add(self, value: Value, result: Any) -> None:
        key = storage_of(result)
        known = self._pending.get(key)
        value.memory = torch.ops.aten.alias.default(result) if known is None else known.memory
        if known is not None:  # its numbers from before are computed where they are needed
            known.memory = None
        elif key not in self._stores:
            result.untyped_storage().resize_(0)  # it has memory once it is written
        self._pending[key] = value

    def _value(self, call: Call, size: tuple[int, ...], dtype: Any, order: Sequence[int]) -> Value:
        value = super()._value(call, size, dtype, order)
        if len(_read_by(value)) > _MOST_READ:
            for operand in value.operands:
                if isinstance(operand, Part):
                    self._compute(operand.value)
        return value

    def _compute(self, value: Value) -> None:
        """Write a value, and with it what others hold of what it is computed from."""
        if value.is_there:
            return
        reductions = means_of([value], ())
        if not _suit(value, reductions):
            for one in reductions:
                if one is not value:
                    self._compute(one)
            reductions = [value] if value.is_of_rows else []
        values = [value, *self._beside(value, reductions)]
        self._write(values, functools.partial(repeated.kernels_of, written_by=_kernels_of))
        self._forget_unheld()

    def _write_small(self, values: list[Value]) -> None:
        """Write values that share kernels, whatever their sizes."""
        for begin in range(0, len(values), _TOGETHER):
            self._write(values[begin : begin + _TOGETHER], repeated.kernels_of)

    def _write(self, values: Sequence[Value], kernels_of: Callable[[Sequence[Value]], Any]) -> None:
        """Launch kernels that write these values."""
        for one in values:
            self._allocate(one)
        kernels, signatures = self._apart(kernels_of, values)
        for kernel in kernels:
            self._launch(kernel, signatures)
        for one in values:
            one.is_there, one.operands = True, ()
            key = storage_of(one.memory)
            if self._pending.get(key) is one:
                del self._pending[key]

    def _allocate(self, value: Value) -> None:
        """Give a value memory, if it has none."""
        if value.memory is None:
            value.memory = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        elif not value.memory.untyped_storage().nbytes():
            value.memory.untyped_storage().resize_(value.elements * value.dtype.itemsize)

    def _forget_unheld(self) -> None:
        """What nobody holds any more is never written; others may still be computed from it."""
        for key, value in list(self._pending.items()):
            if not is_held(value.memory):
                del self._pending[key]
                value.memory = None

    def _beside(self, value: Value, reductions: list[Value]) -> list[Value]:
        """What is written with a value: held by others, and not computed from a single tensor."""
        found: dict[int, Value] = {}
        sources: dict[int, set[int]] = {}  # large tensors and written values that a value is computed from, by id
        for one in in_order([value]):
            own: set[int] = set()
            for operand in one.operands:
                own |= self._sources(operand, value, sources)
            if one.is_of_rows and len(own) < 2:
                own = {id(one), *own}  # not computed again
            sources[id(one)] = own
            if one is value or not self._is_wanted(one, value, reductions):
                continue
            few = one.elements * _FEW <= value.elements
            if few or len(own) > 1:
                written = one if few else _narrower(one)
                found[id(written)] = written
                sources[id(one)] = set() if few else {id(written)}
        return [one for one in found.values() if one is not value]

    def _sources(self, operand: Any, value: Value, known: dict[int, set[int]]) -> set[int]:
        """The large tensors and written values that an operand of what a value is computed from comes from."""
        if isinstance(operand, Number):
            return set()
        if isinstance(operand, Part) and not operand.value.is_there:
            return known[id(operand.value)]
        tensor = operand.tensor if isinstance(operand, Load) else operand.value.memory
        return {storage_of(tensor)} if tensor.numel() * _FEW > value.elements else set()

    def _is_wanted(self, one: Value, value: Value, reductions: list[Value]) -> bool:
        """Whether somebody holds what the kernel of a value can write."""
        if one.memory is None or self._pending.get(storage_of(one.memory)) is not one:
            return False
        if not is_held(one.memory):
            return False
        if not reductions:
            return one.elements == value.elements
        rows, columns = reductions[0].elements, reductions[0].columns
        return one.elements in (rows, value.elements) and run_writer.is_by_rows(one, rows, columns)


@functools.cache
def _reads_no_numbers(op: Any) -> bool:
    """Whether the operation asks a tensor for no more than its shape."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    name = op.overloadpacket.__name__
    return name.startswith("new_") or (name.endswith("_like") and not name.startswith("rand"))


def _place(tensor: Any) -> tuple[Any, ...]:
    return storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _kernels_of(values: Sequence[Value]) -> list[Kernel]:
    return [run_writer.kernel_of(values)]


def _is_for_warps(call: Call) -> bool:
    """Whether it is no mean or sum, or one that warps add."""
    if call.name not in pointwise.OF_ROWS:
        return True
    (tensor,) = call.operands
    return run_writer.is_added_by_warps(tensor.numel() // tensor.shape[-1], tensor.shape[-1])


def _suit(value: Value, reductions: list[Value]) -> bool:
    """Whether one kernel can compute these means and sums, and the value that needs them."""
    shapes = {(one.elements, one.columns) for one in reductions}
    return not shapes or (len(shapes) == 1 and run_writer.is_by_rows(value, *shapes.pop()))


def _read_by(value: Value) -> set[int]:
    """The storages that a value is computed from."""
    found = set()
    for one in everything([value]):
        for operand in one.operands:
            if isinstance(operand, Load):
                found.add(storage_of(operand.tensor))
            elif isinstance(operand, Part) and operand.value.is_there:
                found.add(storage_of(operand.value.memory))
    return found


def _narrower(value: Value) -> Value:
    """What is written in place of a value: what it was cast from, if that takes fewer bytes."""
    operand = value.operands[0]
    if value.name != "cast" or not isinstance(operand, Part) or operand.value.is_there:
        return value
    narrower = operand.dtype.itemsize < value.dtype.itemsize
    return operand.value if narrower and _is_whole(operand, value) else value


def _is_whole(operand: Load | Part, value: Value) -> bool:
    """Whether a value has an element for each of the operand's, in the same order."""
    if isinstance(operand, Load):
        elements, offset = operand.tensor.numel(), 0
    else:
        elements, offset = operand.value.elements, operand.offset
    lies = pointwise.merged(value.shape, operand.strides)
    return not offset and elements == value.elements and lies == [(elements, 1)]


def _source(value: Value) -> Any:
    """What has a value's numbers and dtype: what it was cast from and back, or the value itself."""
    found: Any = value
    current = value
    while current.name in ("cast", "move") or (current.name == "multiply" and _is_one(current.operands[1])):
        operand = current.operands[0]
        if isinstance(operand, Number) or operand.dtype not in (value.dtype, torch.float32):
            break
        if not _is_whole(operand, current):
            break
        if isinstance(operand, Part) and not operand.value.is_there:
            current = operand.value
            found = current if operand.dtype == value.dtype else found
            continue
        tensor = operand.tensor if isinstance(operand, Load) else operand.value.memory
        return tensor if operand.dtype == value.dtype else found
    return found


def _is_one(operand: Any) -> bool:
    return isinstance(operand, Number) and operand.value == 1.0
