"""Writes kernels of large results, with the functions of ``runs.cuh``.

A thread computes a *run*, eight numbers side by side, with 128-bit loads and stores. An operand that has them side by
side is also read in runs; one that is the same for a whole run is read once. All results of a kernel have as many
numbers.

In a kernel of rows, a warp has a row and a lane runs of four, so that each lane has the numbers that PyTorch's
reduction of many rows gives it. What there is once for a row is computed before the loop over its numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence

from gemma4_compat._kernels.fuse.pointwise import (
    WARP,
    Load,
    Number,
    Operand,
    Part,
    Value,
    index_in,
    merged,
    order,
)
from gemma4_compat._kernels.fuse.row_writer import means_of, reduction
from gemma4_compat._kernels.fuse.writer import Scope, Writer, literal
from gemma4_compat._kernels.programs import Kernel

NAME, OF_ROWS = "runs", "rows_of_runs"
_THREADS = 256
#: Numbers of a run; in a row, those that a lane adds up in four sums.
_RUN, _LANES_RUN = 8, 4
#: Rows of a block.
_WARPS = 4
_ROW = "row"


def kernel_of(values: Sequence[Value]) -> Kernel:
    """The kernel that computes these values, which have as many elements, or one for each row, into their memory."""
    reductions = means_of(values, ())
    if not reductions:
        return RunWriter().kernel(values)
    return RunWriter().kernel_of_rows(values, reductions)


def is_added_by_warps(rows: int, columns: int) -> bool:
    """Whether PyTorch has a warp add each row, and its lanes four neighbours at a time."""
    found = order(rows, columns)
    return found is not None and found.vector and found.threads == WARP


def is_by_rows(value: Value, rows: int, columns: int) -> bool:
    """Whether a warp can compute a row of the value: it needs only means and sums of that row."""
    return value.elements in (rows, rows * columns) and _keeps_rows(value, rows, {})


def _keeps_rows(value: Value, rows: int, known: dict[int, bool]) -> bool:
    """Whether the row of each element needs only reductions of the same row."""
    if id(value) not in known:
        known[id(value)] = not means_of([value], ()) or all(
            _is_of_row(operand, shape, rows) and _keeps_rows(operand.value, rows, known)
            for operand, shape in _parts(value)
            if means_of([operand.value], ())
        )
    return known[id(value)]


def _parts(value: Value) -> Iterator[tuple[Part, tuple[int, ...]]]:
    """What is not in memory yet among the operands, with the shape in which the value counts them."""
    for number, operand in enumerate(value.operands):
        if isinstance(operand, Part) and not operand.value.is_there:
            shape = value.shape
            if value.sizes:
                shape = (*shape[: value.dim], value.sizes[number], *shape[value.dim + 1 :])
            yield operand, (*shape[:-1], value.columns) if value.is_of_rows else shape


def _is_of_row(operand: Part, shape: tuple[int, ...], rows: int) -> bool:
    """Whether a row of this shape needs only the same row of the operand."""
    width, own = shape[-1], operand.value.elements // rows
    groups = merged(shape, operand.strides)
    if groups == [(operand.value.elements, 1)]:
        return not operand.offset
    if operand.value.elements != own * rows or operand.offset + (width if own > 1 else 1) > own:
        return False
    if own == 1:
        return groups == [(width, 0), (rows, 1)]
    return groups == [(width, 1), (rows, own)]


class RunWriter(Writer):
    """Writes one kernel. Its lines run for each number, once for a run, or once for a row."""

    def __init__(self) -> None:
        super().__init__()
        self._each = 1
        self._rows = 0  # if a warp has a row
        self._begins: dict[str, str] = {}  # by index: C for the index of the first number, if it is one of a run
        self._same: set[str] = set()  # indices that are the same for all numbers of a run
        self._once: list[str] = []  # lines
        self._of_run: Scope = {}
        self._of_row: Scope = {}
        self._row_lines: list[str] = []
        self._reduced: dict[int, str] = {}

    def kernel(self, values: Sequence[Value]) -> Kernel:
        """Each thread has a run."""
        elements = values[0].elements
        self._each = next(each for each in (_RUN, _LANES_RUN, 1) if not elements % each)
        loop = self._loop(functools.partial(self._results, values, range(len(values))))
        self._lines = ["if (first < n0) {", *loop, *self._writes(values, range(len(values))), "}"]
        begin = f"const unsigned int first = (blockIdx.x * blockDim.x + threadIdx.x) * {self._each}u;"
        text = self._text("runs.cuh", NAME, begin, values, 1)
        grid = -(-elements // (self._each * _THREADS)), 1
        return Kernel(text, self._tensors(values), len(values), (elements,), _THREADS, grid)

    def kernel_of_rows(self, values: Sequence[Value], reductions: Sequence[Value]) -> Kernel:
        """Each warp has a row."""
        self._each, self._rows = _LANES_RUN, reductions[0].elements
        columns = reductions[0].columns
        lines = ["if (row < n0) {", f"const unsigned int start = row * {columns}u;"]
        for number, one in enumerate(reductions):
            self._reduced[id(one)] = name = f"whole{number}"
            loop = self._loop(functools.partial(self._added, one))
            lines += [*self._for_the_row(), f"float {name};", "{ float parts[4] = {0.0f, 0.0f, 0.0f, 0.0f};"]
            lines += [*_turns(columns, loop), f"{name} = {reduction(one, WARP)}(parts, nullptr); }}"]
        numbers = [number for number, value in enumerate(values) if value.elements != self._rows]
        loop = self._loop(functools.partial(self._results, values, numbers))
        stores = []
        for number, value in enumerate(values):
            if value.elements == self._rows:
                found = self._value(value, _ROW, {})
                stores.append(f"w{number}[row] = {self._kinds[value.dtype].store.format(found)};")
        lines += self._for_the_row()
        if stores:
            lines += ["if (lane == 0u) {", *stores, "}"]
        if numbers:
            lines += _turns(columns, [*loop, *self._writes(values, numbers)])
        self._lines = [*lines, "}"]
        begin = (
            f"const unsigned int lane = threadIdx.x % {WARP}u, row = blockIdx.x * {_WARPS}u + threadIdx.x / {WARP}u;"
        )
        text = self._text("runs.cuh", OF_ROWS, begin, values, 1)
        grid = -(-self._rows // _WARPS), 1
        return Kernel(text, self._tensors(values), len(values), (self._rows,), _WARPS * WARP, grid)

    def _for_the_row(self) -> list[str]:
        """The new lines of the row."""
        lines, self._row_lines = self._row_lines, []
        return lines

    def _loop(self, each: Callable[[Scope], None]) -> list[str]:
        """Lines that do something for every number ``i`` of the run that begins at ``first``."""
        self._lines, self._once, self._of_run = [], [], {}
        self._begins, self._same = {"i": "first"}, set()
        each({})
        begin = f"for (int e = 0; e < {self._each}; ++e) {{ const unsigned int i = first + e;"
        return [*self._once, "#pragma unroll", begin, *self._lines, "}"]

    def _results(self, values: Sequence[Value], numbers: Sequence[int], scope: Scope) -> None:
        for number in numbers:
            self._once.append(f"float s{number}[{self._each}];")
        for number in numbers:
            self._line(f"s{number}[e] = {self._value(values[number], 'i', scope)};")

    def _added(self, one: Value, scope: Scope) -> None:
        element = self._operand(one.operands[0], (*one.shape[:-1], one.columns), "i", scope)
        self._line(f"parts[e] = __fadd_rn(parts[e], {element});")

    def _writes(self, values: Sequence[Value], numbers: Sequence[int]) -> list[str]:
        kinds = {number: self._kinds[values[number].dtype].name for number in numbers}
        return [f"write_run<{kinds[number]}, {self._each}>(w{number} + first, s{number});" for number in numbers]

    # Operands

    def _value(self, value: Value, at: str, scope: Scope) -> str:
        if value.is_of_rows:
            return self._reduced[id(value)]
        if at == _ROW:
            with self._instead(self._row_lines):
                return super()._value(value, at, self._of_row)
        if at in self._same:
            with self._instead(self._once):
                return super()._value(value, at, self._of_run)
        if self._is_of_the_row(value, at):
            with self._instead(self._row_lines):
                return super()._value(value, "i", self._of_row)
        return super()._value(value, at, scope)

    def _is_of_the_row(self, value: Value, at: str) -> bool:
        """Whether all elements of a row are the same: those of a number for each row, repeated."""
        if not self._rows or at not in self._begins or value.sizes:
            return False
        tensors = [operand for operand in value.operands if not isinstance(operand, Number)]
        return bool(tensors) and all(self._is_repeated(operand, value.shape) for operand in tensors)

    def _is_repeated(self, operand: Load | Part, shape: tuple[int, ...]) -> bool:
        offset = operand.offset if isinstance(operand, Part) else 0
        return not offset and merged(shape, operand.strides) == [(shape[-1], 0), (self._rows, 1)]

    @contextlib.contextmanager
    def _instead(self, lines: list[str]) -> Iterator[None]:
        """Inside, lines are these."""
        before, self._lines = self._lines, lines
        try:
            yield
        finally:
            self._lines = before

    def _operand(self, operand: Operand, shape: tuple[int, ...], at: str, scope: Scope) -> str:
        if isinstance(operand, Number):
            return literal(operand.value)
        index = self._place(operand, shape, at, scope)
        if isinstance(operand, Part):
            if not operand.value.is_there:
                return self._value(operand.value, index, scope)
            operand = Load(operand.value.memory, operand.strides)
        return self._loaded(operand, index, scope)

    def _place(self, operand: Load | Part, shape: tuple[int, ...], at: str, scope: Scope) -> str:
        """The name of the operand's index for an element of the shape."""
        offset = operand.offset if isinstance(operand, Part) else 0
        groups = merged(shape, operand.strides)
        if self._rows and at in self._begins and self._is_repeated(operand, shape):
            return _ROW

        def index(of: str) -> str:
            return index_in(shape, operand.strides, offset, of)

        if at in self._same:
            return self._of_all(index(at))
        if at not in self._begins:
            return self._index(index(at), scope)
        if not groups or (groups[0][1] == 0 and not groups[0][0] % self._each):
            return self._of_all(index(self._begins[at]))
        apart = [groups[0][0], offset, *(stride for _, stride in groups[1:])]
        if groups[0][1] != 1 or any(one % self._each for one in apart):
            return self._index(index(at), scope)
        begin = self._before(index(self._begins[at]))
        return at if begin == self._begins[at] else self._after(begin, scope)

    def _after(self, begin: str, scope: Scope) -> str:
        """The name of the index of a run that begins there."""
        found = self._index(f"{begin} + e", scope)
        self._begins[found] = begin
        return found

    def _of_all(self, expression: str) -> str:
        found = self._before(expression)
        self._same.add(found)
        return found

    def _before(self, expression: str) -> str:
        """The name of an index that is computed once for a run."""
        with self._instead(self._once):
            return self._index(expression, self._of_run)

    def _loaded(self, operand: Load, index: str, scope: Scope) -> str:
        kind = self._kinds[operand.dtype]
        if index == _ROW:
            with self._instead(self._row_lines):
                return super()._loaded(operand, index, self._of_row)
        if index in self._same:
            with self._instead(self._once):
                return super()._loaded(operand, index, self._of_run)
        bytes_of_a_run = self._each * operand.dtype.itemsize
        if index not in self._begins or kind.name == "Bool" or operand.tensor.data_ptr() % min(16, bytes_of_a_run):
            return super()._loaded(operand, index, scope)
        name, begin = self._read(operand), self._begins[index]
        if operand.constant:
            self._constant[name] = operand.tensor
        key = name, begin
        if key not in self._of_run:
            self._count += 1
            self._of_run[key] = run = f"x{self._count}"
            self._once.append(
                f"float {run}[{self._each}]; read_run<{kind.name}, {self._each}>({run}, {name} + {begin});"
            )
        return f"{self._of_run[key]}[e]"

    def _concatenated(self, value: Value, at: str, scope: Scope) -> str:
        inner = 1
        for size in value.shape[value.dim + 1 :]:
            inner *= size
        lengths = [size * inner for size in value.sizes]
        if at not in self._begins or any(length % self._each for length in lengths):
            return super()._concatenated(value, at, scope)
        whole, begin = sum(lengths), 0
        within, row = (self._before(f"{self._begins[at]} {how} {whole}u") for how in "%/")
        result = self._new("float", "0.0f")
        for number, (operand, length) in enumerate(zip(value.operands, lengths, strict=True)):
            end = begin + length
            self._line(f"{'else ' if number else ''}if ({within} < {end}u) {{")
            nested: Scope = ChainMap({}, scope)
            # Runs are read in any case: from the operand's begin where another operand is needed.
            inside = f"{within} >= {begin}u && {within} < {end}u"
            own = self._before(f"{inside} ? {row} * {length}u + ({within} - {begin}u) : 0u")
            shape = (*value.shape[: value.dim], value.sizes[number], *value.shape[value.dim + 1 :])
            self._line(f"{result} = {self._operand(operand, shape, self._after(own, nested), nested)};")
            self._line("}")
            begin = end
        return result


def _turns(columns: int, lines: list[str]) -> list[str]:
    """A loop over the runs of a lane."""
    each = _LANES_RUN * WARP
    begin = [
        "#pragma unroll 4",
        f"for (int turn = 0; turn < {-(-columns // each)}; ++turn) {{",
        f"const unsigned int at = lane * {_LANES_RUN}u + turn * {each}u, first = start + at;",
    ]
    return [*begin, f"if (at < {columns}u) {{", *lines, "} }"] if columns % each else [*begin, *lines, "}"]
