"""Kernels of every module that has some, for tests that compile them: a module with kernels has a line in EXAMPLES."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch

from gemma4_compat._kernels.compiling import Nvrtc
from gemma4_compat._kernels.fuse import pointwise, row_kernels, run_writer, writer
from gemma4_compat._kernels.fuse.pointwise import Load, Number, Part, Value
from gemma4_compat._kernels.match import custom, top_tokens
from gemma4_compat._kernels.programs import Kernel
from gemma4_compat._kernels.specs import (
    attention,
    cross_entropy,
    dense,
    expert_products,
    expert_rows,
    expert_slots,
    flash,
    head,
    nf4_dequantize,
    nf4_gemv,
    products,
    shares,
    shifting,
)


def _pointwise() -> Iterator[Kernel]:
    """Every operation on operands of every dtype, and what rotary embeddings do with a result that is not written."""
    mask = Load(torch.zeros(6, 8, dtype=torch.bool), (8, 1))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows, column = Load(torch.zeros(6, 8, dtype=dtype), (8, 1)), Load(torch.zeros(8, dtype=dtype), (0, 1))
        values = []
        for name, how in sorted(pointwise.operations().items()):
            operands = (mask, rows, column) if name == "where" else (rows, column)[: how.source.count("{1}") + 1]
            if name in ("constant", "divide_by_number"):
                operands = (*operands[:-1], Number(0.3))
            if how.source:
                values.append(Value(name, operands, (6, 8), dtype, memory=torch.zeros(6, 8, dtype=dtype)))
        yield writer.kernel_of(values)
        scaled = Value("multiply", (rows, column), (6, 8), dtype)
        halves = Part(scaled, 4, (8, 1)), Part(scaled, 0, (8, 1))
        turned = Value("concatenate", halves, (6, 8), dtype, sizes=(4, 4), dim=1)
        out = Value("add", (Part(turned, 0, (8, 1)), rows), (6, 8), dtype, memory=torch.zeros(6, 8, dtype=dtype))
        yield writer.kernel_of([out])
        yield writer.kernel_of([_adapted(dtype, 16, 8, 256), _adapted(dtype, 16, 8, 256)])


def _rows() -> Iterator[Kernel]:
    """A norm, for rows that PyTorch adds in different ways."""
    for rows, columns in ((1, 1536), (1, 5376), (8, 256), (16, 512), (64, 3840)):
        yield from row_kernels.kernels_of(
            [_normed(Load(torch.zeros(rows, columns, dtype=torch.bfloat16), (columns, 1)))]
        )
    for dtype, rank, rows, columns in (
        (torch.float32, 16, 1, 1536),
        (torch.float32, 16, 1, 2560),
        (torch.bfloat16, 64, 1, 1536),  # as many registers as a thread may have
        (torch.bfloat16, 16, 1, 5376),
        (torch.float32, 64, 8, 512),
        (torch.float16, 24, 1, 3840),
        (torch.float32, 4, 1, 5376),
    ):
        yield from row_kernels.kernels_of([_normed(Part(_adapted(dtype, rank, rows, columns), 0, (columns, 1)))])


def _runs() -> Iterator[Kernel]:
    """Every operation on its own, in runs of each dtype, and the kernels of a layer's forward and backward pass."""
    from tests.unit.kernels.test_runs import CPU, Launching, Layer, OnDemand

    class Noting(Launching):
        def kernel(self, kernel: Kernel, _signatures: Any) -> None:
            self.kernels.append(kernel)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows, column = Load(torch.zeros(6, 8, dtype=dtype), (8, 1)), Load(torch.zeros(8, dtype=dtype), (0, 1))
        for name, how in sorted(pointwise.operations().items()):
            if how.source and name not in ("where", "constant", "divide_by_number"):
                operands = (rows, column)[: how.source.count("{1}") + 1]
                memory = torch.zeros(6, 8, dtype=dtype)
                yield run_writer.kernel_of([Value(name, operands, (6, 8), dtype, memory=memory)])
    for hidden in (256, 1536, 2560):
        sink, layer = Noting(None), Layer(hidden=hidden)
        with OnDemand(CPU, sink, {}, layer.trained) as mode:
            kept = [torch.empty(one.shape, dtype=one.dtype).copy_(one.detach()) for one in layer.passes()]
            mode.flush()
        assert kept
        yield from sink.kernels


def _normed(given: Load | Part) -> Value:
    """A norm of a tensor in bfloat16."""
    dtype = torch.bfloat16
    columns = given.strides[0]
    shape = tuple(given.tensor.shape if isinstance(given, Load) else (given.value.elements // columns, columns))
    wide = Value("cast", (given,), shape, torch.float32)
    square = Value("square", (Part(wide, 0, (columns, 1)),), shape, torch.float32)
    mean = Value(pointwise.MEAN, (Part(square, 0, (columns, 1)),), (shape[0], 1), torch.float32, columns=columns)
    root = Value("power_of_minus_half", (Part(mean, 0, (1, 0)),), (shape[0], 1), torch.float32)
    scaled = Value("multiply", (Part(wide, 0, (columns, 1)), Part(root, 0, (1, 0))), shape, torch.float32)
    weight = Load(torch.nn.Parameter(torch.zeros(columns)), (0, 1), True)
    weighted = Value("multiply", (Part(scaled, 0, (columns, 1)), weight), shape, torch.float32)
    return Value("cast", (Part(weighted, 0, (columns, 1)),), shape, dtype, memory=torch.zeros(shape, dtype=dtype))


def _adapted(dtype: Any, rank: int, rows: int, columns: int) -> Value:
    """A result in bfloat16 and what an adapter adds: one row, whose parts are the rows of the norm."""
    shape, inner = (1, rows * columns), (rows * columns, 1)
    weight = torch.nn.Parameter(torch.zeros(rows * columns, rank, dtype=dtype))
    dot = custom.dot(torch.zeros(1, rank, dtype=dtype), weight)
    scaled = Value("multiply", (Part(dot, 0, inner), Number(2.0)), shape, dtype)
    cast = Value("cast", (Part(scaled, 0, inner),), shape, torch.bfloat16)
    given = Load(torch.zeros(shape, dtype=torch.bfloat16), inner)
    return Value("add", (given, Part(cast, 0, inner)), shape, torch.bfloat16, memory=torch.zeros(shape).bfloat16())


def _nf4_exact() -> Iterator[Kernel]:
    from tests.unit.kernels.test_nf4_exact import CASES, asked

    for operation, dtype, inputs, more in CASES:
        one = asked(operation, dtype, inputs, 37, **more)
        yield from products.kernels_of(([one], [one.empty()]))


def _nf4_gemv() -> Iterator[Kernel]:
    from tests.unit.kernels.test_nf4_gemv import asked
    from tests.unit.kernels.test_packed_integers import product as asked_integers

    for dtype, inputs, outputs, rows, count in (
        (torch.bfloat16, 1536, 37, 1, 3),
        (torch.bfloat16, 1536, 37, 8, 2),
        (torch.float16, 3840, 4000, 1, 2),
        (torch.bfloat16, 3840, 4000, 4, 2),
        (torch.bfloat16, 12288, 1536, 1, 1),
        (torch.bfloat16, 15360, 4000, 1, 1),
        (torch.bfloat16, 21504, 4000, 8, 1),
        (torch.bfloat16, 1536, 37, 9, 3),
        (torch.float16, 3840, 4000, 17, 2),
        (torch.bfloat16, 12288, 1536, 32, 1),
        (torch.bfloat16, 2560, 4000, 64, 2),
    ):
        given = asked(dtype, inputs, outputs, rows=rows, bias=rows == 1)
        one = nf4_gemv.match(**given)
        assert one is not None
        many = [one] * count, [one.empty()] * count
        yield from products.kernels_of(many)
        low = dense.product(given["given"], torch.zeros(16, inputs, dtype=torch.float32 if rows == 1 else dtype))
        yield from products.kernels_of(many, ([low] * count, [low.empty()] * count))
    for dtype, inputs, outputs, group, rows in (
        (torch.bfloat16, 1536, 37, 32, 1),
        (torch.float16, 3840, 4000, 32, 4),
        (torch.bfloat16, 15360, 4000, 32, 8),
        (torch.bfloat16, 12288, 1536, 128, 1),
        (torch.bfloat16, 3840, 4000, 3840, 1),
        (torch.bfloat16, 3840, 37, 32, 9),
        (torch.float16, 2560, 4000, 32, 64),
    ):
        one = asked_integers(dtype, inputs, outputs, group=group, rows=rows)
        yield from products.kernels_of(([one] * 2, [one.empty()] * 2))


def _expert_rows() -> Iterator[Kernel]:
    for dtype, nested in itertools.product((torch.bfloat16, torch.float16, torch.float32), (0, 256)):
        yield Kernel(expert_rows._text(expert_rows.Format("nf4", 64, nested, dtype)), (), 1, ())


def _expert_products() -> Iterator[Kernel]:
    """Of the 26B-A4B: gate and up, and down."""
    for dtype, (height, width) in itertools.product((torch.bfloat16, torch.float16), ((1408, 2816), (2816, 704))):
        shape, scales = (4, height, width), height * width // 64
        packed = torch.empty(4 * height * width // 2, dtype=torch.uint8)
        nested = torch.empty(4, scales, dtype=torch.uint8), torch.empty(256), torch.empty(4, 1)
        given, chosen = torch.empty(1, width, dtype=dtype), torch.zeros(8, dtype=torch.long)
        for absmax, more in ((torch.empty(4, scales // 256), nested), (torch.empty(4, scales), ())):
            found = expert_products.kernel_of(given, chosen, packed, shape, absmax, 64, "nf4", *more)
            assert found is not None
            yield found[0]


def _expert_slots() -> Iterator[Kernel]:
    numbers = torch.zeros(2, dtype=torch.int64)
    yield from expert_slots.kernels(numbers, numbers, numbers, numbers, numbers, numbers, (4, 2))[0]


def _shifting() -> Iterator[Kernel]:
    """Words of each size, and one to several of them in a thread."""
    for word, times in itertools.product(shifting._WORDS, (1, 2, 3, 4)):
        yield Kernel(shifting._text(word, times), (), 1, (), shifting._THREADS)


def _dequantizing() -> Iterator[Kernel]:
    for dtype, nested in itertools.product((torch.bfloat16, torch.float16, torch.float32), (False, True)):
        for quant_type in ("nf4", "int4") if not nested else ("nf4",):
            layout = expert_rows.Format(quant_type, 64, 256 * nested, dtype)
            yield Kernel(nf4_dequantize.text_of(layout), (), 1, (), nf4_dequantize._THREADS)


def _attention(*cases: tuple[Any, ...]) -> Iterator[Kernel]:
    """Attention of widths, heads, dtypes and masks, over caches of some lengths."""
    for width, heads, dtype, mask, length in cases:
        query, keys = torch.empty(1, 1, heads, width, dtype=dtype), torch.empty(1, 1, length, width, dtype=dtype)
        given = None if mask is None else torch.empty(1, 1, 1, length, dtype=mask)
        call = attention.match(query, keys, keys, attn_mask=given)
        assert call is not None
        yield from attention.kernels(call)[0]


def _dense() -> Iterator[Kernel]:
    """LoRA's A of three adapters of one input, and a head."""
    for dtype, rows, shape, count in (
        (torch.bfloat16, 1, (16, 1536), 3),
        (torch.bfloat16, 8, (64, 2048), 1),
        (torch.float32, 1, (16, 1536), 1),
        (torch.bfloat16, 1, (700, 1536), 1),
        (torch.float16, 8, (700, 2560), 1),
        (torch.float32, 3, (700, 5376), 1),
        (torch.bfloat16, 9, (16, 1536), 3),
        (torch.bfloat16, 32, (700, 1536), 1),
    ):
        weight, bias = torch.zeros(shape, dtype=dtype), torch.zeros(shape[0], dtype=dtype) if rows == 3 else None
        one = dense.product(torch.zeros(rows, shape[1], dtype=dtype), weight, bias)
        yield from products.kernels_of(([one] * count, [one.empty()] * count))


def _head() -> Iterator[Kernel]:
    """Heads of an E2B, an E4B and a 31B, and of a tiny model, without their memory."""
    for dtype, words, inputs, rows in (
        (torch.bfloat16, 1 << 18, 1536, 1),
        (torch.bfloat16, 1 << 18, 2560, 8),
        (torch.float16, 1 << 18, 5376, 1),
        (torch.bfloat16, 1 << 18, 1536, 32),
        (torch.float16, 1 << 18, 3840, 50),
        (torch.bfloat16, 700, 64, 3),
    ):
        weight = torch.zeros((), dtype=dtype).expand(words, inputs)
        copy = head.Copy(*(torch.zeros(()) for _ in head.Copy._fields))
        yield copy.made_from(weight)
        yield from head.best(torch.zeros(rows, inputs, dtype=dtype), weight, copy, 64, 30.0)[0]


def _plain_attention() -> Iterator[Kernel]:
    yield from _attention(
        (512, 8, torch.float32, torch.bool, 5000),
        (512, 16, torch.float32, torch.bool, 900),
        (256, 8, torch.float32, torch.float32, 900),
        (32, 2, torch.bfloat16, None, 900),
        (16, 3, torch.float16, torch.float16, 40),
    )


def _matrix_attention() -> Iterator[Kernel]:
    yield from _attention(
        (512, 8, torch.bfloat16, torch.bool, 5000),
        (512, 8, torch.float16, torch.bool, 900),
        (512, 16, torch.bfloat16, torch.bool, 5000),
        (512, 4, torch.bfloat16, torch.bfloat16, 5000),
        (256, 8, torch.bfloat16, torch.bool, 900),
        (256, 2, torch.float16, torch.float16, 5000),
        (64, 3, torch.bfloat16, None, 900),
    )


def _flash() -> Iterator[Kernel]:
    """Heads of every width in every amount of shared memory: of models with 8 heads, and with 16."""
    for (dtype, heads), (width, ways) in itertools.product(
        ((torch.bfloat16, 8), (torch.float16, 16)), flash._TILINGS.items()
    ):
        query, keys = torch.empty(1, heads, 20, width, dtype=dtype), torch.empty(1, 2, 9000, width, dtype=dtype)
        masked = flash.match(query, keys, keys, torch.empty(20, 9000, dtype=torch.bool), enable_gqa=True)
        causal = flash.match(query, keys[:, :, :20], keys[:, :, :20], is_causal=True, enable_gqa=True)
        for how, call in itertools.product(ways, (masked, causal)):
            assert call is not None
            yield from flash.kernels(call, layout=flash.layout_of(call, how))[0]


def _shares() -> Iterator[Kernel]:
    sums = torch.zeros(2, 2, 2)
    for keys, dtype, is_masked in itertools.product((70, 1100, 9000, 40_000), (torch.bfloat16, torch.float16), (0, 1)):
        numbers, shown = torch.zeros(2, 2, keys), torch.ones(keys, dtype=torch.bool) if is_masked else None
        scores, found = shares.Scores(numbers, shown, (2, 1, 1, 2), True, 0, 1.0), numbers.to(dtype)
        yield shares.shares(scores, found, sums)
        yield shares.gradients(scores, sums, numbers, sums, found)


def _cross_entropy() -> Iterator[Kernel]:
    for dtype, cap, gradient in itertools.product((torch.bfloat16, torch.float16), (None, 30.0), (False, True)):
        logits = torch.zeros(2, 8, dtype=dtype)
        yield cross_entropy.kernel_of(logits, torch.zeros(2, dtype=torch.long), cap, gradient=gradient)[0]


def _top_tokens() -> Iterator[Kernel]:
    scores = torch.zeros(2, 8192)
    work = top_tokens.Work(scores, top_tokens.Limits(64, 0.95, 1))
    yield from (*work.before, work.after, work.drawing(scores)[0])


#: By the name of the module in ``gemma4_compat/_kernels``. Of a kernel the text and the threads of a block count.
EXAMPLES: dict[str, Callable[[], Iterator[Kernel]]] = {
    "writer": _pointwise,
    "row_writer": _rows,
    "run_writer": _runs,
    "nf4_exact": _nf4_exact,
    "nf4_gemv": _nf4_gemv,
    "dense": _dense,
    "head": _head,
    "attention": _plain_attention,
    "attention_tensor": _matrix_attention,
    "flash": _flash,
    "shares": _shares,
    "cross_entropy": _cross_entropy,
    "expert_products": _expert_products,
    "expert_rows": _expert_rows,
    "expert_slots": _expert_slots,
    "shifting": _shifting,
    "nf4_dequantize": _dequantizing,
    "top_tokens": _top_tokens,
}
#: The first compute capability of modules whose kernels older GPUs do not get.
FROM = {"flash": (8, 0)}


def nvrtc_of_a_wheel() -> Nvrtc | None:
    """NVRTC without CUDA: PyTorch for CUDA brings its wheel, and so does the extra ``test``."""
    for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        # Some releases find their second library only if it is loaded.
        for pattern in (r"libnvrtc-builtins\.so.*", r"libnvrtc\.so\.\d+"):
            libraries = [ctypes.CDLL(str(file.locate())) for file in files if re.fullmatch(pattern, file.name)]
        return Nvrtc(libraries[0])
    return None
