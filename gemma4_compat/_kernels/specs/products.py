"""Products of a few rows with one or more weights in one launch: what all kinds of them have."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gemma4_compat._kernels.programs import Kernel, with_arguments

#: The type of 4-bit integers that stay packed, beside those of bitsandbytes.
INT4 = "int4"
#: Rows of the input that kernels with custom numerics take.
MAX_ROWS = 64
#: Those of one block, or of one multiplication by tensor cores. More are divided.
FEW_ROWS = 8
#: Multiplications by tensor cores, of eight rows each, that a block makes with what it reads.
_EIGHTS = 4


@dataclass(frozen=True, eq=False)
class Code:
    """What a kernel's text depends on, apart from the number of weights. There is one for each format.

    Attributes:
        function: the function template in ``cuda`` that computes products: ``nf4_gemv``, in a file with that name.
        arguments: of the template.
        given: C type of the input's numbers.
        fields: C types and names of what the function is given of a weight; None for what is absent. The last is the
            output.
        threads: of a block.
        resident: blocks of an SM; None for any number.
    """

    function: str
    arguments: tuple[str | int | bool, ...]
    given: str
    fields: tuple[tuple[str, str] | None, ...]
    threads: int
    resident: int | None = None


@dataclass(frozen=True, eq=False)
class Product(abc.ABC):
    """One product that a call asks for.

    Attributes:
        operation: the name in an operation's signature.
        most: weights of one launch.
        format: what decides its bits.
        input: ``[..., inputs]``, contiguous.
        weight: the tensors that the kernel reads, in the order of the parameters: packed weights, scales and so on.
        outputs: rows of the weight.
    """

    operation: ClassVar[str]
    most: ClassVar[int]
    format: Any
    input: Any
    weight: tuple[Any, ...]
    outputs: int

    @property
    @abc.abstractmethod
    def code(self) -> Code:
        """How it is computed."""

    @abc.abstractmethod
    def blocks(self, outputs: Sequence[int]) -> list[int]:
        """How many blocks each weight has, where those of a launch have so many rows."""

    def prepared(self) -> tuple[Kernel, Any] | None:
        """A kernel that comes before, and what it writes, which is read in place of the input; None without."""
        return None

    @property
    def signature(self) -> tuple[Any, ...]:
        """As for other operations: name, operands, dtype."""
        return self.operation, tuple(self.format), self.format.dtype

    def empty(self) -> Any:
        """Memory for the result, ``[..., outputs]``."""
        return self.input.new_empty((*self.input.shape[:-1], self.outputs), dtype=self.format.dtype)

    def can_join(self, other: Product) -> bool:
        """Whether one launch may compute both: they have the same format and read the same input."""
        return (
            self.code is other.code
            and self.input.data_ptr() == other.input.data_ptr()
            and self.input.untyped_storage()._cdata == other.input.untyped_storage()._cdata
        )


def kernels_of(*groups: tuple[Sequence[Product], Sequence[Any]]) -> list[Kernel]:
    """The kernels that write the results of products, in order: one, after those that prepare inputs.

    Args:
        groups: products that :meth:`Product.can_join`, and their results, contiguous. Each group has its own blocks,
            and reads nothing that another writes. A second one has no more threads a block than the first.
    """
    launched: list[Kernel] = []
    tensors: list[Any] = []
    results: list[Any] = []
    sizes: list[int | float] = []
    codes, blocks = [], []
    for products, written in groups:
        counts = products[0].blocks([one.outputs for one in products])
        first = products[0].prepared()
        launched += [] if first is None else [first[0]]
        tensors.append(products[0].input if first is None else first[1])
        for one, count in zip(products, counts, strict=True):
            tensors += one.weight
            sizes += one.outputs, count
        results += written
        codes.append((products[0].code, len(products)))
        blocks.append(sum(counts))
    sizes += blocks[:-1]
    text, threads = _text(tuple(codes)), codes[0][0].threads
    launched.append(Kernel(text, (*tensors, *results), len(results), tuple(sizes), threads, (sum(blocks), 1)))
    return launched


@functools.cache
def _text(groups: tuple[tuple[Code, int], ...]) -> str:
    """The kernel for one or two groups of products: how each is computed, and how many weights it has."""
    first = groups[0][0]
    name = first.function.partition("::")[0]
    reads, writes, sizes, body = _part(*groups[0], "", "blockIdx.x")
    files = [name]
    for other, weights in groups[1:]:
        files.append(other.function.partition("::")[0])
        also = _part(other, weights, "also_", "(blockIdx.x - also_first)")
        reads, writes, sizes = reads + also[0], writes + also[1], [*sizes, *also[2], "unsigned int also_first"]
        if other.threads < first.threads:
            also[3].insert(0, f"if (threadIdx.x >= {other.threads}u) return;")
        body = ["if (blockIdx.x < also_first) {", *body, "} else {", *also[3], "}"]
    head = "".join(f'#include "{file}.cuh"\n' for file in files)
    bounds = first.threads if first.resident is None else f"{first.threads}, {first.resident}"
    lines = [f'extern "C" __global__ void __launch_bounds__({bounds}) {name}({", ".join(reads + writes + sizes)}) {{']
    return head + "\n".join([*lines, *body, "}", ""])


def _part(code: Code, weights: int, own: str, block: str) -> tuple[list[str], list[str], list[str], list[str]]:
    """Parameters that are read, that are written and that are sizes, and the lines that compute a group's products.

    ``own`` is before the names of its parameters; ``block`` is C for the number of a block in the group.
    """
    present = [field for field in code.fields if field is not None]
    numbers = range(weights)
    reads = [f"const {code.given}* {own}input"]
    reads += [f"{c}* __restrict__ {own}{field}{number}" for number in numbers for c, field in present[:-1]]
    writes = [f"{present[-1][0]}* __restrict__ {own}output{number}" for number in numbers]
    sizes = [f"unsigned int {own}{size}{number}" for number in numbers for size in ("outputs", "blocks")]
    lines = [f"unsigned int block = {block}, outputs = {own}outputs0, blocks = {own}blocks0;"]
    lines += [f"{c}* {field} = {own}{field}0;" for c, field in (present[-1], *present[:-1])]
    for number in numbers[1:]:
        before = " + ".join(f"{own}blocks{other}" for other in range(number))
        names = "outputs", "blocks", *(name for _, name in present)
        chosen = "".join(f"{name} = {own}{name}{number}; " for name in names)
        lines.append(f"if ({block} >= {before}) {{ block = {block} - ({before}); {chosen}}}")
    values = ", ".join(field[1] if field else "nullptr" for field in code.fields)
    function = with_arguments(code.function, code.arguments)
    return reads, writes, sizes, [*lines, f"{function}(block, {own}input, {{{values}, outputs, blocks}});"]


def parts_of(rows: int) -> tuple[int, int]:
    """How many blocks share the rows of an input, and how many times eight each takes (``tensor_cores.cuh``)."""
    eights = -(-rows // FEW_ROWS)
    parts = -(-eights // _EIGHTS)
    return parts, -(-eights // parts)
