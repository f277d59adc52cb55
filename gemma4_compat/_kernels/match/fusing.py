"""Defer the small operations of a step, and compute them in few kernels where their results are needed.

A decoding step launches thousands of kernels that compute a few thousand numbers each: casts, squares, means and
products of the norms, rotary embeddings, residuals, an adapter's sums. :class:`Fusing` sees every operation of the
forward. If :mod:`pointwise` understands one, its result gets memory at once and numbers later: before the first other
operation that reads the result or overwrites its operands. If nobody holds the result by then, it is never written.
Products (:mod:`products`) are also deferred, until one has another input or a result is needed: those of one input
share a launch. Everything else runs unchanged and in order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gemma4_compat._gemma4.state import contents
from gemma4_compat._kernels.fuse import pointwise, repeated
from gemma4_compat._kernels.fuse.pointwise import Call, Load, Number, Operand, Part, Value
from gemma4_compat._kernels.match import custom
from gemma4_compat._kernels.programs import FAR, Kernel, span
from gemma4_compat._kernels.specs import dense, expert_rows, nf4_exact, nf4_gemv, products, shifting
from gemma4_compat._kernels.specs.products import Product

#: What is computed by kernels of ours, beside pointwise operations. A benchmark takes some away.
KINDS = frozenset({"products", "rows"})
#: The most arguments of a kernel: more than q, k and v with an adapter and their norms need, in 1 of CUDA's 4 KiB.
_MAX_TENSORS = 120
#: Views that do not say so in their schema.
_OTHER_VIEWS = ("aten::_unsafe_view", "aten::lift_fresh")


class Sink(Protocol):
    """Receives kernels."""

    def accepts(self, signature: tuple[Any, ...]) -> bool:
        """Whether an operation with these dtypes may be computed by a kernel of ours."""

    def kernel(self, kernel: Kernel, signatures: Iterable[tuple[Any, ...]]) -> None:
        """Note a kernel, or launch it; ``signatures`` belong to the operations in it."""


class Fusing(TorchDispatchMode):  # type: ignore[misc]
    """Inside, pointwise operations on ``device`` are deferred.

    Call :meth:`flush` before leaving, to compute what is still deferred; also before an event marks a point in a
    stream, and before freeing memory that an operation may read. ``rows`` reads the experts that are hit.

    Args:
        device: ``torch.device`` with an index.
        sink: receives the kernels.
        layouts: what is known about results, by operation and operands; kept by the caller.
    """

    ignores_launches = True  # a kernel that computes a weight may run before what is deferred

    def __init__(self, device: Any, sink: Sink, layouts: dict[Any, tuple[Any, ...]]) -> None:
        super().__init__()
        self._device, self._sink, self._layouts = device, sink, layouts
        self.rows = expert_rows.Rows(sink, device)
        self._pending: dict[int, Value] = {}  # by storage, the oldest first; for each its last value
        self._read: dict[int, Any] = {}  # storages that pending values are computed from
        # Deferred products with their results, by kind; computed before values.
        self._products: dict[type[Product], list[tuple[Product, Any]]] = {
            kind: [] for kind in (nf4_exact.Product, nf4_gemv.Product, dense.Product)
        }
        self._results: set[int] = set()  # storages of those results
        self._launching = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside. What torch would do against that takes a tenth of a capture."""
        return False

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._launching or _is_view(op):
            return op(*args, **kwargs)
        if op is torch.ops.aten.index.Tensor and self.rows.is_order(args[1]) and len(args[0]) == len(args[1][0]):
            return torch.ops.aten.alias.default(args[0])  # the experts are in that order already
        product = nf4_exact.match(op, args, kwargs) if "products" in KINDS else None
        if product is not None and self._sink.accepts(product.signature):
            return self._defer_product(product)
        if op is custom.operator("dense"):
            return self._defer_dense(*args)
        if op is custom.operator("product"):
            return self._defer_product(nf4_gemv.match(*args, **kwargs))
        if op is custom.operator("shift") and args[0].device == self._device:
            return self._shift(op, args)
        alone = op is custom.operator("means")  # of each token
        call = pointwise.mean(*args) if alone else pointwise.match(op, args, kwargs)
        if call is not None and (call.name != pointwise.MEAN or "rows" in KINDS):
            found = self._defer(call, op, args, kwargs)
            if found is not None:
                return found
        if (self._pending or self._results) and self._touches(op, args, kwargs):
            self.flush()
        return op(*args, **kwargs)

    def flush(self) -> None:
        """Compute what is deferred, except results that nobody holds any more."""
        self._flush_products()
        pending, self._pending = self._pending, {}
        values = [value for value in pending.values() if _is_held(value.memory)]
        if values:
            kernels, signatures = repeated.kernels_of(values)
            for kernel in kernels:
                self._launch(kernel, signatures)
        self._read = {}

    def _flush_products(self) -> None:
        """Compute the deferred products: those of one kind with one launch."""
        groups: list[Any] = [tuple(zip(*deferred, strict=True)) for deferred in self._products.values() if deferred]
        others = self._products[dense.Product]
        # LoRA's A beside the weights that it adapts.
        together = len(groups) == 2 and others and others[0][0].format.small
        for deferred in self._products.values():
            deferred.clear()
        self._results.clear()
        for launched in [groups] if together else [[group] for group in groups]:
            signatures = [wanted[0].signature for wanted, _ in launched]
            for kernel in self._apart(products.kernels_of, *launched):
                self._launch(kernel, signatures)

    def _launch(self, kernel: Kernel, signatures: list[tuple[Any, ...]]) -> None:
        self._apart(self._sink.kernel, kernel, signatures)

    def _apart(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call what makes or launches kernels: what that does with tensors is not part of the step."""
        self._launching = True
        try:
            return call(*args)
        finally:
            self._launching = False

    def _defer_product(self, product: Any) -> Any:
        """The result of a product that is computed later, together with others of the same input."""
        deferred = self._products[type(product)]
        if self._is_deferred(product.input):
            self.flush()
        elif deferred and (len(deferred) == product.most or not product.can_join(deferred[0][0])):
            self._flush_products()
        result = product.empty()
        deferred.append((product, torch.ops.aten.alias.default(result)))
        self._results.add(_storage(result))
        self._read[_storage(product.input)] = product.input
        return result

    def _defer_dense(self, given: Any, weight: Any, bias: Any) -> Any:
        """The result of a product with a weight that is not quantized."""
        if any(self._is_deferred(tensor) for tensor in (weight, bias) if tensor is not None):
            self.flush()
        given = self._before_cast(given)
        if weight.shape[1] > dense.SHORT:
            return self._defer_product(dense.product(given, weight, bias))
        if _storage(given) in self._pending:
            self.flush()
        value = custom.dot(given, weight, bias)
        result = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        self._add(value, result)
        return result

    def _shift(self, op: Any, args: Any) -> None:
        """Move the rows of a full sliding cache now: the attention that follows reads them, in this order."""
        if self._touches(op, args, {}):
            self.flush()
        found = shifting.kernel_of(*args[:4])
        if found is None or not self._sink.accepts(found[1]):
            op(*args)
        else:
            self._launch(found[0], [found[1]])

    def _before_cast(self, tensor: Any) -> Any:
        """What a tensor was cast from, if the cast is deferred: a kernel casts what it reads, with the same bits."""
        value = self._pending.get(_storage(tensor))
        if value is None or value.name != "cast" or value.elements != tensor.numel() or not tensor.is_contiguous():
            return tensor
        (operand,) = value.operands
        if not isinstance(operand, Load) or operand.dtype.itemsize >= value.dtype.itemsize:
            return tensor
        source = operand.tensor
        return source.view(tensor.shape) if source.is_contiguous() and source.numel() == value.elements else tensor

    def _is_deferred(self, tensor: Any) -> bool:
        """Whether its numbers, or some of them, are not in memory yet."""
        key = _storage(tensor)
        return key in self._pending or key in self._results

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
        size, stride, dtype = layout
        if not pointwise.supports(call, dtype, self._device):
            return None
        if any(not self._is_plain(operand) for operand in call.operands if isinstance(operand, torch.Tensor)):
            return None
        value = self._value(call, tuple(size), dtype)
        if not self._sink.accepts(value.signature):
            return None
        if call.in_place:
            result = call.operands[0]
        else:
            result = torch.empty_strided(size, stride, dtype=dtype, device=self._device)
        self._add(value, result)
        return result

    def _layout(self, call: Call, op: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """Size, strides and dtype of the result; None if they do not suit."""
        key = (op, str(kwargs), call.dim, *map(_description, call.operands))
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = _layout_of(op, args, kwargs)
        size, stride, dtype, suits = found
        return (size, stride, dtype) if suits else None

    def _is_whole(self, tensor: Any) -> bool:
        """Whether this is all of a pending value's memory."""
        value = self._pending.get(_storage(tensor))
        return (
            value is not None
            and tensor.dtype == value.dtype
            and tensor.numel() == value.elements
            and tensor.storage_offset() == 0
            and tensor.is_contiguous()
        )

    def _is_plain(self, tensor: Any) -> bool:
        """Whether kernels can count its elements, and if it is pending, it has the dtype of the deferred value."""
        value = self._pending.get(_storage(tensor))
        return span(tensor) <= FAR and (value is None or tensor.dtype == value.dtype)

    # Values

    def _value(self, call: Call, shape: tuple[int, ...], dtype: Any) -> Value:
        if call.name not in ("concatenate", pointwise.MEAN):
            return Value(call.name, tuple(self._operand(operand, shape) for operand in call.operands), shape, dtype)
        operands = tuple(self._operand(operand, tuple(operand.shape)) for operand in call.operands)
        if call.name == pointwise.MEAN:
            return Value(call.name, operands, shape, dtype, columns=call.operands[0].shape[-1], parts=call.parts)
        sizes = tuple(operand.shape[call.dim] for operand in call.operands)
        return Value(call.name, operands, shape, dtype, sizes, call.dim)

    def _operand(self, operand: Any, shape: tuple[int, ...]) -> Operand:
        if not isinstance(operand, torch.Tensor):
            return Number(float(operand))
        strides = pointwise.strides_in(operand, shape)
        value = self._pending.get(_storage(operand))
        if value is not None:
            return Part(value, operand.storage_offset(), strides)
        return Load(operand, strides, isinstance(operand, torch.nn.Parameter))

    def _add(self, value: Value, result: Any) -> None:
        for operand in value.operands:
            if isinstance(operand, Load):
                self._read[_storage(operand.tensor)] = operand.tensor
        key = _storage(result)
        # An in-place result keeps its place in the order; its memory is that of the value before.
        known = self._pending.get(key)
        value.memory = torch.ops.aten.alias.default(result) if known is None else known.memory
        self._pending[key] = value
        if len(self._pending) + len(self._read) >= _MAX_TENSORS:
            self.flush()

    def _touches(self, op: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation needs a deferred value, or changes one of its operands."""
        if not isinstance(op, torch._ops.OpOverload):
            return True
        if any(map(self._is_deferred, contents.tensors_in((args, tuple(kwargs.values()))))):
            return True
        return any(_storage(tensor) in self._read for tensor in _written(op, args, kwargs))


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(op: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The tensors among the arguments that the operation writes."""
    if op._schema.is_mutable:
        for position, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                yield from contents.tensors_in(given)


@functools.cache
def _is_view(op: Any) -> bool:
    """Whether the operation launches nothing: its result is memory of an argument."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    if op.name().partition(".")[0] in _OTHER_VIEWS:
        return True
    returns = op._schema.returns
    return bool(returns) and all(item.alias_info is not None and not item.alias_info.is_write for item in returns)


def _is_held(memory: Any) -> bool:
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
    """Size, strides and dtype of what the operation returns, and whether a small kernel suits it."""
    meta = torch.device("meta")

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=meta)
        return meta if isinstance(leaf, torch.device) else leaf

    args, kwargs = _pytree.tree_map(moved, (args, kwargs))
    found = op(*args, **kwargs)
    suits = found.is_contiguous() and 0 < math.prod(found.shape) <= pointwise.MAX_ELEMENTS
    return found.size(), found.stride(), found.dtype, suits
