"""Kernels in which a block computes a row: the numbers, their mean, and what needs it.

A norm is a cast, a square, a mean and some more pointwise operations; the next norm's mean often needs the result. A
row kernel computes the whole chain, with as few barriers as there are means. Each thread has the elements that
PyTorch's reduction gives it (:func:`pointwise.order`), in all phases, so that the compiler may keep them in
registers. If there are many rows, PyTorch gives each only a few threads; a row kernel then has more, which compute
what those few add up.

An adapter's B is often computed just before a norm. If what a thread reads of it fits in registers, the row's block
reads it while the kernel in front is still running, and adds it up in shared memory (it is *staged*). A larger B is
computed by a kernel with many blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gemma4_compat._kernels.fuse.pointwise import DOT, Part, Value, everything, merged
from gemma4_compat._kernels.fuse.row_writer import MOST_STAGED, RowWriter, Segment, means_of, staged_in, words_ahead
from gemma4_compat._kernels.fuse.writer import WORDS, Writer, is_read_ahead, kernel_of
from gemma4_compat._kernels.programs import Kernel

#: Rows of a kernel: beyond, a block a row is no small kernel.
_MAX_ROWS = 1 << 16
_MOST_KNOWN = 1 << 12
#: Whether a value is computed by rows. Finding out looks at every element, and each layer of a prompt has many.
_by_rows: dict[tuple[Any, ...], bool] = {}


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
        means = means_of([value], done)
        shapes = {(mean.elements, mean.columns) for mean in means}
        if len(shapes) == 1 and _is_by_rows(value, *next(iter(shapes)), done, staged):
            _join(segments, Segment(*next(iter(shapes)), [value], set(map(id, means))))
            continue
        if any(value is other for other in done):
            continue
        if staged_in([value], staged):
            return None
        for mean in means:  # it needs means of several rows: they are computed before
            found.append(RowWriter(done).kernel_of_rows([Segment(mean.elements, mean.columns, [mean])]))
            done.append(mean)
        plain.append(value)
    if any(not _fits(segment, staged) for segment in segments):
        return None
    if segments:
        found.append(RowWriter(done, staged).kernel_of_rows(segments))
    if plain:
        found.append(Writer(done).kernel(plain))
    return found


def _fits(segment: Segment, staged: Sequence[Value]) -> bool:
    """Whether a block has the registers and the shared memory."""
    columns = segment.columns * len(staged_in(segment.values, staged))
    return columns <= MOST_STAGED and words_ahead(segment, staged) <= WORDS


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
        has_mean[id(value)] = value.is_of_rows or any(has_mean[id(part)] for part in parts)

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
        if value.is_of_rows:
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
                one = value.is_of_rows, value.shape, value.sizes, value.dim, tuple(operands)
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
