"""Which weights of short products, like LoRA's B, a thread reads before the kernel in front has ended.

Such a product is computed where its result is needed (:data:`pointwise.DOT`), and a thread needs a row of the weight
for each of its elements. The row goes into registers, so there must not be many of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gemma4_compat._kernels.specs.pointwise import DOT, Load, Part, Value, everything, index_in

#: Words of 16 bytes that a thread reads ahead at most: four registers each.
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
