"""Kernels of every module that has some, for tests that compile them: a module with kernels has a line in EXAMPLES."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from gemma4_compat._decoding import expert_rows, kernel_source, pointwise
from gemma4_compat._decoding.kernel_source import Kernel
from gemma4_compat._decoding.pointwise import Load, Number, Part, Value


def _pointwise() -> Iterator[Kernel]:
    """Every operation on operands of every dtype, and what rotary embeddings do with a result that is not written."""
    mask = Load(torch.zeros(6, 8, dtype=torch.bool), (8, 1))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows, column = Load(torch.zeros(6, 8, dtype=dtype), (8, 1)), Load(torch.zeros(8, dtype=dtype), (0, 1))
        values = []
        for name, how in sorted(pointwise._operations().items()):
            operands = (mask, rows, column) if name == "where" else (rows, column)[: how.source.count("{1}") + 1]
            if name in ("constant", "divide_by_number"):
                operands = (*operands[:-1], Number(0.3))
            if name != "concatenate":
                values.append(Value(name, operands, (6, 8), dtype, memory=torch.zeros(6, 8, dtype=dtype)))
        yield kernel_source.kernel_of(values)
        scaled = Value("multiply", (rows, column), (6, 8), dtype)
        halves = Part(scaled, 4, (8, 1)), Part(scaled, 0, (8, 1))
        turned = Value("concatenate", halves, (6, 8), dtype, sizes=(4, 4), dim=1)
        out = Value("add", (Part(turned, 0, (8, 1)), rows), (6, 8), dtype, memory=torch.zeros(6, 8, dtype=dtype))
        yield kernel_source.kernel_of([out])


def _expert_rows() -> Iterator[Kernel]:
    for dtype, nested in itertools.product((torch.bfloat16, torch.float16, torch.float32), (0, 256)):
        yield Kernel(expert_rows._text(expert_rows._Layout("nf4", 64, nested, dtype)), (), 1, ())


#: By the name of the module in ``gemma4_compat/_decoding``. Of a kernel the text and the threads of a block count.
EXAMPLES: dict[str, Callable[[], Iterator[Kernel]]] = {
    "kernel_source": _pointwise,
    "expert_rows": _expert_rows,
}
