"""Writes kernels of rows (:mod:`row_kernels`), with the functions of ``rows.cuh``."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field

from gemma4_compat._kernels.fuse.pointwise import SUM, WARP, Order, Value, everything, in_order, order, turns
from gemma4_compat._kernels.fuse.writer import Scope, Writer, words_of
from gemma4_compat._kernels.programs import Kernel

NAME = "rows"
#: Threads of a block that stages: at most.
_MOST_THREADS = 512
#: Numbers that a block stages, or has added up, at most: 32 KiB.
MOST_STAGED = 1 << 13
#: Numbers that a thread adds at most without the help of others, and the most threads of a block with such help.
_MOST_ADDED, _MOST_HELPERS = 16, 256
_LINE = 128  # bytes of a cache
_VECTOR = 4  # numbers in a ``Word16``


@dataclass
class Segment:
    """Values that the same blocks compute, because they need the same means.

    Attributes:
        rows: how many; each has a block.
        columns: of the means that they need.
        values: what is stored.
        means: ids of those means.
    """

    rows: int
    columns: int
    values: list[Value]
    means: set[int] = field(default_factory=set)


def staged_in(values: Sequence[Value], staged: Sequence[Value]) -> list[Value]:
    """What these values need of what is staged."""
    needed = set(map(id, everything(values)))
    return [one for one in staged if id(one) in needed]


def threads_of(columns: int) -> int:
    """How many a block that stages a row has."""
    return min(_MOST_THREADS, -(-columns // WARP) * WARP)


def _helpers(columns: int, found: Order) -> int:
    """How many threads of a block compute a row that fewer add up; 0 if these compute it themselves."""
    if columns <= _MOST_ADDED * found.threads or columns % _VECTOR or columns > MOST_STAGED:
        return 0
    return min(_MOST_HELPERS, -(-columns // (_VECTOR * WARP)) * WARP)


def words_ahead(segment: Segment, staged: Sequence[Value]) -> int:
    """How many words of weights a thread reads ahead."""
    turns = -(-segment.columns // threads_of(segment.columns))
    return turns * words_of(staged_in(segment.values, staged))


def means_of(values: Sequence[Value], done: Sequence[Value]) -> list[Value]:
    """The means that these values need, and those among them, each after the ones it needs itself."""
    return [one for one in in_order(values, done) if one.is_of_rows]


def reduction(value: Value, threads: int) -> str:
    """The function of ``rows.cuh`` that ends a mean, or a sum."""
    return f"sum_of<{threads}>" if value.name == SUM else f"mean_of<{value.columns}, {threads}>"


class RowWriter(Writer):
    """Writes kernels of rows.

    Args:
        done: values that are in memory, although they are deferred.
        staged: values that the block of a row computes into shared memory.
    """

    def __init__(self, done: Sequence[Value] = (), staged: Sequence[Value] = ()) -> None:
        super().__init__(done)
        self._means = 0
        self._to_stage = staged
        self._staged: dict[int, str] = {}  # by id: where the row that begins at ``start`` is
        self._block = 0  # threads that compute a row which fewer add up

    def kernel_of_rows(self, segments: Sequence[Segment]) -> Kernel:
        """The kernel that stores the values of these segments."""
        values = [value for segment in segments for value in segment.values]
        staged = [staged_in(segment.values, self._to_stage) for segment in segments]
        orders = [self._order(segment.values) for segment in segments]
        helpers = [_helpers(*one) for one in zip((segment.columns for segment in segments), orders, strict=True)]
        block = max(WARP, *(found.threads for found in orders), *helpers)
        for segment, some in zip(segments, staged, strict=True):
            block = max(block, threads_of(segment.columns) if some else 0)
        begin = "0u"
        ahead: list[str] = []
        for number, segment in enumerate(segments):
            found = orders[number]
            self._block = block if helpers[number] and not staged[number] else 0
            end = " + ".join(f"n{other}" for other in range(number + 1))
            self._line(f"{'else ' if number else ''}if (blockIdx.x < {end}) {{")
            row = f"const unsigned int row = blockIdx.x - ({begin}), start = row * {segment.columns}u;"
            self._line(row)
            if self._block:
                self._line(f"__shared__ Word16 words[{segment.columns // _VECTOR}]; float* numbers = (float*)words;")
            scope: Scope = {}
            self._staged = {}
            if staged[number]:
                ahead += [f"{'else ' if ahead else ''}if (blockIdx.x >= {begin} && blockIdx.x < {end}) {{", row]
                ahead += [*self._stage(segment, staged[number], block), "}"]
            done = [value for value in everything(segment.values) if id(value) in self._done]
            for mean in means_of(segment.values, done):
                self._reduced(mean, found, scope)
            self._stores(segment, found, scope, {id(value): at for at, value in enumerate(values)})
            self._line("}")
            begin = end
        sizes = tuple(segment.rows for segment in segments)
        bounds = ""
        if ahead:
            bounds = f"__launch_bounds__({block}) "
            words = max(words_ahead(segment, self._to_stage) for segment in segments)
            shared = max(segment.columns * len(some) for segment, some in zip(segments, staged, strict=True))
            ahead[:0] = [*self._fetched(block), f"__shared__ float staged[{shared}];", f"Word16 ahead[{words}];"]
        text = self._text("rows.cuh", f"{bounds}{NAME}", "\n".join(ahead), values, len(sizes))
        return Kernel(text, self._tensors(values), len(values), sizes, block, (sum(sizes), 1))

    def _fetched(self, block: int) -> list[str]:
        """Lines that have the weights of norms on their way before the kernel in front has ended."""
        lines = []
        for name, tensor in self._constant.items():
            count = -(-tensor.numel() * tensor.itemsize // _LINE)
            if tensor.is_contiguous() and count <= block:
                lines.append(f"fetch_lines<{count}>({name});")
        return lines

    def _stage(self, segment: Segment, values: Sequence[Value], block: int) -> list[str]:
        """Compute these values of a row into shared memory; the lines that read ahead what they need."""
        columns = segment.columns
        turns = -(-columns // block)
        loop = [
            "#pragma unroll",
            f"for (int turn = 0; turn < {turns}; ++turn) {{",
            f"const unsigned int at = threadIdx.x + turn * {block}u, i = start + at;",
            f"if (at < {columns}u) {{",
        ]
        ahead = [*loop, *self._read_ahead(values, f"turn * {words_of(values)} + "), "} }"]
        for line in loop:
            self._line(line)
        scope: Scope = {}
        for number, value in enumerate(values):
            self._line(f"staged[{number * columns}u + at] = {self._value(value, 'i', scope)};")
        self._line("} }")
        self._line("__syncthreads();")
        self._ahead.clear()
        self._staged = {id(value): f"staged[{at * columns}u + {{}} - start]" for at, value in enumerate(values)}
        return ahead

    def _stores(self, segment: Segment, found: Order, scope: Scope, numbers: dict[int, int]) -> None:
        """Store what is computed: one number a row, or as many as it has columns."""
        scalars = [value for value in segment.values if value.elements == segment.rows]
        rest = [value for value in segment.values if value.elements != segment.rows]
        if scalars:
            self._line("if (threadIdx.x == 0u) {")
            inner: Scope = ChainMap({}, scope)
            for value in scalars:
                self._line(self._stored(value, numbers[id(value)], "row", inner))
            self._line("}")
        if rest:
            closing = self._loop(segment.columns, found)
            inner = ChainMap({}, scope)
            for value in rest:
                self._line(self._stored(value, numbers[id(value)], "i", inner))
            self._line(closing)

    @staticmethod
    def _order(group: Sequence[Value]) -> Order:
        mean = next(value for value in everything(group) if value.columns)
        found = order(mean.elements // mean.parts, mean.columns)
        assert found is not None  # or it is not deferred
        return found

    def _loop(self, columns: int, found: Order) -> str:
        """Open a loop over the elements of this thread: ``i``, the element, and ``part``, the number of its sum, if
        each thread adds what it computes.
        """
        self._line("#pragma unroll")
        if self._block:
            self._line(f"for (int turn = 0; turn < {-(-columns // self._block)}; ++turn) {{")
            self._line(f"const unsigned int at = threadIdx.x + turn * {self._block}u, i = start + at;")
            self._line(f"if (at < {columns}u) {{")
            return "}}"
        self._line(f"for (int turn = 0; turn < {turns(columns, found)}; ++turn) {{")
        self._line(f"const unsigned int at = threadIdx.x + turn * {found.threads}u;")
        inside = f"threadIdx.x < {found.threads}u && at < {columns // 4 if found.vector else columns}u"
        self._line(f"if ({inside}) {{")
        if not found.vector:
            self._line("const unsigned int i = start + at; const int part = turn & 3;")
            return "}}"
        self._line("#pragma unroll")
        self._line("for (int part = 0; part < 4; ++part) { const unsigned int i = start + 4u * at + part;")
        return "}}}"

    def _reduced(self, mean: Value, found: Order, scope: Scope) -> None:
        """Compute a mean, which all threads of the block know from here on."""
        self._means += 1
        name = str(self._means)
        self._line(f"float mean{name};")
        self._line("{ float parts[4] = {0.0f, 0.0f, 0.0f, 0.0f}; float m;")
        closing = self._loop(mean.columns, found)
        inner: Scope = ChainMap({}, scope)
        shape = (*mean.shape[:-1], mean.columns)
        element = self._operand(mean.operands[0], shape, "i", inner)
        of = f"{mean.columns}, {found.threads}"
        if self._block:
            self._line(f"numbers[at] = {element};")
            self._line(closing)
            self._line(f"add_up<{of}, {str(found.vector).lower()}>(parts, words);")
        else:
            self._line(f"parts[part] = __fadd_rn(parts[part], {element});")
            self._line(closing)
        shared = "nullptr"
        if found.threads > WARP:
            shared = f"shared{name}"
            self._line(f"__shared__ float {shared}[{found.threads}];")
        self._line(f"m = {reduction(mean, found.threads)}(parts, {shared});")
        if self._block and found.threads == WARP:  # the other warps do not know it
            self._line(f"__shared__ float known{name};")
            self._line(f"if (threadIdx.x == 0u) known{name} = m;")
            self._line("__syncthreads();")
            self._line(f"m = known{name};")
        self._line(f"mean{name} = m; }}")
        scope[id(mean), ""] = f"mean{name}"
        self._values[id(mean)] = mean

    def _value(self, value: Value, at: str, scope: Scope) -> str:
        """As in other kernels; a mean is that of the block's row."""
        if value.is_of_rows:
            return scope[id(value), ""]
        if id(value) in self._staged:
            key = (id(value), at)
            if key not in scope:
                scope[key] = self._new("float", self._staged[id(value)].format(at))
            return scope[key]
        return super()._value(value, at, scope)
