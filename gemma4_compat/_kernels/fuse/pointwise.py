"""Operations that compute each element of their result on its own, or the mean or sum of a row, with the bits of CUDA.

Each operation is one C expression of ``float`` operands. PyTorch also computes 16-bit dtypes in ``float`` and rounds
once, at the end of each operation (``opmath_t`` in ATen/OpMathType.h); so do the fused kernels. ``__fmul_rn`` and its
like keep the compiler from contracting two operations into one. Each expression is checked on the GPU for PyTorch's
bits before its first use (:mod:`kernels`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: The name of a mean over the last dimension, and of a sum.
MEAN, SUM = OF_ROWS = "mean", "sum"
#: The name of a product with few inputs (:mod:`dense`): each element is a sum over them, in order.
DOT = "dot"
#: An operation on more elements needs no small kernel.
MAX_ELEMENTS = 1 << 22
WARP = 32
_MOST_THREADS = 512  # of a row: max_reduce_threads of PyTorch
_SUMS = 4  # of a thread: vt0, and input_vec_size


@dataclass(frozen=True)
class Operation:
    """How one element is computed.

    Attributes:
        source: a C expression; ``{0}`` and so on stand for ``float`` operands.
        reference: the PyTorch function, on tensors and numbers.
        rounds: whether the expression's value may need rounding to the result's dtype.
    """

    source: str
    reference: Callable[..., Any] | None
    rounds: bool = True


@functools.cache
def operations() -> dict[str, Operation]:
    """By name."""
    import torch

    return {
        "move": Operation("{0}", lambda x: x.clone(), rounds=False),
        "cast": Operation("{0}", None),  # the reference is a cast to the result's dtype
        "constant": Operation("{0}", None),
        "concatenate": Operation("", None, rounds=False),
        "negate": Operation("-{0}", torch.neg, rounds=False),
        "multiply": Operation("__fmul_rn({0}, {1})", torch.mul),
        "add": Operation("__fadd_rn({0}, {1})", torch.add),
        "subtract": Operation("__fsub_rn({0}, {1})", torch.sub),
        "divide": Operation("__fdiv_rn({0}, {1})", torch.div),
        # By a number: PyTorch multiplies by its reciprocal (BinaryDivTrueKernel.cu).
        "divide_by_number": Operation("__fmul_rn({0}, __fdiv_rn(1.0f, {1}))", torch.div),
        "square": Operation("__fmul_rn({0}, {0})", lambda x: torch.pow(x, 2)),
        "reciprocal_root": Operation("rsqrtf({0})", torch.rsqrt),
        "power_of_minus_half": Operation("rsqrtf({0})", lambda x: torch.pow(x, -0.5)),
        "power_of_minus_three_halves": Operation("powf({0}, -1.5f)", lambda x: torch.pow(x, -1.5)),
        "tanh": Operation("tanhf({0})", torch.tanh),
        "gelu_tanh": Operation("gelu_tanh({0})", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        "gelu_tanh_backward": Operation(
            "gelu_tanh_backward({0}, {1})", lambda dy, x: torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
        ),
        "where": Operation("({0} ? {1} : {2})", torch.where, rounds=False),
        MEAN: Operation("", lambda x: x.mean(-1, keepdim=True), rounds=False),
        SUM: Operation("", lambda x: x.sum(-1, keepdim=True), rounds=False),
        DOT: Operation("", None),
    }


@dataclass(frozen=True)
class Number:
    """An operand whose value Python knows."""

    value: float


@dataclass(frozen=True, eq=False)
class Load:
    """An operand in memory: for an index of the result, the element of ``tensor`` at these ``strides``.

    Attributes:
        constant: whether no kernel of a step writes it, so that it can be read before the kernel in front has ended.
    """

    tensor: Any
    strides: tuple[int, ...]
    constant: bool = False

    @property
    def dtype(self) -> Any:
        """The tensor's dtype."""
        return self.tensor.dtype


@dataclass(frozen=True, eq=False)
class Part:
    """An operand that is not computed yet: elements of ``value``, in the order of its memory."""

    value: Value
    offset: int
    strides: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """The value's dtype."""
        return self.value.dtype


Operand = Number | Load | Part


@dataclass(eq=False)
class Value:
    """A result to compute: contiguous, starting at the first element of its memory.

    Attributes:
        name: of the operation.
        operands: in its order; for "concatenate", "mean", "sum" and "dot", each with the strides of its own shape.
        shape: of the result.
        dtype: of the result, a ``torch.dtype``.
        sizes: for "concatenate", the length of each operand along ``dim``.
        columns: for "mean", "sum" and "dot", how many numbers each element is the mean, or a sum, of.
        parts: for "mean", in how many calls PyTorch would compute these means: its order of additions depends on it.
        memory: a tensor on the memory that receives the result.
        is_there: whether its numbers are in memory.
    """

    name: str
    operands: tuple[Operand, ...]
    shape: tuple[int, ...]
    dtype: Any
    sizes: tuple[int, ...] = ()
    dim: int = 0
    columns: int = 0
    parts: int = 1
    memory: Any = None
    is_there: bool = False
    elements: int = field(init=False)

    def __post_init__(self) -> None:
        self.elements = math.prod(self.shape)

    @property
    def is_of_rows(self) -> bool:
        """Whether each element is the mean or the sum of a row."""
        return self.name in OF_ROWS

    @property
    def signature(self) -> tuple[Any, ...]:
        """What decides its bits, apart from the operands' values: the name, and the dtypes, numbers or sizes."""
        if self.is_of_rows:
            return self.name, (self.elements // self.parts, self.columns), self.dtype
        kinds = tuple(operand.value if isinstance(operand, Number) else operand.dtype for operand in self.operands)
        return self.name, kinds, self.dtype


@dataclass(frozen=True)
class Call:
    """What an ATen call computes: an operation and its operands, numbers and tensors; ``sizes`` and the others are as
    in a :class:`Value`.
    """

    name: str
    operands: tuple[Any, ...]
    dim: int = 0
    in_place: bool = False
    parts: int = 1
    sizes: tuple[int, ...] = ()


def match(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """The call in terms of the operations above; None if they cannot express it.

    Args:
        op: an ``OpOverload``.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    rule = _rules().get(op)
    return None if rule is None else rule(args, kwargs)


_Rule = Callable[[Sequence[Any], dict[str, Any]], Call | None]


@functools.cache
def _rules() -> dict[Any, _Rule]:
    import torch

    aten = torch.ops.aten
    return {
        aten._to_copy.default: _cast,
        aten.clone.default: _clone,
        aten.neg.default: _plain("negate"),
        aten.mul.Tensor: _plain("multiply"),
        aten.mul.Scalar: _plain("multiply"),
        aten.mul_.Tensor: _plain("multiply", in_place=True),
        aten.add.Tensor: _plain("add"),
        aten.add_.Tensor: _plain("add", in_place=True),
        aten.sub.Tensor: _plain("subtract"),
        aten.div.Tensor: _divide,
        aten.div.Scalar: _divide,
        aten.pow.Tensor_Scalar: _power,
        aten.rsqrt.default: _plain("reciprocal_root"),
        aten.tanh.default: _plain("tanh"),
        aten.gelu.default: _gelu("gelu_tanh"),
        aten.gelu_backward.default: _gelu("gelu_tanh_backward"),
        aten.where.self: _plain("where"),
        aten.cat.default: _concatenate,
        aten.slice_backward.default: _pad,
        aten.scalar_tensor.default: _constant,
        aten.mean.dim: _of_rows(MEAN),
        aten.sum.dim_IntList: _of_rows(SUM),
    }


def _plain(name: str, *, in_place: bool = False) -> _Rule:
    def rule(args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
        return None if kwargs else Call(name, tuple(args), in_place=in_place)

    return rule


def _cast(args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    import torch

    (tensor,) = args
    expected: dict[str, tuple[Any, ...]] = {
        "device": (None, tensor.device),
        "layout": (None, torch.strided),
        "pin_memory": (None, False),
        "memory_format": (None, torch.preserve_format, torch.contiguous_format),
        "non_blocking": (False, True),
        "dtype": (kwargs.get("dtype"),),
    }
    if any(value not in expected.get(name, ()) for name, value in kwargs.items()):
        return None
    return Call("move" if kwargs.get("dtype") in (None, tensor.dtype) else "cast", (tensor,))


def _clone(args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    import torch

    formats = (None, torch.preserve_format, torch.contiguous_format)
    return Call("move", tuple(args)) if kwargs.get("memory_format") in formats else None


def _divide(args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    name = "divide_by_number" if _is_number(args[1]) else "divide"
    return None if kwargs or _is_number(args[0]) else Call(name, tuple(args))


#: A power of 1 copies.
_POWERS = {1: "move", 2: "square", -0.5: "power_of_minus_half", -1.5: "power_of_minus_three_halves"}


def _power(args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    name = _POWERS.get(args[1])
    return None if kwargs or name is None else Call(name, (args[0],))


def _gelu(name: str) -> _Rule:
    def rule(args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
        return Call(name, tuple(args)) if kwargs == {"approximate": "tanh"} else None

    return rule


def _concatenate(args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    tensors = tuple(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not 1 <= len(tensors) <= 4 or any(tensor.ndim != tensors[0].ndim or not tensor.ndim for tensor in tensors):
        return None
    return _concatenated(tensors, dim % tensors[0].ndim)


def _concatenated(operands: Sequence[Any], dim: int, sizes: Sequence[int] = ()) -> Call:
    return Call("concatenate", tuple(operands), dim, sizes=tuple(sizes or [one.shape[dim] for one in operands]))


def _pad(args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """The gradient of a slice: zeros around that of the part that was taken."""
    tensor, shape, dim, start, end, step = args
    dim %= tensor.ndim
    whole, size = shape[dim], tensor.shape[dim]
    if kwargs or step != 1 or not 0 <= start < start + size == min(end, whole):
        return None
    parts = [part for part in ((0.0, start), (tensor, size), (0.0, whole - start - size)) if part[1]]
    return _concatenated([one for one, _ in parts], dim, [length for _, length in parts])


def _of_rows(name: str) -> _Rule:
    def rule(args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
        tensor, dims, *more = args
        keeps = more == [True] or (not more and kwargs.get("keepdim") is True)
        if not keeps or kwargs.get("dtype") is not None or dims not in ([-1], [tensor.ndim - 1]):
            return None
        return of_rows(tensor, name)

    return rule


def of_rows(tensor: Any, name: str = MEAN, parts: int = 1) -> Call | None:
    """The means, or sums, of the rows of a tensor, as PyTorch computes them in so many calls."""
    columns = tensor.shape[-1]
    if not _is_dense(tensor) or order(tensor.numel() // columns // parts, columns) is None:
        return None
    return Call(name, (tensor,), parts=parts)


def _is_dense(tensor: Any) -> bool:
    """Whether rows lie one after another, in any order."""
    outer = sorted((stride, size) for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1]) if size > 1)
    expected = tensor.shape[-1]
    for stride, size in outer:
        if stride != expected:
            return False
        expected *= size
    return bool(tensor.stride(-1) == 1 or tensor.shape[-1] == 1)


def _constant(args: Sequence[Any], _kwargs: dict[str, Any]) -> Call | None:
    return Call("constant", tuple(args)) if _is_number(args[0]) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def supports(call: Call, dtype: Any, device: Any) -> bool:
    """Whether the operations define the result of this dtype for these operands on this device."""
    import torch

    floats = (torch.float32, torch.bfloat16, torch.float16)
    if dtype not in floats:
        return False
    for position, operand in enumerate(call.operands):
        if not isinstance(operand, torch.Tensor):
            if not _is_number(operand):
                return False
            continue
        if type(operand) not in (torch.Tensor, torch.nn.Parameter) or operand.device != device:
            return False
        if call.name == "where" and position == 0:
            if operand.dtype != torch.bool:
                return False
        elif operand.dtype not in floats:
            return False
        elif operand.dtype != dtype and call.name != "cast" and dtype != torch.float32:
            return False  # PyTorch rounds the operand first
        elif operand.dtype != dtype and call.name in ("concatenate", *OF_ROWS):
            return False
    return True


class Order(NamedTuple):
    """Which thread adds what.

    Attributes:
        threads: that share a row.
        vector: whether a thread reads four neighbours at once, one for each of its sums; otherwise every fourth of its
            elements belongs to the same sum.
    """

    threads: int
    vector: bool


@functools.cache
def order(rows: int, columns: int) -> Order | None:
    """The order in which PyTorch adds contiguous rows of float32 numbers; None if it divides a row among warps or
    blocks.

    Follows ``setReduceConfig`` and ``ReduceConfig::set_block_dimension``.
    """
    vector = columns >= 128
    if columns < WARP or (vector and columns % _SUMS):
        return None
    wide = columns // _SUMS if vector else columns
    width, height = min(_power_of_two(wide), WARP), min(_power_of_two(rows), _MOST_THREADS)
    height = min(height, _MOST_THREADS // width)
    width = min(_power_of_two(wide), _MOST_THREADS // height)
    if -(-columns // width) >= min(height * 16, 256):
        return None
    return Order(width, vector)


def _power_of_two(number: int) -> int:
    """The largest power of two that is not larger, at most the number of threads."""
    return min(1 << (number.bit_length() - 1), _MOST_THREADS)


def turns(columns: int, found: Order) -> int:
    """How often each thread reads."""
    each = columns // _SUMS if found.vector else columns
    return -(-each // found.threads)


def strides_in(tensor: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The tensor's strides when it is broadcast to ``shape``."""
    missing = len(shape) - tensor.ndim
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return (*(0,) * missing, *(0 if size == 1 else int(stride) for size, stride in pairs))


def merged(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Sizes and strides, from the innermost dimension outwards, with neighbours that lie one after another as one."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, stride))
    return found


def index_in(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, at: str) -> str:
    """C for where the element with number ``at``, counted in ``shape``, is with these strides."""
    groups = merged(shape, strides)
    terms = []
    inner = 1
    for number, (size, stride) in enumerate(groups):
        if stride:
            coordinate = at if inner == 1 else f"({at} / {inner}u)"
            if number < len(groups) - 1:
                coordinate = f"({coordinate} % {size}u)"
            terms.append(coordinate if stride == 1 else f"{coordinate} * {stride}u")
        inner *= size
    if offset or not terms:
        terms.append(f"{offset}u")
    return " + ".join(terms)


def in_order(values: Sequence[Value], done: Sequence[Value] = ()) -> list[Value]:
    """The values, and those that they are computed from, each after those that it needs; without those that are
    ``done``, or in memory.
    """
    found: dict[int, Value] = {}
    seen = set(map(id, done))
    for value in values:
        _visit(value, seen, found)
    return list(found.values())


def _visit(value: Value, seen: set[int], found: dict[int, Value]) -> None:
    """No function inside another, which would be a cycle: a capture collects no garbage, and values hold memory."""
    if value.is_there or id(value) in seen:
        return
    seen.add(id(value))
    for operand in value.operands:
        if isinstance(operand, Part):
            _visit(operand.value, seen, found)
    found[id(value)] = value


def everything(values: Sequence[Value]) -> Iterator[Value]:
    """Each value once, including those it is computed from, unless their numbers are in memory."""
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) not in seen:
            seen.add(id(value))
            parts = [operand.value for operand in value.operands if isinstance(operand, Part)]
            waiting += [part for part in parts if not part.is_there]
            yield value
