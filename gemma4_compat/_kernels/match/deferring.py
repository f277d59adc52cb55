"""Dispatch modes that defer pointwise operations: which ones, and what is known of their results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gemma4_compat._gemma4.state import contents
from gemma4_compat._kernels.fuse import pointwise
from gemma4_compat._kernels.fuse.pointwise import Call, Load, Number, Operand, Part, Value
from gemma4_compat._kernels.programs import FAR, Kernel, span

#: Views that do not say so in their schema.
_OTHER_VIEWS = ("aten::_unsafe_view", "aten::lift_fresh")


class Sink(Protocol):
    """Receives kernels."""

    def accepts(self, signature: tuple[Any, ...]) -> bool:
        """Whether an operation with these dtypes may be computed by a kernel of ours."""

    def kernel(self, kernel: Kernel, signatures: Iterable[tuple[Any, ...]]) -> None:
        """Note a kernel, or launch it; ``signatures`` belong to the operations in it."""


class Deferring(TorchDispatchMode):  # type: ignore[misc]
    """Inside, pointwise operations on ``device`` may be deferred.

    Args:
        device: ``torch.device`` with an index.
        sink: receives the kernels.
        layouts: what is known about results, by operation and operands; kept by the caller.
    """

    ignores_launches = True  # a kernel that computes a weight may run before what is deferred
    most_elements = pointwise.MAX_ELEMENTS  # of a result that is deferred
    in_any_order = False  # whether memory may have its dimensions in another order

    def __init__(self, device: Any, sink: Sink, layouts: dict[Any, tuple[Any, ...]]) -> None:
        super().__init__()
        self._device, self._sink, self._layouts = device, sink, layouts
        self._pending: dict[int, Value] = {}  # by storage, the oldest first; for each its last value
        self._launching = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside. What torch would do against that takes a tenth of a capture."""
        return False

    def _launch(self, kernel: Kernel, signatures: list[tuple[Any, ...]]) -> None:
        self._apart(self._sink.kernel, kernel, signatures)

    def _apart(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call what makes or launches kernels: what that does with tensors is not part of the step."""
        before, self._launching = self._launching, True
        try:
            return call(*args)
        finally:
            self._launching = before

    def _add(self, value: Value, result: Any) -> None:
        """Note a deferred value, which belongs into a result's memory."""
        raise NotImplementedError

    # Which operations

    def _defer(self, call: Call, op: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that is computed later; None if it cannot be deferred."""
        if call.in_place and not self._is_whole(call.operands[0]):
            return None
        if call.name == "constant" and kwargs.get("device") != self._device:
            return None
        layout = self._layout(call, op, args, kwargs)
        if layout is None:
            return None
        size, stride, dtype, order = layout
        if not pointwise.supports(call, dtype, self._device):
            return None
        if any(not self._is_plain(operand) for operand in call.operands if isinstance(operand, torch.Tensor)):
            return None
        value = self._value(call, tuple(size), dtype, order)
        if not self._sink.accepts(value.signature):
            return None
        if call.in_place:
            result = call.operands[0]
        else:
            result = torch.empty_strided(size, stride, dtype=dtype, device=self._device)
        self._add(value, result)
        return result

    def _layout(self, call: Call, op: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """What :func:`_layout_of` says of the result; None if it does not suit."""
        key = (op, str(kwargs), call.dim, *map(_description, call.operands))
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = _layout_of(op, args, kwargs)
        size, _, _, order = found
        suits = order is not None and (self.in_any_order or list(order) == sorted(order))
        return found if suits and 0 < math.prod(size) <= self.most_elements else None

    def _is_whole(self, tensor: Any) -> bool:
        """Whether this is all of a pending value's memory."""
        value = self._pending.get(storage_of(tensor))
        return (
            value is not None
            and tensor.dtype == value.dtype
            and tensor.numel() == value.elements
            and tensor.storage_offset() == 0
            and tensor.is_contiguous()
        )

    def _is_plain(self, tensor: Any) -> bool:
        """Whether kernels can count its elements, and if it is pending, it has the dtype of the deferred value."""
        value = self._pending.get(storage_of(tensor))
        return span(tensor) <= FAR and (value is None or tensor.dtype == value.dtype)

    # Values

    def _value(self, call: Call, size: tuple[int, ...], dtype: Any, order: Sequence[int]) -> Value:
        """The result of a call, with its dimensions in the order that memory has."""

        def operand(given: Any, size: Sequence[int]) -> Operand:
            return self._operand(given, tuple(size), order)

        shape = tuple(size[dim] for dim in order)
        if call.name not in ("concatenate", *pointwise.OF_ROWS):
            return Value(call.name, tuple(operand(given, size) for given in call.operands), shape, dtype)
        operands = tuple(operand(given, getattr(given, "shape", ())) for given in call.operands)
        if call.name in pointwise.OF_ROWS:
            return Value(call.name, operands, shape, dtype, columns=call.operands[0].shape[-1], parts=call.parts)
        return Value(call.name, operands, shape, dtype, call.sizes, order.index(call.dim))

    def _operand(self, operand: Any, size: tuple[int, ...], order: Sequence[int]) -> Operand:
        if not isinstance(operand, torch.Tensor):
            return Number(float(operand))
        strides = pointwise.strides_in(operand, size)
        strides = tuple(strides[dim] for dim in order)
        value = self._pending.get(storage_of(operand))
        if value is not None:
            return Part(value, operand.storage_offset(), strides)
        return Load(operand, strides, isinstance(operand, torch.nn.Parameter))


def storage_of(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def written_by(op: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The tensors among the arguments that the operation writes."""
    if op._schema.is_mutable:
        for position, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                yield from contents.tensors_in(given)


@functools.cache
def is_view(op: Any) -> bool:
    """Whether the operation launches nothing: its result is memory of an argument."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    if op.name().partition(".")[0] in _OTHER_VIEWS:
        return True
    returns = op._schema.returns
    return bool(returns) and all(item.alias_info is not None and not item.alias_info.is_write for item in returns)


def is_held(memory: Any) -> bool:
    """Whether anything other than the value holds its memory."""
    return bool(torch._C._storage_Use_Count(memory.untyped_storage()._cdata) > _NOBODYS)


def _holders_of_a_value() -> int:
    with torch.inference_mode():  # views hold no reference to their base
        alone = torch.ops.aten.alias.default(torch.empty(1))
        return int(torch._C._storage_Use_Count(alone.untyped_storage()._cdata))


_NOBODYS = _holders_of_a_value()


def _description(operand: Any) -> Any:
    if isinstance(operand, torch.Tensor):
        return operand.shape, operand.stride(), operand.dtype
    return type(operand), operand


def _layout_of(op: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Size, strides and dtype of what the operation returns, and its dimensions in the order that memory has; None for
    that if there are gaps.
    """
    meta = torch.device("meta")

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=meta)
        return meta if isinstance(leaf, torch.device) else leaf

    args, kwargs = _pytree.tree_map(moved, (args, kwargs))
    found = op(*args, **kwargs)
    # Dimensions of one element may have any stride: they stay where they are.
    order = tuple(range(found.ndim))
    if not found.is_contiguous():
        wide = iter(sorted((dim for dim in order if found.size(dim) > 1), key=lambda dim: -found.stride(dim)))
        order = tuple(dim if found.size(dim) == 1 else next(wide) for dim in order)
    dense = found.permute(order).is_contiguous()
    return found.size(), found.stride(), found.dtype, order if dense else None
