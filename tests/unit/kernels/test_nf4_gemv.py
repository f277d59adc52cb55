"""4-bit products by tensor cores: nearer to float64 than bitsandbytes' own sums, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
import torch

from benchmarks.decoding.own_products import asked, exact
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.programs import Kernel
from gemma4_compat._kernels.specs import dense, nf4_exact, nf4_gemv, products
from gemma4_compat._kernels.specs.products import Product


def understood(wanted: dict[str, Any]) -> Product:
    found = nf4_gemv.match(**wanted)
    assert found is not None
    return found


def launched(on_host: kernels.Kernels, wanted: list[Kernel]) -> None:
    on_host.prepare([kernel.text for kernel in wanted], [])
    for kernel in wanted:
        on_host.launch(kernel)


def computed(on_host: kernels.Kernels, several: list[Any]) -> list[Any]:
    results = [one.empty().fill_(float("nan")) for one in several]
    launched(on_host, products.kernels_of((several, results)))
    return results


SHAPES = {
    "one chunk": {"inputs": 64, "outputs": 5},
    "some warps idle": {"inputs": 320, "outputs": 33},
    "E2B": {"inputs": 1536, "outputs": 35},
    "12B": {"inputs": 3840, "outputs": 17},
    "several parts of the inputs": {"inputs": 15360, "outputs": 18},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_errors_are_smaller_than_those_of_bitsandbytes_sums(
    on_host: kernels.Kernels, shape: str, dtype: Any
) -> None:
    wanted = asked(dtype, **SHAPES[shape])
    (found,) = computed(on_host, [understood(wanted)])
    (theirs,) = computed(on_host, [nf4_exact.gemm(3, **wanted)])
    right = exact(wanted)
    errors, other_errors = ((one.double() - right).abs() for one in (found, theirs))
    assert errors.mean() <= other_errors.mean()
    assert errors.max() <= 1.01 * other_errors.max()


@pytest.mark.parametrize("more", [
    {"nested": False}, {"quant_type": "fp4"}, {"bias": True}, {"blocksize": 128}, {"blocksize": 512, "nested": False},
    {"rows": 8}, {"rows": 20}, {"rows": 3, "bias": True, "quant_type": "fp4", "dtype": torch.float16},
], ids=str)  # fmt: skip
def test_every_format_is_near_float64(on_host: kernels.Kernels, more: dict[str, Any]) -> None:
    wanted = asked(**{"dtype": torch.bfloat16, "inputs": 1024, "outputs": 40, **more})
    (found,) = computed(on_host, [understood(wanted)])
    right = exact(wanted)
    assert (found.double() - right).abs().max() <= torch.finfo(found.dtype).eps * right.abs().max()


@pytest.mark.parametrize(("inputs", "rows"), [
    (512, 8), (15360, 8), (192, 9), (4160, 16), (576, 17), (192, 32), (576, 64),
])  # fmt: skip
def test_a_row_has_the_same_bits_in_every_batch(on_host: kernels.Kernels, inputs: int, rows: int) -> None:
    wanted = asked(torch.bfloat16, inputs, 24, rows=rows)
    (together,) = computed(on_host, [understood(wanted)])
    for row in {0, 5, 7, rows - 1}:
        (alone,) = computed(on_host, [understood(wanted | {"given": wanted["given"][row : row + 1].contiguous()})])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("rows", [1, 40])
def test_weights_in_one_launch_have_the_bits_that_they_have_alone(on_host: kernels.Kernels, rows: int) -> None:
    several = [asked(torch.bfloat16, 512, outputs, rows=rows, seed=outputs) for outputs in (70, 16, 3)]
    several = [one | {"given": several[0]["given"]} for one in several]
    together = computed(on_host, [understood(one) for one in several])
    for one, found in zip(several, together, strict=True):
        assert torch.equal(found, computed(on_host, [understood(one)])[0])


def test_an_adapters_first_product_goes_beside_one_with_larger_blocks(on_host: kernels.Kernels) -> None:
    wanted = asked(torch.bfloat16, 4160, 20)
    one = understood(wanted)
    adapter = torch.randn(16, 4160, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    other = dense.product(wanted["given"], adapter)
    results = [one.empty(), other.empty()]
    (both,) = products.kernels_of(([one], results[:1]), ([other], results[1:]))
    assert both.block == 512
    launched(on_host, [both])
    assert torch.equal(results[0], computed(on_host, [one])[0])
    assert torch.equal(results[1], computed(on_host, [other])[0])


def test_large_and_small_inputs_lose_nothing(on_host: kernels.Kernels) -> None:
    wanted = asked(torch.bfloat16, 256, 16)
    scaled = wanted["given"] * torch.tensor([1e30, 1e-30, 0.0, 1.0]).repeat_interleave(64).to(torch.bfloat16)
    wanted = asked(torch.bfloat16, 256, 16) | {"given": scaled}
    for part in range(4):
        alone = torch.zeros_like(scaled)
        alone[:, part * 64 : part * 64 + 64] = scaled[:, part * 64 : part * 64 + 64]
        (found,) = computed(on_host, [understood(wanted | {"given": alone})])
        right = exact(wanted | {"given": alone})
        assert (found.double() - right).abs().max() <= 2**-8 * right.abs().max()


def test_what_is_no_number_stays_none(on_host: kernels.Kernels) -> None:
    wanted = asked(torch.bfloat16, 128, 16)
    for value in (float("inf"), float("nan")):
        given = wanted["given"].clone()
        given[0, 77] = value
        (found,) = computed(on_host, [understood(wanted | {"given": given})])
        assert not found.isfinite().any()


@pytest.mark.parametrize("more", [{"dtype": torch.float32}, {"blocksize": 32}, {"rows": 65}], ids=str)
def test_what_does_not_suit_is_left(more: dict[str, Any]) -> None:
    wanted = asked(**{"dtype": torch.bfloat16, "inputs": 128, "outputs": 8, **more})
    assert nf4_gemv.match(**wanted) is None
