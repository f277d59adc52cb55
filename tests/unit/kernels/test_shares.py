"""Softmax of training's attention, and its gradients, in kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._gemma4.attention import products
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.match import custom, shares
from tests.unit.gemma4.attention import test_products
from tests.unit.gemma4.attention.test_products import on_the_cpu, whole
from tests.unit.kernels.host_kernels import HostCompiler

__all__ = ["on_the_cpu", "whole"]
DEVICE = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    HostCompiler.unsupported_reason() is not None, reason=str(HostCompiler.unsupported_reason())
)


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    custom.operators()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_those_of_float64_rounded(dtype: Any) -> None:
    assert shares.compute(DEVICE, dtype)


def test_not_for_other_dtypes_and_devices() -> None:
    assert not shares.compute(DEVICE, torch.float32)
    assert not shares.compute(torch.device("meta"), torch.bfloat16)


@pytest.mark.parametrize(
    "wrong",
    [
        ("sum += x[turn][k]", "sum += x[turn][0]"),
        ("of.by_query ? in / of.group", "of.by_query ? in % of.group"),
        ("most == Float32::lowest() ? 0.0f : ", ""),
        ("(y[k] - total)", "y[k]"),
        ("of.start + query + 1u", "of.start + query + 2u"),
    ],
)
def test_kernels_that_are_wrong_are_not_used(
    change_file: Callable[[str, str, str], None], wrong: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    change_file("shares.cuh", *wrong)
    with caplog.at_level("INFO", logger="gemma4_compat"):
        assert not shares.compute(DEVICE, torch.bfloat16)
    assert "PyTorch computes the softmax of training's attention" in caplog.text


def test_what_is_not_finite_is_so_in_its_row_only() -> None:
    scores = torch.randn((1, 3, 70), generator=torch.Generator().manual_seed(0))
    scores[0, 1, 7] = torch.nan
    found, sums = torch.empty(1, 3, 70, dtype=torch.bfloat16), torch.empty(1, 3, 2)
    torch.ops.gemma4_compat.shares(scores, torch.ones(70, dtype=torch.bool), (1, 1, 1, 3), False, 0, 1.0, found, sums)
    assert found.isnan().all(-1).tolist() == [[False, True, False]]
    assert torch.allclose(found[0, ::2].float(), scores[0, ::2].softmax(-1), rtol=2**-7)


@pytest.fixture
def fused(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by products has the kernels, and PyTorch computes no softmax of it."""
    monkeypatch.setattr(products, "are_fused", shares.compute)
    assert shares.compute(DEVICE, torch.bfloat16)
    monkeypatch.setattr(products._Block, "_in_16_bits", None)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("kind", test_products.MASKS)
def test_attention_of_wide_heads_is_as_exact(whole: Any, kind: str) -> None:
    test_products.is_exact(whole, kind, torch.bfloat16, "cpu")


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(("kind", "groups"), [("padded", 2), ("image", 4), ("by head", 2), ("numbers", 4)])
def test_attention_of_windows_is_as_exact(whole: Any, monkeypatch: pytest.MonkeyPatch, kind: str, groups: int) -> None:
    for name in ("_WINDOW", "UNIT"):
        monkeypatch.setattr(products, name, 32)
    test_products.windows_are_exact(whole, kind, groups, "cpu")
