"""Weights that stay the integers of a compressed-tensors checkpoint: unpacked by one kernel, with PyTorch's bits, and
multiplied by few rows without being unpacked, nearer to float64 than what is unpacked.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._gemma4.quantization import packed_linear
from gemma4_compat._kernels import kernels, programs
from gemma4_compat._kernels.match import dequantizing
from gemma4_compat._kernels.specs import dense, nf4_gemv, products
from gemma4_compat._kernels.specs.products import Product

CPU = torch.device("cpu")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def packed(
    outputs: int = 5,
    inputs: int = 128,
    *,
    group: int = 32,
    dtype: Any = torch.bfloat16,
    seed: int = 0,
    device: Any = CPU,
) -> dict[str, Any]:
    """The tensors of a layer, as ``packed_linear.unpacked`` takes them; a group of 0 is the whole weight."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (outputs, -(-inputs // 8)), generator=generator)
    shape = (outputs, inputs // group) if group else (1,)
    scale = (torch.rand(shape, generator=generator) * 0.1).to(dtype)
    tensors = {"packed": words.to(device, torch.int32), "scale": scale.to(device)}
    return {**tensors, "columns": inputs, "bits": 4, "stored": dtype}


def product(dtype: Any, inputs: int, outputs: int, *, group: int, rows: int = 1, **more: Any) -> Product:
    """A product with the weight of a layer."""
    found = nf4_gemv.match(**asked(dtype, inputs, outputs, group=group, rows=rows, **more))
    assert found is not None
    return found


def asked(
    dtype: Any, inputs: int, outputs: int, *, group: int, rows: int = 1, bias: bool = False, seed: int = 0
) -> dict[str, Any]:
    """The arguments of ``nf4_gemv.match`` for the weight of a layer."""
    layer = packed(outputs, inputs, group=group, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(rows, inputs, generator=generator).to(dtype)
    found = {"given": given, "packed": layer["packed"], "shape": (outputs, inputs), "absmax": layer["scale"]}
    more = {"bias": torch.randn(outputs, generator=generator).to(dtype)} if bias else {}
    return found | {"blocksize": group, "quant_type": "int4"} | more


def exact(wanted: dict[str, Any]) -> Any:
    """The product in float64; weights are not rounded."""
    inputs, scale = wanted["shape"][1], wanted["absmax"].double()
    weight = packed_linear.unpacked(wanted["packed"], scale, inputs, 4, scale.dtype)
    return wanted["given"].double() @ weight.t() + (wanted["bias"].double() if "bias" in wanted else 0)


def computed(on_host: kernels.Kernels, *several: Product) -> list[Any]:
    results = [one.empty().fill_(float("nan")) for one in several]
    wanted = products.kernels_of((several, results))
    on_host.prepare([kernel.text for kernel in wanted], [])
    for kernel in wanted:
        on_host.launch(kernel)
    return results


def by_unpacking(on_host: kernels.Kernels, wanted: dict[str, Any]) -> Any:
    scale = wanted["absmax"]
    weight = packed_linear.unpacked(wanted["packed"], scale, wanted["shape"][1], 4, scale.dtype)
    return computed(on_host, dense.product(wanted["given"], weight))[0]


@pytest.fixture
def launched(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that were launched, without those of trials."""
    found: list[Any] = []
    launch = kernels.Kernels.launch

    def noted(self: Any, kernel: Any) -> None:
        if not getattr(kernels.of(CPU).tests._here, "trying", False):
            found.append(kernel)
        launch(self, kernel)

    monkeypatch.setattr(kernels.Kernels, "launch", noted)
    monkeypatch.setattr(dequantizing, "_launches", {})
    return found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("inputs", "group"), [(192, 32), (256, 128), (1160, 1160), (64, 0), (48, 24)])
def test_one_kernel_has_the_bits(launched: list[Any], inputs: int, group: int, dtype: Any) -> None:
    given = packed(67, inputs, group=group, dtype=dtype)
    given["scale"].view(-1)[0] = 3e-38 if dtype != torch.float16 else 6e-8  # subnormal
    found = dequantizing.unpacked(**given)
    assert same_bits(found, packed_linear.unpacked(**given))
    assert len(launched) == 1
    (tried,) = kernels.of(CPU).tests.passed
    assert tried.blocksize == 24  # whatever the block
    again = dequantizing.unpacked(**given)
    assert again.data_ptr() != found.data_ptr()
    assert same_bits(again, found)


def _eight_bits(given: dict[str, Any]) -> None:
    given |= {"bits": 8, "columns": given["columns"] // 2, "scale": given["scale"][:, :2].contiguous()}


def _cast_since(given: dict[str, Any]) -> None:
    given["scale"] = given["scale"].float()


def _columns_that_no_word_ends_with(given: dict[str, Any]) -> None:
    given |= {"columns": 125, "scale": given["scale"][:, :1].contiguous()}


def _groups_that_no_word_ends_with(given: dict[str, Any]) -> None:
    given["scale"] = given["scale"].repeat_interleave(8, 1)


def _with_gaps(given: dict[str, Any]) -> None:
    given["scale"] = given["scale"].repeat_interleave(2, 1)[:, ::2]


@pytest.mark.parametrize(
    "change",
    [_eight_bits, _cast_since, _columns_that_no_word_ends_with, _groups_that_no_word_ends_with, _with_gaps],
    ids=lambda change: change.__name__.strip("_"),
)
def test_what_is_left_to_pytorch(launched: list[Any], change: Callable[[dict[str, Any]], None]) -> None:
    change(given := packed())
    assert same_bits(dequantizing.unpacked(**given), packed_linear.unpacked(**given))
    assert launched == []


def test_other_bits_leave_it_to_pytorch(
    launched: list[Any], change_file: Any, caplog: pytest.LogCaptureFixture
) -> None:
    change_file("nf4_dequantize.cuh", "15u) - 8)", "15u) - 7)")
    given = packed()
    with caplog.at_level(logging.INFO, "gemma4_compat"):
        for _ in range(2):
            assert same_bits(dequantizing.unpacked(**given), packed_linear.unpacked(**given))
    assert launched == []
    assert caplog.text.count("PyTorch unpacks 4-bit weights") == 1


def test_pairs_are_the_integers_in_float16() -> None:
    _, _, type_of = programs.headers()["four_bit.cuh"].partition("struct Int4 ")
    pairs = [int(text, 16) for text in re.findall(r"0x(\w{8})u", type_of)]
    halves = torch.tensor([half for pair in pairs for half in (pair & 0xFFFF, pair >> 16)], dtype=torch.int32)
    assert halves.to(torch.int16).view(torch.float16).tolist() == list(range(-8, 8))


SHAPES = {
    "one chunk": {"inputs": 64, "outputs": 5, "group": 32},
    "some warps idle": {"inputs": 320, "outputs": 33, "group": 64},
    "E2B": {"inputs": 1536, "outputs": 35, "group": 32},
    "12B": {"inputs": 3840, "outputs": 17, "group": 128},
    "12B, rows": {"inputs": 3840, "outputs": 17, "group": 3840},
    "several parts of the inputs": {"inputs": 15360, "outputs": 18, "group": 32},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_errors_are_smaller_than_those_of_unpacked_weights(
    on_host: kernels.Kernels, shape: str, dtype: Any
) -> None:
    wanted = asked(dtype, rows=3, **SHAPES[shape])
    (found,) = computed(on_host, product(dtype, rows=3, **SHAPES[shape]))
    errors, others = ((one.double() - exact(wanted)).abs() for one in (found, by_unpacking(on_host, wanted)))
    assert errors.mean() <= others.mean()
    assert errors.max() <= 1.01 * others.max()


@pytest.mark.parametrize("group", [32, 64, 128, 192, 768])
@pytest.mark.parametrize("more", [{}, {"bias": True}, {"rows": 8}, {"rows": 20}], ids=str)
def test_every_format_is_near_float64(on_host: kernels.Kernels, group: int, more: dict[str, Any]) -> None:
    wanted = {"dtype": torch.bfloat16, "inputs": 768, "outputs": 40, "group": group, **more}
    (found,) = computed(on_host, product(**wanted))
    right = exact(asked(**wanted))
    assert (found.double() - right).abs().max() <= torch.finfo(found.dtype).eps * right.abs().max()


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(("inputs", "rows"), [(512, 8), (15360, 8), (192, 9), (4160, 16), (576, 64)])
def test_a_row_has_the_same_bits_in_every_batch(on_host: kernels.Kernels, inputs: int, rows: int, group: int) -> None:
    wanted = asked(torch.bfloat16, inputs, 24, group=group, rows=rows)
    (together,) = computed(on_host, nf4_gemv.match(**wanted))
    for row in {0, 5, rows - 1}:
        alone = nf4_gemv.match(**wanted | {"given": wanted["given"][row : row + 1].contiguous()})
        assert torch.equal(computed(on_host, alone)[0][0], together[row])


def test_weights_in_one_launch_have_the_bits_that_they_have_alone(on_host: kernels.Kernels) -> None:
    wanted = [asked(torch.bfloat16, 512, outputs, group=32, seed=outputs) for outputs in (70, 16, 3)]
    several = [nf4_gemv.match(**one | {"given": wanted[0]["given"]}) for one in wanted]
    assert several[0] is not None
    assert several[0].can_join(several[2])
    for one, found in zip(several, computed(on_host, *several), strict=True):
        assert torch.equal(found, computed(on_host, one)[0])


@pytest.mark.parametrize("group", [32, 64])
def test_large_and_small_inputs_lose_nothing(on_host: kernels.Kernels, group: int) -> None:
    wanted = asked(torch.bfloat16, 256, 16, group=group)
    by = torch.tensor([1e30, 1e-30, 0.0, 1.0]).repeat_interleave(64).to(torch.bfloat16)
    for part in range(4):
        given = torch.zeros_like(wanted["given"])
        given[:, part * 64 : part * 64 + 64] = (wanted["given"] * by)[:, part * 64 : part * 64 + 64]
        (found,) = computed(on_host, nf4_gemv.match(**wanted | {"given": given}))
        right = exact(wanted | {"given": given})
        assert (found.double() - right).abs().max() <= 2**-8 * right.abs().max()


@pytest.mark.parametrize("more", [
    {"dtype": torch.float32}, {"group": 16}, {"group": 96, "inputs": 192}, {"inputs": 96}, {"rows": 65},
], ids=str)  # fmt: skip
def test_what_does_not_suit_is_unpacked(more: dict[str, Any]) -> None:
    wanted = {"dtype": torch.bfloat16, "inputs": 128, "outputs": 8, "group": 32, **more}
    assert nf4_gemv.match(**asked(**wanted)) is None


def test_scales_of_another_dtype_do_not_suit() -> None:
    wanted = asked(torch.bfloat16, 128, 8, group=32)
    for other in (wanted["absmax"].float(), wanted["absmax"].half()):
        assert nf4_gemv.match(**wanted | {"absmax": other}) is None


def test_scales_may_lie_anywhere(on_host: kernels.Kernels) -> None:
    """As in a file that is mapped into memory."""
    wanted = asked(torch.bfloat16, 128, 8, group=32)
    scale = wanted["absmax"]
    moved = torch.cat((scale.view(-1)[:1], scale.view(-1)))[1:].view(scale.shape)
    one, other = (nf4_gemv.match(**wanted | {"absmax": where}) for where in (scale, moved))
    assert torch.equal(*computed(on_host, one), *computed(on_host, other))
