"""Products of a few rows with weights that are not quantized, in an arithmetic of their own: LoRA's A and B, the head.

Each row of the input is multiplied as if it were the only one, so a sequence has the same bits whatever else is in its
batch; cuBLAS chooses another kernel for each number of rows. Products are exact and sums are in ``float``; only the
result is rounded. There are three kernels, and the weight decides which: a *short* product has at most ``SHORT``
inputs, like LoRA's B, and is a pointwise operation (``"dot"`` in :mod:`pointwise`), computed where its result is used;
of the others, a block takes a row of a *small* weight, like LoRA's A, and a warp takes four rows of a large one, like
the head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gemma4_compat._kernels.programs import Kernel, kinds
from gemma4_compat._kernels.specs import several
from gemma4_compat._kernels.specs.kernel_source import unpacked

#: The name in an operation's signature.
OPERATION = "dense product"
#: Inputs of a short product.
SHORT = 64
#: Rows of the input.
MAX_ROWS = 8
#: Weights of one launch.
MAX_WEIGHTS = 8
_SMALL = 512  # rows of a weight
_THREADS = 256
_WARP_ROWS = 4  # of a large weight, that a warp takes


class Format(NamedTuple):
    """What a kernel's text depends on, apart from the number of weights.

    Attributes:
        given: dtype of the input.
        weight: dtype of the weight and the result.
        rows: of the input.
        inputs: of each row.
        small: whether a block takes a row of the weight.
        bias: whether there is one.
        aligned: whether input and weight can be read in words of 16 bytes. The bits are the same.
    """

    given: Any
    weight: Any
    rows: int
    inputs: int
    small: bool
    bias: bool
    aligned: bool


@dataclass(frozen=True, eq=False)
class Product:
    """One product.

    Attributes:
        format: what decides its bits.
        input: (..., inputs), contiguous; of the weight's dtype, or the numbers before they were cast to it.
        weight: (outputs, inputs), contiguous, then the bias if there is one.
        outputs: rows of the weight.
    """

    format: Format
    input: Any
    weight: tuple[Any, ...]
    outputs: int

    @property
    def signature(self) -> tuple[Any, ...]:
        """As for other operations; nothing of PyTorch's to compare it with."""
        return OPERATION, tuple(self.format), self.format.weight

    def empty(self) -> Any:
        """Memory for the result, (..., outputs)."""
        return self.input.new_empty((*self.input.shape[:-1], self.outputs), dtype=self.format.weight)


def suits(given: Any, weight: Any, bias: Any = None) -> bool:
    """Whether the kernels can compute ``torch.nn.functional.linear(given, weight, bias)``."""
    import torch

    known = kinds()
    if type(given) not in (torch.Tensor, torch.nn.Parameter) or type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if weight.ndim != 2 or given.ndim < 1 or given.shape[-1] != weight.shape[1] or not given.numel():
        return False
    inputs = weight.shape[1]
    return (
        weight.dtype in known
        and weight.dtype != torch.bool
        and given.dtype == weight.dtype
        and given.numel() // inputs <= MAX_ROWS
        and weight.numel() < 1 << 31
        and (inputs <= SHORT or not inputs * weight.dtype.itemsize % 16)
        and all(tensor.is_contiguous() and tensor.device == given.device for tensor in (given, weight))
        and (bias is None or (bias.dtype == weight.dtype and bias.device == given.device and bias.is_contiguous()))
    )


def product(given: Any, weight: Any, bias: Any = None) -> Product:
    """The product that :func:`suits`; ``given`` may be what was cast to the weight's dtype."""
    outputs, inputs = weight.shape
    rows = given.numel() // inputs
    aligned = not (given.data_ptr() % 16 or weight.data_ptr() % 16)
    layout = Format(given.dtype, weight.dtype, rows, inputs, outputs <= _SMALL, bias is not None, aligned)
    return Product(layout, given, (weight,) if bias is None else (weight, bias), outputs)


def go_together(one: Product, other: Product) -> bool:
    """Whether one launch may compute both: they have the same format and read the same input."""
    return one.format == other.format and one.input.data_ptr() == other.input.data_ptr()


def kernel_of(products: Sequence[Product], results: Sequence[Any]) -> Kernel:
    """The kernel that writes the results of products that :func:`go_together`."""
    layout = products[0].format
    per_block = 1 if layout.small else _THREADS // 32 * _WARP_ROWS
    sizes: list[int | float] = []
    blocks = 0
    for one in products:
        number = -(-one.outputs // per_block)
        blocks += number
        sizes += (one.outputs, number)
    weights = [tensor.detach() for one in products for tensor in one.weight]
    tensors = (products[0].input, *weights, *results)
    return Kernel(_text(layout, len(products)), tensors, len(results), tuple(sizes), _THREADS, (blocks, 1))


def _head(layout: Format, weights: int) -> list[str]:
    """Parameters, and which weight this block belongs to."""
    known = kinds()
    kind, given = known[layout.weight], known[layout.given]
    names = [(f"const {kind.c}*", "weight")] + ([(f"const {kind.c}*", "bias")] if layout.bias else [])
    parameters = several.parameters(f"const {given.c}* __restrict__ input", names, kind.c, weights)
    return [
        f'extern "C" __global__ void __launch_bounds__({_THREADS}) dense({", ".join(parameters)}) {{',
        "unsigned int block = blockIdx.x, outputs = outputs0;",
        f"{kind.c}* output = output0;",
        *(f"{c} {name} = {name}0;" for c, name in names),
        *several.choice(names, weights),
    ]


def _each(layout: Format) -> int:
    """Numbers in 16 bytes of a weight."""
    return 16 // int(layout.weight.itemsize)


def _words(layout: Format, row: str) -> str:
    """C for ``word(at)``: the word with this number, counted from the beginning of a row of the weight."""
    each, c = _each(layout), kinds()[layout.weight].c
    begin = f"weight + (unsigned long long){row} * {layout.inputs}"
    if layout.aligned:
        return f"auto word = [=](unsigned int at) {{ return load_once((const Word16*)({begin}) + at); }};"
    return (
        f"auto word = [=](unsigned int at) {{ union {{ {c} one[{each}]; Word16 word; }} found; "
        f"const {c}* from = {begin} + at * {each}u;\n#pragma unroll\n"
        f"for (int k = 0; k < {each}; ++k) found.one[k] = from[k];\nreturn found.word; }};"
    )


def _given(layout: Format, at: str) -> list[str]:
    """Read the inputs from number ``at`` on, as many as a word of the weight has, into ``x``."""
    each = _each(layout)
    if layout.aligned and layout.given.itemsize * each == 16:
        return [
            f"const Word16 words = *(const Word16*)(input + {at});",
            *(f"x[{k}] = {value};" for k, value in enumerate(unpacked(layout.given, "words", each))),
        ]
    load = kinds()[layout.given].load
    return ["#pragma unroll", f"for (int k = 0; k < {each}; ++k) x[k] = {load.format(f'input[{at} + k]')};"]


@functools.cache
def _text(layout: Format, weights: int) -> str:
    lines = _head(layout, weights)
    lines += _small(layout) if layout.small else _large(layout)
    return "\n".join(lines) + "\n}\n"


def _result(layout: Format, row: str, value: str, m: str) -> str:
    kind = kinds()[layout.weight]
    if layout.bias:
        value = f"__fadd_rn({value}, {kind.load.format(f'bias[{row}]')})"
    stored = kind.store.format(kind.rounded.format(value))
    return f"output[(unsigned long long){m} * outputs + {row}] = {stored};"


def _small(layout: Format) -> list[str]:
    """A block takes a row of the weight; each thread takes every 256th word."""
    each, words = _each(layout), layout.inputs // _each(layout)
    rounds = -(-words // _THREADS)
    lines = [_words(layout, "block")]
    lines.append(f"Word16 w[{rounds}];")
    lines += ["#pragma unroll", f"for (int turn = 0; turn < {rounds}; ++turn) {{"]
    lines.append(f"const unsigned int at = threadIdx.x + turn * {_THREADS}u;")
    lines.append(f"if (at < {words}u) w[turn] = word(at);\n}}")
    lines += ["let_next_kernel_begin();", "wait_for_kernel_before();"]
    lines.append(f"float sums[{layout.rows}];")
    lines += [f"sums[{m}] = 0.0f;" for m in range(layout.rows)]
    lines += ["#pragma unroll", f"for (int turn = 0; turn < {rounds}; ++turn) {{"]
    lines.append(f"const unsigned int at = threadIdx.x + turn * {_THREADS}u;")
    lines.append(f"if (at < {words}u) {{ float x[{each}];")
    for m in range(layout.rows):
        lines += ["{", *_given(layout, f"{m * layout.inputs}u + at * {each}u")]
        for k, value in enumerate(unpacked(layout.weight, "w[turn]", each)):
            lines.append(f"sums[{m}] = __fmaf_rn(x[{k}], {value}, sums[{m}]);")
        lines.append("}")
    lines.append("}\n}")
    lines.append(f"__shared__ float of_warps[{layout.rows}][{_THREADS // 32}];")
    for m in range(layout.rows):
        lines += _over_lanes(f"sums[{m}]")
        lines.append(f"if ((threadIdx.x & 31u) == 0u) of_warps[{m}][threadIdx.x >> 5] = sums[{m}];")
    lines.append("__syncthreads();")
    lines.append(f"if (threadIdx.x < {layout.rows}u) {{ float whole = of_warps[threadIdx.x][0];")
    lines += ["#pragma unroll", f"for (int warp = 1; warp < {_THREADS // 32}; ++warp)"]
    lines.append("whole = __fadd_rn(whole, of_warps[threadIdx.x][warp]);")
    lines.append(_result(layout, "block", "whole", "threadIdx.x") + "\n}")
    return lines


def _large(layout: Format) -> list[str]:
    """A warp takes four rows of the weight; each lane takes every 32nd word of each."""
    each, words = _each(layout), layout.inputs // _each(layout)
    rounds = -(-words // 32)
    lines = [
        f"const unsigned int lane = threadIdx.x & 31u, first = (block * {_THREADS // 32}u + (threadIdx.x >> 5)) * "
        f"{_WARP_ROWS}u;",
        _words(layout, "first"),
        f"const unsigned int rows = first < outputs ? min({_WARP_ROWS}u, outputs - first) : 0u;",
        f"float sums[{_WARP_ROWS}][{layout.rows}];",
        "#pragma unroll",
        f"for (int r = 0; r < {_WARP_ROWS}; ++r)",
        "#pragma unroll",
        f"for (int m = 0; m < {layout.rows}; ++m) sums[r][m] = 0.0f;",
        f"Word16 w[{_WARP_ROWS}];",
        "#pragma unroll",
        f"for (int r = 0; r < {_WARP_ROWS}; ++r) if (r < rows && lane < {words}u) w[r] = word(r * {words}u + lane);",
        "let_next_kernel_begin();",
        "wait_for_kernel_before();",
        f"#pragma unroll {min(rounds, 8)}",
        f"for (int turn = 0; turn < {rounds}; ++turn) {{",
        "const unsigned int at = lane + turn * 32u, next = at + 32u;",
        f"Word16 ahead[{_WARP_ROWS}];",
        "#pragma unroll",
        f"for (int r = 0; r < {_WARP_ROWS}; ++r) if (r < rows && next < {words}u) ahead[r] = word("
        f"r * {words}u + next);",
        f"if (at < {words}u) {{",
    ]
    for m in range(layout.rows):
        lines += [f"{{ float x[{each}];", *_given(layout, f"{m * layout.inputs}u + at * {each}u"), "#pragma unroll"]
        lines.append(f"for (int r = 0; r < {_WARP_ROWS}; ++r) {{")
        for k, value in enumerate(unpacked(layout.weight, "w[r]", each)):
            lines.append(f"sums[r][{m}] = __fmaf_rn(x[{k}], {value}, sums[r][{m}]);")
        lines.append("} }")
    lines += ["}", "#pragma unroll", f"for (int r = 0; r < {_WARP_ROWS}; ++r) w[r] = ahead[r];", "}"]
    for r in range(_WARP_ROWS):
        for m in range(layout.rows):
            lines += _over_lanes(f"sums[{r}][{m}]")
            row = f"first + {r}u"
            lines.append(f"if (lane == 0u && {r}u < rows) {{ {_result(layout, row, f'sums[{r}][{m}]', str(m))} }}")
    return lines


def _over_lanes(total: str) -> list[str]:
    """Add up the sums of a warp: all lanes have the result."""
    return [
        f"{total} = __fadd_rn({total}, __shfl_xor_sync(0xffffffffu, {total}, {offset}));"
        for offset in (16, 8, 4, 2, 1)
    ]
