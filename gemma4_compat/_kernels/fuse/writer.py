"""Writes one kernel that computes several results of small pointwise operations, with the functions of
``pointwise.cuh``.

In every result that is long enough, each thread computes the element with the thread's number. If it needs another
result that is not in memory yet, it computes that again: results are pure functions of what is in memory.

A *short* product, like LoRA's B, is computed where its result is needed (:data:`pointwise.DOT`), and a thread needs a
row of the weight for each of its elements. It reads the row before the kernel in front has ended. The row goes into
registers, so there must not be many of them.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections import ChainMap
from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

from gemma4_compat._kernels.fuse.pointwise import (
    DOT,
    Load,
    Number,
    Operand,
    Part,
    Value,
    everything,
    index_in,
    operations,
)
from gemma4_compat._kernels.programs import Kernel, kinds

NAME = "fused"
#: 128-bit loads of weights of short products that a thread issues before the kernel in front has ended, at most:
#: four registers each.
WORDS = 24


def dots_of(values: Sequence[Value], done: Collection[int]) -> list[Value]:
    """The short products that have the same number as the element of these values that needs them, and whose weight
    no kernel writes. ``done`` are ids of values in memory.
    """
    found: dict[int, Value] = {}
    seen = set(done)
    waiting = list(reversed(values))
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.name == DOT:
            weight = value.operands[1]
            if isinstance(weight, Load) and weight.constant and words_of_a_row(value):
                found[id(value)] = value
        elif not value.columns and not value.sizes:
            for operand in reversed(value.operands):
                if isinstance(operand, Part) and index_in(value.shape, operand.strides, operand.offset, "i") == "i":
                    waiting.append(operand.value)
    return list(found.values())


def words_of(values: Sequence[Value], done: Collection[int] = ()) -> int:
    """How many words of weights an element of these values needs for :func:`dots_of`."""
    return sum(map(words_of_a_row, dots_of(values, done)))


def is_read_ahead(value: Value) -> bool:
    """Whether all short products that it is computed from are among :func:`dots_of`, and there is one."""
    dots = [one for one in everything([value]) if one.name == DOT]
    return 0 < len(dots) == len(dots_of([value], ()))


def words_of_a_row(dot: Value) -> int:
    """The words in a row of a short product's weight; 0 if it is not read in words."""
    given, weight = dot.operands[:2]
    assert isinstance(given, Load)
    assert isinstance(weight, Load)
    each = 16 // weight.dtype.itemsize
    aligned = not any(operand.tensor.data_ptr() % 16 for operand in (given, weight))
    return dot.columns // each if aligned and given.dtype == weight.dtype and not dot.columns % each else 0


def kernel_of(values: Sequence[Value]) -> Kernel:
    """The kernel that computes these values, which need no mean of a row, into their memory."""
    return Writer().kernel(values)


Scope = MutableMapping[tuple[Any, ...], str]


class Writer:
    """Writes the lines of a kernel.

    Args:
        done: values that are in memory, although they are deferred.
    """

    def __init__(self, done: Collection[Value] = ()) -> None:
        self._done = frozenset(map(id, done))
        self._kinds = kinds()
        self._lines: list[str] = []
        self._count = 0
        self._reads: dict[tuple[int, Any], tuple[str, Any]] = {}  # by address and dtype: parameter and tensor
        self._values: dict[int, Value] = {}  # whose numbers are in a scope: alive until the end
        self._ahead: dict[int, str] = {}  # by short product: C for its weight that is read already
        self._constant: dict[str, Any] = {}  # by parameter: a tensor that no kernel of a step writes

    def kernel(self, values: Sequence[Value]) -> Kernel:
        # Sizes are arguments: the text is the same for every length of a cache.
        sizes = tuple(sorted({value.elements for value in values}, reverse=True))
        begin = "unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;"
        words = words_of(values, self._done) if len(sizes) == 1 else 0
        if 0 < words <= WORDS:
            reads = "\n".join(self._read_ahead(values, ""))
            begin += f"\nWord16 ahead[{words}];\nif (i < n0) {{\n{reads}\n}}"
        for number, elements in enumerate(sizes):
            self._line(f"if (i < n{number}) {{")
            scope: Scope = {}
            for position, value in enumerate(values):
                if value.elements == elements:
                    self._line(self._stored(value, position, "i", scope))
            self._line("}")
        return Kernel(
            self._text("pointwise.cuh", NAME, begin, values, len(sizes)), self._tensors(values), len(values), sizes
        )

    def _read_ahead(self, values: Sequence[Value], first: str) -> list[str]:
        """Lines that read what the short products in element ``i`` of these values need of weights, into ``ahead``.

        They may come before ``wait_for_kernel_before()``. ``first`` is C for the number of the first word.
        """
        lines, number = [], 0
        for dot in dots_of(values, self._done):
            weight = dot.operands[1]
            assert isinstance(weight, Load)
            count, name = words_of_a_row(dot), self._read(weight)
            row = f"{name} + i % {dot.shape[-1]}u * {dot.columns}u"
            self._ahead[id(dot)] = place = f"ahead + {first}{number}"
            lines.append(f"read_ahead<{count}>({place}, {row});")
            number += count
        return lines

    def _text(self, file: str, name: str, begin: str, values: Sequence[Value], sizes: int) -> str:
        """The kernel with the lines so far, which stores these values."""
        parameters = [
            *(
                f"const {self._kinds[tensor.dtype].c}* {'__restrict__ ' * (read in self._constant)}{read}"
                for read, tensor in self._reads.values()
            ),
            *(f"{self._kinds[value.dtype].c}* __restrict__ w{number}" for number, value in enumerate(values)),
            *(f"unsigned int n{number}" for number in range(sizes)),
        ]
        lines = [begin, "let_next_kernel_begin();", "wait_for_kernel_before();", *self._lines]
        return (
            f'#include "{file}"\nextern "C" __global__ void {name}({", ".join(parameters)}) {{\n'
            + "\n".join(lines)
            + "\n}\n"
        )

    def _tensors(self, values: Sequence[Value]) -> tuple[Any, ...]:
        return (*(tensor for _, tensor in self._reads.values()), *(value.memory for value in values))

    def _stored(self, value: Value, number: int, at: str, scope: Scope) -> str:
        """The line that writes element ``at`` of the kernel's result with that number."""
        return f"w{number}[{at}] = {self._kinds[value.dtype].store.format(self._value(value, at, scope))};"

    def _line(self, text: str) -> None:
        self._lines.append(text)

    def _new(self, kind: str, expression: str) -> str:
        self._count += 1
        name = f"{'jr'[kind == 'float']}{self._count}"
        self._line(f"{kind} {name} = {expression};")
        return name

    def _value(self, value: Value, at: str, scope: Scope) -> str:
        """The name of the value's element ``at`` that index."""
        key = (id(value), at)
        if key not in scope:
            self._values[id(value)] = value
            if value.sizes:
                scope[key] = self._concatenated(value, at, scope)
            else:
                scope[key] = (self._dot if value.name == DOT else self._computed)(value, at, scope)
        return scope[key]

    def _computed(self, value: Value, at: str, scope: Scope) -> str:
        found = [self._operand(operand, value.shape, at, scope) for operand in value.operands]
        how = operations()[value.name]
        expression = how.source.format(*found)
        return self._new("float", self._kinds[value.dtype].rounded.format(expression) if how.rounds else expression)

    def _dot(self, value: Value, at: str, scope: Scope) -> str:
        """A sum of products over the inputs, in order; the operands are in memory."""
        given, weight, *bias = (operand for operand in value.operands if isinstance(operand, Load))
        outputs = value.shape[-1]
        names = [self._read(operand) for operand in (given, weight)]
        row = self._index(f"{at} % {outputs}u", scope)
        of_input = self._index(f"({at} / {outputs}u) * {value.columns}u", scope)
        x, w = f"{names[0]} + {of_input}", f"{names[1]} + {row} * {value.columns}u"
        kind = self._kinds[weight.dtype].name
        if words := words_of_a_row(value):
            read = (self._ahead.get(id(value)) if at == "i" else None) or f"(const Word16*)({w})"
            result = self._new("float", f"dot_of_words<{kind}, {words}>({x}, {read})")
        else:
            of = f"{self._kinds[given.dtype].name}, {kind}, {value.columns}"
            result = self._new("float", f"dot<{of}>({x}, {w})")
        if bias:
            self._line(f"{result} = __fadd_rn({result}, {self._loaded(bias[0], row, scope)});")
        return self._new("float", self._kinds[value.dtype].rounded.format(result))

    def _concatenated(self, value: Value, at: str, scope: Scope) -> str:
        """The element, from the operand that holds it; the index into that operand counts from its own start."""
        inner = math.prod(value.shape[value.dim + 1 :])
        whole = inner * value.shape[value.dim]
        within = self._new("unsigned int", f"{at} % {whole}u")
        row = self._new("unsigned int", f"{at} / {whole}u")
        result = self._new("float", "0.0f")
        begin = 0
        for operand, size in zip(value.operands, value.sizes, strict=True):
            self._line(f"{'if' if not begin else 'else if'} ({within} < {(begin + size) * inner}u) {{")
            nested: Scope = ChainMap({}, scope)
            own = self._new("unsigned int", f"{row} * {size * inner}u + ({within} - {begin * inner}u)")
            shape = (*value.shape[: value.dim], size, *value.shape[value.dim + 1 :])
            self._line(f"{result} = {self._operand(operand, shape, own, nested)};")
            self._line("}")
            begin += size
        return result

    def _operand(self, operand: Operand, shape: tuple[int, ...], at: str, scope: Scope) -> str:
        if isinstance(operand, Number):
            return literal(operand.value)
        offset = operand.offset if isinstance(operand, Part) else 0
        index = self._index(index_in(shape, operand.strides, offset, at), scope)
        if isinstance(operand, Part):
            if id(operand.value) not in self._done and not operand.value.is_there:
                return self._value(operand.value, index, scope)
            operand = Load(operand.value.memory, operand.strides)
        return self._loaded(operand, index, scope)

    def _index(self, expression: str, scope: Scope) -> str:
        if expression.isidentifier():
            return expression
        key = ("index", expression)
        if key not in scope:
            scope[key] = self._new("unsigned int", expression)
        return scope[key]

    def _read(self, operand: Load) -> str:
        """The parameter that points to the operand."""
        address = (operand.tensor.data_ptr(), operand.dtype)
        return self._reads.setdefault(address, (f"p{len(self._reads)}", operand.tensor))[0]

    def _loaded(self, operand: Load, index: str, scope: Scope) -> str:
        name = self._read(operand)
        if operand.constant:
            self._constant[name] = operand.tensor
        key = (name, index)
        if key not in scope:
            scope[key] = self._new("float", self._kinds[operand.dtype].load.format(f"{name}[{index}]"))
        return scope[key]


def literal(value: float) -> str:
    """A number in C, as PyTorch passes it to a kernel: rounded to ``float``."""
    bits = struct.pack("<f", ctypes.c_float(value).value)  # a large one is infinite
    return f"__uint_as_float(0x{int.from_bytes(bits, 'little'):08x}u)"
