"""The CUDA C of kernels in which a block computes a row: the numbers, their mean, and what needs it.

A norm is a cast, a square, a mean and some more pointwise operations; the next norm's mean often needs the result. A
row kernel computes the whole chain, with as few barriers as there are means. Each thread has the elements that
PyTorch's reduction gives it (:mod:`reductions`), in all phases, so that the compiler may keep them in registers. If
there are many rows, PyTorch gives each only a few threads; a row kernel then has more, which compute what those few
add up.

An adapter's B is often computed just before a norm. If what a thread reads of it fits in registers, the row's block
reads it while the kernel in front is still running, and adds it up in shared memory (it is *staged*). A larger B is
computed by a kernel with many blocks.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._kernels.programs import Kernel
from gemma4_compat._kernels.specs import reductions
from gemma4_compat._kernels.specs.kernel_source import Scope, Writer, kernel_of
from gemma4_compat._kernels.specs.pointwise import DOT, Part, Value, everything, merged
from gemma4_compat._kernels.specs.short_products import WORDS, is_read_ahead, words_of

NAME = "rows"
#: Rows of a kernel: beyond, a block a row is no small kernel.
_MAX_ROWS = 1 << 16
#: Threads of a block that stages: at most.
_MOST_THREADS = 512
#: Numbers that a block stages, or has added up, at most: 32 KiB.
_MOST_STAGED = 1 << 13
#: Numbers that a thread adds at most without the help of others, and the most threads of a block with such help.
_MOST_ADDED, _MOST_HELPERS = 16, 256
_LINE = 128  # bytes of a cache
_VECTOR = 4  # numbers in a ``Word16``
_MOST_KNOWN = 1 << 12
#: Whether a value is computed by rows. Finding out looks at every element, and each layer of a prompt has many.
_by_rows: dict[tuple[Any, ...], bool] = {}


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


def _join(segments: list[Segment], new: Segment) -> None:
    """Add a segment, with those that share a mean with it in one."""
    for other in [other for other in segments if other.means & new.means]:
        segments.remove(other)
        new = Segment(new.rows, new.columns, other.values + new.values, other.means | new.means)
    segments.append(new)


def kernels_of(values: Sequence[Value]) -> list[Kernel]:
    """The kernels that compute these values into their memory, in order."""
    sums = _before_norms(values)
    staged = [one for one in sums if is_read_ahead(one) and not any(one is value for value in values)]
    if staged:
        found = _kernels_of(values, [one for one in sums if all(one is not other for other in staged)], staged)
        if found is not None:
            return found
    found = _kernels_of(values, sums, [])
    assert found is not None  # nothing is staged
    return found


def _kernels_of(values: Sequence[Value], apart: list[Value], staged: Sequence[Value]) -> list[Kernel] | None:
    """The kernels, where ``apart`` is computed before all others, and every row's block computes its part of
    ``staged``; None if that does not suit.
    """
    found: list[Kernel] = []
    done = list(apart)
    if done:
        found.append(kernel_of(done))
    plain: list[Value] = []
    segments: list[Segment] = []
    for value in values:
        means = _means([value], done)
        shapes = {(mean.elements, mean.columns) for mean in means}
        if len(shapes) == 1 and _is_by_rows(value, *next(iter(shapes)), done, staged):
            _join(segments, Segment(*next(iter(shapes)), [value], set(map(id, means))))
            continue
        if any(value is other for other in done):
            continue
        if _staged_in([value], staged):
            return None
        for mean in means:  # it needs means of several rows: they are computed before
            found.append(_RowWriter(done).kernel_of_rows([Segment(mean.elements, mean.columns, [mean])]))
            done.append(mean)
        plain.append(value)
    if any(not _fits(segment, staged) for segment in segments):
        return None
    if segments:
        found.append(_RowWriter(done, staged).kernel_of_rows(segments))
    if plain:
        found.append(Writer(done).kernel(plain) if done else kernel_of(plain))
    return found


def _staged_in(values: Sequence[Value], staged: Sequence[Value]) -> list[Value]:
    """What these values need of what is staged."""
    needed = set(map(id, everything(values)))
    return [one for one in staged if id(one) in needed]


def _threads(columns: int) -> int:
    """How many a block that stages a row has."""
    return min(_MOST_THREADS, -(-columns // reductions.WARP) * reductions.WARP)


def _helpers(columns: int, found: reductions.Order) -> int:
    """How many threads of a block compute a row that fewer add up; 0 if these compute it themselves."""
    if columns <= _MOST_ADDED * found.threads or columns % _VECTOR or columns > _MOST_STAGED:
        return 0
    return min(_MOST_HELPERS, -(-columns // (_VECTOR * reductions.WARP)) * reductions.WARP)


def _words(segment: Segment, staged: Sequence[Value]) -> int:
    """How many words of weights a thread reads ahead."""
    turns = -(-segment.columns // _threads(segment.columns))
    return turns * words_of(_staged_in(segment.values, staged))


def _fits(segment: Segment, staged: Sequence[Value]) -> bool:
    """Whether a block has the registers and the shared memory."""
    columns = segment.columns * len(_staged_in(segment.values, staged))
    return columns <= _MOST_STAGED and _words(segment, staged) <= WORDS


def _before_norms(values: Sequence[Value]) -> list[Value]:
    """The sums that have an adapter's B in them, before a norm casts and squares them."""
    has_dot: dict[int, bool] = {}
    has_mean: dict[int, bool] = {}

    def visit(value: Value) -> None:
        if id(value) in has_dot:
            return
        parts = [operand.value for operand in value.operands if isinstance(operand, Part)]
        for part in parts:
            visit(part)
        has_dot[id(value)] = value.name == DOT or any(has_dot[id(part)] for part in parts)
        has_mean[id(value)] = value.is_mean or any(has_mean[id(part)] for part in parts)

    found: dict[int, Value] = {}
    for value in values:
        visit(value)
    for value in everything(values):
        if not has_mean[id(value)]:
            continue
        for operand in value.operands:
            if isinstance(operand, Part) and has_dot[id(operand.value)] and not has_mean[id(operand.value)]:
                source = operand.value
                while source.name in ("cast", "square", "move") and isinstance(source.operands[0], Part):
                    source = source.operands[0].value
                found[id(source)] = source
    return list(found.values())


def _means(values: Sequence[Value], done: Sequence[Value]) -> list[Value]:
    """The means that these values need, and those among them, each after the ones it needs itself."""
    order: dict[int, Value] = {}

    def visit(value: Value) -> None:
        if any(value is other for other in done) or id(value) in seen:
            return
        seen.add(id(value))
        for operand in value.operands:
            if isinstance(operand, Part):
                visit(operand.value)
        if value.is_mean:
            order[id(value)] = value

    seen: set[int] = set()
    for value in values:
        visit(value)
    return list(order.values())


def _is_by_rows(value: Value, rows: int, columns: int, done: Sequence[Value], staged: Sequence[Value] = ()) -> bool:
    """Whether each element needs only means of its own row, and of ``staged`` only that row; and so do those means."""
    import numpy as np  # a dependency of transformers; operations of torch would be seen by the capture

    if rows > _MAX_ROWS or value.elements not in (rows, rows * columns):
        return False
    key = rows, columns, _structure(value, done, staged)
    if key in _by_rows:
        return _by_rows[key]
    at = np.arange(value.elements)
    own = at if value.elements == rows else at // columns
    within = np.arange(rows * columns)

    def holds(value: Value, at: Any, own: Any) -> bool:
        if any(value is other for other in done):
            return True
        if any(value is other for other in staged):
            return value.elements == rows * columns and bool((at // columns == own).all())
        if value.is_mean:
            return bool((at == own).all()) and mean_holds(value)
        for operand, where, whose in _read_by(value, at, own):
            if isinstance(operand, Part) and not holds(operand.value, where, whose):
                return False
        return True

    def mean_holds(mean: Value) -> bool:
        if id(mean) not in known:
            known[id(mean)] = True
            (operand,) = mean.operands
            if isinstance(operand, Part):
                where = _indices((*mean.shape[:-1], columns), operand.strides, operand.offset, within)
                known[id(mean)] = holds(operand.value, where, within // columns)
        return known[id(mean)]

    known: dict[int, bool] = {}
    if len(_by_rows) >= _MOST_KNOWN:
        _by_rows.clear()
    _by_rows[key] = found = holds(value, at, own)
    return found


def _structure(value: Value, done: Sequence[Value], staged: Sequence[Value]) -> tuple[Any, ...]:
    """What :func:`_is_by_rows` depends on: the layers of a model have the same."""
    numbers: dict[int, int] = {}
    found: list[Any] = []

    def visit(value: Value) -> int:
        if id(value) not in numbers:
            if any(value is other for other in done):
                one: Any = None
            elif any(value is other for other in staged):
                one = value.elements
            else:
                operands = [
                    (visit(operand.value), operand.offset, operand.strides) if isinstance(operand, Part) else None
                    for operand in value.operands
                ]
                one = value.is_mean, value.shape, value.sizes, value.dim, tuple(operands)
            numbers[id(value)] = len(found)
            found.append(one)
        return numbers[id(value)]

    visit(value)
    return tuple(found)


def _read_by(value: Value, at: Any, own: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The operands of a value, the indices at which its elements ``at`` read them, and the rows of those elements."""
    if not value.sizes:
        for operand in value.operands:
            if isinstance(operand, Part):
                yield operand, _indices(value.shape, operand.strides, operand.offset, at), own
        return
    inner = 1
    for size in value.shape[value.dim + 1 :]:
        inner *= size
    whole = inner * value.shape[value.dim]
    within, before = at % whole, at // whole
    begin = 0
    for operand, size in zip(value.operands, value.sizes, strict=True):
        if isinstance(operand, Part):
            chosen = (within >= begin * inner) & (within < (begin + size) * inner)
            inside = before[chosen] * (size * inner) + (within[chosen] - begin * inner)
            shape = (*value.shape[: value.dim], size, *value.shape[value.dim + 1 :])
            yield operand, _indices(shape, operand.strides, operand.offset, inside), own[chosen]
        begin += size


def _indices(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, at: Any) -> Any:
    """Where the elements with the numbers ``at``, counted in ``shape``, are with these strides."""
    found = at * 0 + offset if offset else 0
    groups = merged(shape, strides)
    inner = 1
    for number, (size, stride) in enumerate(groups):
        if stride:
            coordinate = at if inner == 1 else at // inner
            if number < len(groups) - 1:
                coordinate = coordinate % size
            found = found + (coordinate if stride == 1 else coordinate * stride)
        inner *= size
    return found if isinstance(found, type(at)) else at * 0


class _RowWriter(Writer):
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
        staged = [_staged_in(segment.values, self._to_stage) for segment in segments]
        orders = [self._order(segment.values) for segment in segments]
        helpers = [_helpers(*one) for one in zip((segment.columns for segment in segments), orders, strict=True)]
        block = max(reductions.WARP, *(found.threads for found in orders), *helpers)
        for segment, some in zip(segments, staged, strict=True):
            block = max(block, _threads(segment.columns) if some else 0)
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
            for mean in _means(segment.values, done):
                self._reduced(mean, found, scope)
            self._stores(segment, found, scope, {id(value): at for at, value in enumerate(values)})
            self._line("}")
            begin = end
        sizes = tuple(segment.rows for segment in segments)
        bounds = ""
        if ahead:
            bounds = f"__launch_bounds__({block}) "
            words = max(_words(segment, self._to_stage) for segment in segments)
            shared = max(segment.columns * len(some) for segment, some in zip(segments, staged, strict=True))
            ahead[:0] = [*self._fetched(block), f"__shared__ float staged[{shared}];", f"Word16 ahead[{words}];"]
        text = self._text(f"{bounds}{NAME}", "\n".join(ahead), values, len(sizes))
        return Kernel(text, self._tensors(values), len(values), sizes, block, (sum(sizes), 1))

    def _fetched(self, block: int) -> list[str]:
        """Lines that have the weights of norms on their way before the kernel in front has ended."""
        lines = []
        for name, tensor in self._constant.items():
            count = -(-tensor.numel() * tensor.itemsize // _LINE)
            if tensor.is_contiguous() and count <= block:
                lines.append(f"if (threadIdx.x < {count}u) fetch_ahead((const char*){name} + threadIdx.x * {_LINE}u);")
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

    def _stores(self, segment: Segment, found: reductions.Order, scope: Scope, numbers: dict[int, int]) -> None:
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
    def _order(group: Sequence[Value]) -> reductions.Order:
        mean = next(value for value in everything(group) if value.columns)
        found = reductions.order(mean.elements // mean.parts, mean.columns)
        assert found is not None  # or it is not deferred
        return found

    def _loop(self, columns: int, found: reductions.Order) -> str:
        """Open a loop over the elements of this thread: ``i``, the element, and ``part``, the number of its sum, if
        each thread adds what it computes.
        """
        self._line("#pragma unroll")
        if self._block:
            self._line(f"for (int turn = 0; turn < {-(-columns // self._block)}; ++turn) {{")
            self._line(f"const unsigned int at = threadIdx.x + turn * {self._block}u, i = start + at;")
            self._line(f"if (at < {columns}u) {{")
            return "}}"
        turns = reductions.turns(columns, found)
        self._line(f"for (int turn = 0; turn < {turns}; ++turn) {{")
        self._line(f"const unsigned int at = threadIdx.x + turn * {found.threads}u;")
        inside = f"threadIdx.x < {found.threads}u && at < {columns // 4 if found.vector else columns}u"
        self._line(f"if ({inside}) {{")
        if not found.vector:
            self._line("const unsigned int i = start + at; const int part = turn & 3;")
            return "}}"
        self._line("#pragma unroll")
        self._line("for (int part = 0; part < 4; ++part) { const unsigned int i = start + 4u * at + part;")
        return "}}}"

    def _reduced(self, mean: Value, found: reductions.Order, scope: Scope) -> None:
        """Compute a mean, which all threads of the block know from here on."""
        self._means += 1
        name = str(self._means)
        self._line(f"float mean{name};")
        self._line("{ float parts[4] = {0.0f, 0.0f, 0.0f, 0.0f}; float m;")
        closing = self._loop(mean.columns, found)
        inner: Scope = ChainMap({}, scope)
        shape = (*mean.shape[:-1], mean.columns)
        element = self._operand(mean.operands[0], shape, "i", inner)
        if self._block:
            self._line(f"numbers[at] = {element};")
            self._line(closing)
            self._added(mean.columns, found)
        else:
            self._line(f"parts[part] = __fadd_rn(parts[part], {element});")
            self._line(closing)
        self._line("const float part0 = parts[0], part1 = parts[1], part2 = parts[2], part3 = parts[3];")
        for line in reductions.total(mean.columns, found, name):
            self._line(line)
        if self._block and found.threads == reductions.WARP:  # the other warps do not know it
            self._line(f"__shared__ float known{name};")
            self._line(f"if (threadIdx.x == 0u) known{name} = m;")
            self._line("__syncthreads();")
            self._line(f"m = known{name};")
        self._line(f"mean{name} = m; }}")
        scope[id(mean), ""] = f"mean{name}"
        self._values[id(mean)] = mean

    def _added(self, columns: int, found: reductions.Order) -> None:
        """Add up what the block has computed, into the four sums of each thread that PyTorch would have."""
        self._line("__syncthreads();")
        self._line(f"if (threadIdx.x < {found.threads}u) {{")
        self._line("#pragma unroll")
        self._line(f"for (int turn = 0; turn < {reductions.turns(columns, found)}; ++turn) {{")
        self._line(f"const unsigned int at = threadIdx.x + turn * {found.threads}u;")
        self._line(f"if (at < {columns // _VECTOR if found.vector else columns}u) {{")
        if found.vector:
            self._line("const Word16 four = words[at];")
            self._line("#pragma unroll")
            self._line("for (int part = 0; part < 4; ++part)")
            self._line("parts[part] = __fadd_rn(parts[part], __uint_as_float(four.part[part]));")
        else:
            self._line("parts[turn & 3] = __fadd_rn(parts[turn & 3], numbers[at]);")
        self._line("}}}")

    def _value(self, value: Value, at: str, scope: Scope) -> str:
        """As in other kernels; a mean is that of the block's row."""
        if value.is_mean:
            return scope[id(value), ""]
        if id(value) in self._staged:
            key = (id(value), at)
            if key not in scope:
                scope[key] = self._new("float", self._staged[id(value)].format(at))
            return scope[key]
        return super()._value(value, at, scope)
