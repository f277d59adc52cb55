"""Products of a few rows with 4-bit weights, with bitsandbytes' bits, for one or more weights in one launch.

bitsandbytes launches one kernel for each linear layer, and each starts to load its weights when the one before it has
ended. The kernels here compute the same sums in the same order, but q, k and v share one launch, and so do gate and
up; all weights of a thread are on their way before it uses the first; and on Hopper and newer they are requested while
the kernel before is still running. Two orders are known (``nf4_exact.cuh``). The bits are compared before the
first use (:func:`trial`) and in each step that is fused (:mod:`fused_steps`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gemma4_compat._kernels.programs import Kernel, kinds
from gemma4_compat._kernels.specs import products

#: The name in an operation's signature.
OPERATION = "4-bit product"
#: Rows of the input for which bitsandbytes always takes the kernel whose bits these are (0.50.2: ``gemm_4bit.cu``).
MAX_ROWS = {"gemm_4bit": 3, "gemv_4bit": 1}
_BLOCKSIZES = frozenset(1 << power for power in range(5, 13))
WARPS = 8  # of a block: as many threads as a code of nested scales has values
_GROUP = 1024  # inputs that a warp reads at once
_THREAD = 32  # of them, of one thread
_SHARED = 47 << 10  # bytes of a block for inputs; nested scales take another 1 KiB


class Format(NamedTuple):
    """What a kernel's text depends on, apart from the number of weights.

    Attributes:
        operation: ``gemm_4bit`` (bitsandbytes 0.50 and newer) or ``gemv_4bit`` (older): the order of additions.
        dtype: of inputs and results, a ``torch.dtype``.
        rows: of the input.
        inputs: of each row.
        quant_type: ``nf4``, ``fp4`` or ``int4``.
        blocksize: weights per scale.
        nested: whether scales are quantized.
        bias: whether there is one.
    """

    operation: str
    dtype: Any
    rows: int
    inputs: int
    quant_type: str
    blocksize: int
    nested: bool
    bias: bool

    @property
    def fields(self) -> tuple[tuple[str, str] | None, ...]:
        """C types and names of what a weight has, in the order of ``FourBit`` in ``four_bit.cuh``."""
        kind = kinds()[self.dtype].c
        nested = [("const unsigned char", "quantized"), ("const float", "codes"), ("const float", "offset")]
        return (
            ("const unsigned char", "packed"),
            (f"const {kind}" if self.quant_type == products.INT4 else "const float", "absmax"),
            *(nested if self.nested else [None] * 3),
            ("const float", "values") if self.operation == "gemv_4bit" else None,
            (f"const {kind}", "bias") if self.bias else None,
            (kind, "output"),
        )


def supports(layout: Format) -> bool:
    """Whether a kernel can read rows of so many inputs."""
    inputs = layout.inputs
    return not inputs % _THREAD and layout.dtype.itemsize * min(inputs, _GROUP) * layout.rows <= _SHARED


def rows_of_a_warp(inputs: int) -> int:
    """How many rows share the last group of inputs."""
    rest = inputs % _GROUP
    return _GROUP // rest if rest in (_GROUP // 2, _GROUP // 4) else 1


@functools.cache
def _code(layout: Format) -> products.Code:
    name, shift = kinds()[layout.dtype].name, layout.blocksize.bit_length() - 1
    values = (layout.quant_type or "nf4").capitalize()
    is_gemm = layout.operation == "gemm_4bit"
    arguments = name, values, layout.inputs, layout.rows, shift, is_gemm, layout.nested, layout.bias
    return products.Code("nf4_exact", arguments, "Word16", layout.fields, WARPS * 32)


class Product(products.Product):
    """A product with bitsandbytes' bits."""

    operation = OPERATION
    most = 4

    @property
    def code(self) -> products.Code:
        """The order of additions is bitsandbytes'."""
        return _code(self.format)

    def blocks(self, outputs: Sequence[int]) -> list[int]:
        """Each has as many rows of the weight."""
        each = WARPS * rows_of_a_warp(self.format.inputs)
        return [-(-number // each) for number in outputs]


def match(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Product | None:
    """The product that this call of a bitsandbytes operator asks for; None for others, and for what does not suit."""
    name = op.name() if hasattr(op, "name") else ""
    if name == "bitsandbytes::gemm_4bit":
        found = gemm(MAX_ROWS["gemm_4bit"], *args, **kwargs)
    else:
        found = _gemv(*args, **kwargs) if name == "bitsandbytes::gemv_4bit" else None
    return found if found is not None and supports(found.format) else None


def gemm(
    most: int,
    given: Any,
    packed: Any,
    shape: Sequence[int],
    absmax: Any,
    blocksize: int,
    quant_type: str,
    bias: Any = None,
    absmax_8bit: Any = None,
    absmax_code: Any = None,
    absmax_offset: Any = None,
) -> Product | None:
    """The product that ``bitsandbytes::gemm_4bit`` with these arguments asks for.

    None if ``given`` has more than ``most`` rows, and for what does not suit.
    """
    nested = absmax_8bit is not None
    scales = (absmax, absmax_8bit, absmax_code, absmax_offset) if nested else (absmax,)
    weight = (packed, *scales, *((bias,) if bias is not None else ()))
    return _checked("gemm_4bit", most, given, shape, blocksize, quant_type, weight, nested, bias is not None)


def _gemv(given: Any, packed: Any, shape: Sequence[int], absmax: Any, code: Any, blocksize: int) -> Product | None:
    return _checked(
        "gemv_4bit", MAX_ROWS["gemv_4bit"], given, shape, blocksize, "", (packed, absmax, code), False, False
    )


def _checked(
    operation: str,
    most: int,
    given: Any,
    shape: Sequence[int],
    blocksize: int,
    quant_type: str,
    weight: tuple[Any, ...],
    nested: bool,
    bias: bool,
) -> Product | None:
    import torch

    if len(shape) != 2 or given.numel() == 0:
        return None
    outputs, inputs = shape
    rows = given.numel() // given.shape[-1]
    floats = (torch.bfloat16, torch.float16, torch.float32)
    scales = weight[1]
    expected = [None, given.dtype if quant_type == products.INT4 else torch.float32]
    if nested:
        expected += [torch.uint8, torch.float32, torch.float32]
    elif operation == "gemv_4bit":
        expected.append(torch.float32)
    if bias:
        expected.append(given.dtype)
    if (
        given.dtype not in floats
        or given.shape[-1] != inputs
        or rows > most
        or (blocksize not in _BLOCKSIZES and quant_type != products.INT4)
        or inputs % blocksize
        or [tensor.dtype for tensor in weight[1:]] != expected[1:]
        or any(tensor.device != given.device for tensor in weight)
        or not all(_is_dense(tensor) for tensor in (given, *weight))
        or weight[0].numel() * weight[0].element_size() * 2 != outputs * inputs
        or scales.numel() < outputs * inputs // blocksize // (256 if nested else 1)
        or (nested and (weight[2].numel() != outputs * inputs // blocksize or weight[3].numel() != WARPS * 32))
        or given.data_ptr() % 16
        or weight[0].data_ptr() % 16
    ):
        return None
    layout = Format(operation, given.dtype, rows, inputs, quant_type, blocksize, nested, bias)
    return Product(layout, given, tuple(tensor.detach() for tensor in weight), outputs)


def _is_dense(tensor: Any) -> bool:
    """Whether its elements lie one after the other: packed weights may be transposed columns."""
    return bool(tensor.is_contiguous() or (tensor.ndim == 2 and tensor.t().is_contiguous() and 1 in tensor.shape))


def trial(signature: tuple[Any, ...], device: Any) -> tuple[Kernel, Any, Any]:
    """A kernel of this format on random bytes, the memory of its result, and bitsandbytes' result."""
    import torch

    operation, dtype, rows, inputs, quant_type, blocksize, nested, bias = signature[1]
    generator = torch.Generator(device).manual_seed(0)
    outputs = 2 * WARPS * rows_of_a_warp(inputs) + 3  # no whole blocks

    def drawn(*shape: int) -> Any:
        return torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)

    def numbers(*shape: int, kind: Any = dtype) -> Any:
        return torch.randn(shape, generator=generator, device=device).to(kind)

    number = outputs * inputs // blocksize
    given, packed = numbers(rows, inputs), drawn(outputs * inputs // 2, 1)
    shape = [outputs, inputs]
    if operation == "gemv_4bit":
        code = numbers(16, kind=torch.float32)
        args: tuple[Any, ...] = (given, packed, shape, numbers(number, kind=torch.float32).abs(), code, blocksize)
        kwargs: dict[str, Any] = {}
        op = torch.ops.bitsandbytes.gemv_4bit.default
    else:
        scales = numbers(math.ceil(number / 256) if nested else number, kind=torch.float32).abs()
        args = (given, packed, shape, scales, blocksize, quant_type)
        kwargs = {"bias": numbers(outputs)} if bias else {}
        if nested:
            kwargs |= {
                "absmax_8bit": drawn(number),
                "absmax_code": numbers(256, kind=torch.float32),
                "absmax_offset": numbers(kind=torch.float32),
            }
        op = torch.ops.bitsandbytes.gemm_4bit.default
    product = match(op, args, kwargs)
    if product is None:
        raise ValueError(f"there is no kernel for {signature}")
    result = product.empty()
    (kernel,) = products.kernels_of(([product], [result]))
    return kernel, result, op(*args, **kwargs)
