"""Kernels that were written before, for values that are computed alike: the layers of a model repeat each other.

Writing a kernel takes milliseconds, and a step of an E2B has hundreds. A kernel's text depends on the operations, on
shapes and strides, and on which tensors share memory. It does not depend on where that memory is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gemma4_compat._kernels.fuse import row_kernels
from gemma4_compat._kernels.fuse.pointwise import Number, Operand, Part, Value
from gemma4_compat._kernels.programs import Kernel

_MOST_KNOWN = 1 << 10
#: By what values are like: their kernels, with numbers in the place of tensors, and the signatures of operations.
_known: dict[Any, tuple[list[Kernel], list[tuple[Any, ...]]]] = {}


def kernels_of(
    values: Sequence[Value], written_by: Callable[[Sequence[Value]], list[Kernel]] = row_kernels.kernels_of
) -> tuple[list[Kernel], list[tuple[Any, ...]]]:
    """The kernels that compute these values into their memory, in order, and the signatures of all operations."""
    alike = _Alike(values)
    key = written_by, alike.key
    found = _known.get(key)
    if found is not None:
        kernels, signatures = found
        return [_reading(one, [alike.tensors[place] for place in one.tensors]) for one in kernels], signatures
    kernels, signatures = written_by(values), [value.signature for value in alike.values]
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[key] = [_reading(one, map(alike.place, one.tensors)) for one in kernels], signatures
    return kernels, signatures


def _reading(kernel: Kernel, tensors: Iterable[Any]) -> Kernel:
    return dataclasses.replace(kernel, tensors=tuple(tensors))


class _Alike:
    """What values have in common with those that need the same kernels.

    Attributes:
        key: hashable.
        tensors: that they read or write, one for each place in memory, in an order that the key decides.
        values: they and those that they are computed from.
    """

    def __init__(self, values: Sequence[Value]) -> None:
        self.tensors: list[Any] = []
        self.values: list[Value] = []
        self._places: dict[tuple[int, Any], int] = {}
        self._numbers: dict[int, int] = {}
        self._found: list[tuple[Any, ...]] = []
        asked = tuple([self._number(value) for value in values])
        self.key = asked, tuple(self._found)

    def place(self, tensor: Any) -> int:
        """The number of a tensor's place in memory."""
        address = tensor.data_ptr(), tensor.dtype
        found = self._places.get(address)
        if found is None:
            found = self._places[address] = len(self.tensors)
            self.tensors.append(tensor)
        return found

    def _number(self, value: Value) -> int:
        found = self._numbers.get(id(value))
        if found is None:
            operands = tuple([self._operand(operand) for operand in value.operands])
            memory = None if value.memory is None else self.place(value.memory)
            shape = value.shape, value.sizes, value.dim, value.columns, value.parts
            found = self._numbers[id(value)] = len(self.values)
            self.values.append(value)
            self._found.append((value.name, value.dtype, shape, operands, memory))
        return found

    def _operand(self, operand: Operand) -> Any:
        if isinstance(operand, Part):
            if operand.value.is_there:
                return self.place(operand.value.memory), operand.dtype, operand.offset, operand.strides
            return self._number(operand.value), operand.offset, operand.strides
        if isinstance(operand, Number):
            return repr(operand.value)  # 0.0 is not -0.0
        tensor = operand.tensor
        more: Any = None
        if operand.constant:
            more = tensor.numel(), tensor.is_contiguous()
        return self.place(tensor), operand.dtype, operand.strides, tensor.data_ptr() % 16, more
