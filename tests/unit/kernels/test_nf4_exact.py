"""Products with 4-bit weights: the additions of bitsandbytes' CUDA kernels, in their order."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
import torch
from bitsandbytes.functional import create_dynamic_map, get_4bit_type

from benchmarks.decoding.own_products import of_type
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.programs import headers
from gemma4_compat._kernels.specs import nf4_exact, products
from gemma4_compat._kernels.specs.nf4_exact import Product

GEMM, GEMV = "bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"


@dataclasses.dataclass
class Operator:
    """In place of an ``OpOverload``: a release of bitsandbytes has one of the two."""

    called: str

    def name(self) -> str:
        return self.called


def drawn(generator: torch.Generator, *shape: int) -> Any:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def asked(
    operation: str, dtype: Any, inputs: int, outputs: int, *, rows: int = 1, nested: bool = False, bias: bool = False,
    quant_type: str = "nf4", blocksize: int = 64, seed: int = 0,
) -> Product:  # fmt: skip
    """A product of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    given = torch.randn(rows, inputs, generator=generator).to(dtype)
    packed = drawn(generator, outputs * inputs // 2, 1)
    number = outputs * inputs // blocksize
    scales = torch.rand(-(-number // 256) if nested else number, generator=generator)
    if operation == GEMV:
        args: tuple[Any, ...] = (given, packed, [outputs, inputs], scales, get_4bit_type("nf4", "cpu"), blocksize)
        found = nf4_exact.match(Operator(GEMV), args, {})
    else:
        more: dict[str, Any] = {"bias": torch.randn(outputs, generator=generator).to(dtype)} if bias else {}
        if nested:
            code = create_dynamic_map()
            more |= {"absmax_8bit": drawn(generator, number), "absmax_code": code, "absmax_offset": torch.tensor(0.1)}
        args = (given, packed, [outputs, inputs], scales, blocksize, quant_type)
        found = nf4_exact.match(Operator(GEMM), args, more)
    assert found is not None
    return found


def fma(a: Any, b: Any, c: Any) -> Any:
    """Rounded once: a product of two float32 numbers is exact in float64, and so is nearly every sum here."""
    return (a.double() * b.double() + c.double()).float()


@pytest.mark.parametrize(("quant_type", "factor"), [("nf4", 1.9247651100158691), ("fp4", 192.0)])
def test_pairs_are_the_values_in_float16(quant_type: str, factor: float) -> None:
    halves = (torch.tensor(of_type(quant_type, "values"), dtype=torch.float64) * factor).to(torch.float16)
    pairs = halves.view(torch.int16).to(torch.int64).bitwise_and(0xFFFF).view(-1, 2)
    assert (pairs[:, 0] + (pairs[:, 1] << 16)).tolist() == of_type(quant_type, "pairs")
    _, _, type_of = headers()["four_bit.cuh"].partition(f"struct {quant_type.capitalize()} ")
    assert type_of.index(f"return {1 / factor!r}f;") < type_of.find("struct ") % len(type_of)


def expected(product: Product) -> Any:
    """The sum, thread by thread: 32 threads own 32 inputs each in turn."""
    layout = product.format
    bias = product.weight[-1].float() if layout.bias else torch.zeros(product.outputs)
    shape = (product.outputs, layout.inputs)
    packed = product.weight[0].reshape(shape[0], -1).int()
    nibbles = torch.stack((packed >> 4, packed & 15), -1).reshape(shape).long()
    newer = layout.operation == "gemm_4bit"
    values = torch.tensor(of_type(layout.quant_type, "values")) if newer else product.weight[2]
    scales = product.weight[1]
    if layout.nested:
        _, large, quantized, codes, offset = product.weight[:5]
        blocks = torch.arange(len(quantized)) // 256
        scales = fma(codes[quantized.long()], large[blocks], offset)
    scales = scales.reshape(shape[0], -1).to(layout.dtype).repeat_interleave(layout.blocksize, 1)
    weight = values.to(layout.dtype)[nibbles] * scales
    groups = -(-layout.inputs // 1024)

    def by_thread(numbers: Any) -> Any:
        padded = torch.nn.functional.pad(numbers, (0, groups * 1024 - layout.inputs))
        return padded.reshape(-1, groups, 32, 32)

    sums = torch.zeros(layout.rows, shape[0], 32)
    weight, given = by_thread(weight), by_thread(product.input.reshape(layout.rows, -1))
    for row, group in itertools.product(range(layout.rows), range(groups)):
        total = sums[row]
        factors = given[row, group][None], weight[:, group]
        if layout.dtype == torch.float32:
            turns = [0, 4, 1, 5, 2, 6, 3, 7] if newer else range(8)
            for at in (8 * part + turn for part in range(4) for turn in turns):
                total = fma(factors[0][..., at], factors[1][..., at], total)
        else:
            parts = (factors[0] * factors[1]).float()
            for pair in range(16):
                low, high = parts[..., 2 * pair], parts[..., 2 * pair + 1]
                total = total + (low + high) if newer else (total + low) + high
        sums[row] = total
    for offset in (16, 8, 4, 2, 1) if newer else (1, 2, 4, 8, 16):
        sums = sums + torch.nn.functional.pad(sums[..., offset:], (0, offset))
    return (sums[..., 0] + bias).to(layout.dtype)


def computed(on_host: kernels.Kernels, *wanted: Product) -> list[Any]:
    results = [torch.full_like(product.empty(), float("nan")) for product in wanted]
    (kernel,) = products.kernels_of((wanted, results))
    assert on_host.prepare([kernel.text], [])
    on_host.launch(kernel)
    return results


HALF = (torch.bfloat16, torch.float16)
#: Inputs: whole groups, halves and quarters that rows share, three quarters, and more than shared memory holds.
CASES = [
    *((GEMM, dtype, inputs, {}) for dtype, inputs in itertools.product((*HALF, torch.float32), (1024, 1536))),
    (GEMM, torch.bfloat16, 256, {"nested": True}),
    (GEMM, torch.bfloat16, 2560, {"nested": True, "bias": True}),
    (GEMM, torch.bfloat16, 2816, {"quant_type": "fp4", "blocksize": 256}),
    (GEMM, torch.float32, 16384, {"nested": True, "bias": True}),
    (GEMM, torch.bfloat16, 12288, {"rows": 3, "nested": True}),
    (GEMM, torch.float16, 1536, {"rows": 2, "blocksize": 32, "bias": True}),
    (GEMM, torch.float32, 320, {"rows": 3}),
    *((GEMV, dtype, inputs, {}) for dtype, inputs in itertools.product((*HALF, torch.float32), (1536, 2048))),
]


@pytest.mark.parametrize(("operation", "dtype", "inputs", "more"), CASES)
def test_sums_have_the_bits_of_bitsandbytes(
    on_host: kernels.Kernels, operation: str, dtype: Any, inputs: int, more: dict[str, Any]
) -> None:
    product = asked(operation, dtype, inputs, 37, **more)
    (found,) = computed(on_host, product)
    assert torch.equal(found.reshape(product.format.rows, -1), expected(product))


def test_products_of_one_input_share_a_launch(on_host: kernels.Kernels) -> None:
    wanted = [
        asked(GEMM, torch.bfloat16, 1536, outputs, nested=True, seed=seed) for seed, outputs in enumerate((40, 8, 9))
    ]
    wanted = [dataclasses.replace(product, input=wanted[0].input) for product in wanted]
    assert all(wanted[0].can_join(product) for product in wanted)
    for found, product in zip(computed(on_host, *wanted), wanted, strict=True):
        assert torch.equal(found, expected(product))


def test_others_do_not_share_one() -> None:
    one = asked(GEMM, torch.bfloat16, 1536, 8)
    assert not one.can_join(asked(GEMM, torch.bfloat16, 1536, 8))  # another input
    nested = dataclasses.replace(asked(GEMM, torch.bfloat16, 1536, 8, nested=True), input=one.input)
    assert not one.can_join(nested)


@pytest.mark.parametrize(
    ("change", "rows", "blocksize"),
    [("none", 4, 64), ("inputs", 1, 64), ("strided", 1, 64), ("scales", 1, 64), ("shape", 1, 64), ("none", 1, 96)],
)
def test_what_does_not_suit_is_left_to_bitsandbytes(change: str, rows: int, blocksize: int) -> None:
    inputs, outputs = 1536, 8
    given, packed = torch.randn(rows, inputs), torch.zeros(outputs * inputs // 2, 1, dtype=torch.uint8)
    scales, shape = torch.rand(outputs * inputs // 64), [outputs, inputs]
    if change == "inputs":
        given = given[:, :-1]
    elif change == "strided":
        given = torch.randn(rows, 2 * inputs)[:, ::2]
    elif change == "scales":
        scales = scales.double()
    elif change == "shape":
        shape = [outputs + 1, inputs]
    assert nf4_exact.match(Operator(GEMM), (given, packed, shape, scales, blocksize, "nf4"), {}) is None
    assert nf4_exact.match(Operator("aten::mm"), (), {}) is None
