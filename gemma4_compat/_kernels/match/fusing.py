"""Defer the small operations of a step, and compute them in few kernels where their results are needed.

A decoding step launches thousands of kernels that compute a few thousand numbers each: casts, squares, means and
products of the norms, rotary embeddings, residuals, an adapter's sums. :class:`Fusing` sees every operation of the
forward. If :mod:`pointwise` understands one, its result gets memory at once and numbers later: before the first other
operation that reads the result or overwrites its operands. If nobody holds the result by then, it is never written.
Products (:mod:`products`) are also deferred, until one has another input or a result is needed: those of one input
share a launch. Everything else runs unchanged and in order.
"""

from __future__ import annotations

from typing import Any

import torch

from gemma4_compat._gemma4.state import contents
from gemma4_compat._kernels.fuse import pointwise, repeated
from gemma4_compat._kernels.fuse.pointwise import Load, Value
from gemma4_compat._kernels.match import custom
from gemma4_compat._kernels.match.deferring import Deferring, Sink, is_held, is_view, storage_of, written_by
from gemma4_compat._kernels.specs import dense, expert_rows, nf4_exact, nf4_gemv, products, shifting
from gemma4_compat._kernels.specs.products import Product

#: What is computed by kernels of ours, beside pointwise operations. A benchmark takes some away.
KINDS = frozenset({"products", "rows"})
#: The most arguments of a kernel: more than q, k and v with an adapter and their norms need, in 1 of CUDA's 4 KiB.
_MAX_TENSORS = 120


class Fusing(Deferring):
    """Inside, pointwise operations on ``device`` are deferred.

    Call :meth:`flush` before leaving, to compute what is still deferred; also before an event marks a point in a
    stream, and before freeing memory that an operation may read. ``rows`` reads the experts that are hit.

    Args:
        device: ``torch.device`` with an index.
        sink: receives the kernels.
        layouts: what is known about results, by operation and operands; kept by the caller.
    """

    def __init__(self, device: Any, sink: Sink, layouts: dict[Any, tuple[Any, ...]]) -> None:
        super().__init__(device, sink, layouts)
        self.rows = expert_rows.Rows(sink, device)
        self._read: dict[int, Any] = {}  # storages that pending values are computed from
        # Deferred products with their results, by kind; computed before values.
        self._products: dict[type[Product], list[tuple[Product, Any]]] = {
            kind: [] for kind in (nf4_exact.Product, nf4_gemv.Product, dense.Product)
        }
        self._results: set[int] = set()  # storages of those results

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._launching or is_view(op):
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
        call = pointwise.of_rows(args[0], parts=args[1]) if alone else pointwise.match(op, args, kwargs)
        if call is not None and (call.name not in pointwise.OF_ROWS or "rows" in KINDS):
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
        values = [value for value in pending.values() if is_held(value.memory)]
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

    def _defer_product(self, product: Any) -> Any:
        """The result of a product that is computed later, together with others of the same input."""
        deferred = self._products[type(product)]
        if self._is_deferred(product.input):
            self.flush()
        elif deferred and (len(deferred) == product.most or not product.can_join(deferred[0][0])):
            self._flush_products()
        result = product.empty()
        deferred.append((product, torch.ops.aten.alias.default(result)))
        self._results.add(storage_of(result))
        self._read[storage_of(product.input)] = product.input
        return result

    def _defer_dense(self, given: Any, weight: Any, bias: Any) -> Any:
        """The result of a product with a weight that is not quantized."""
        if any(self._is_deferred(tensor) for tensor in (weight, bias) if tensor is not None):
            self.flush()
        given = self._before_cast(given)
        if weight.shape[1] > dense.SHORT:
            return self._defer_product(dense.product(given, weight, bias))
        if storage_of(given) in self._pending:
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
        value = self._pending.get(storage_of(tensor))
        if value is None or value.name != "cast" or value.elements != tensor.numel() or not tensor.is_contiguous():
            return tensor
        (operand,) = value.operands
        if not isinstance(operand, Load) or operand.dtype.itemsize >= value.dtype.itemsize:
            return tensor
        source = operand.tensor
        return source.view(tensor.shape) if source.is_contiguous() and source.numel() == value.elements else tensor

    def _is_deferred(self, tensor: Any) -> bool:
        """Whether its numbers, or some of them, are not in memory yet."""
        key = storage_of(tensor)
        return key in self._pending or key in self._results

    def _add(self, value: Value, result: Any) -> None:
        for operand in value.operands:
            if isinstance(operand, Load):
                self._read[storage_of(operand.tensor)] = operand.tensor
        key = storage_of(result)
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
        return any(storage_of(tensor) in self._read for tensor in written_by(op, args, kwargs))
