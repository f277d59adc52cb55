"""The loss in chunks by a kernel, against PyTorch's operations in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._kernels import kernels
from gemma4_compat._training import chunks
from tests.unit.kernels.host_kernels import HostCompiler
from tests.unit.training import test_chunks

WORDS = 5004
pytestmark = pytest.mark.skipif(
    HostCompiler.unsupported_reason() is not None, reason=str(HostCompiler.unsupported_reason())
)
CAPS = pytest.mark.parametrize("soft_cap", [None, 30.0])


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)


def logits(dtype: Any = torch.bfloat16) -> Any:
    return torch.randn((3, WORDS), generator=torch.Generator().manual_seed(0)).mul_(9).to(dtype)


@CAPS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_losses_and_gradients_are_those_of_pytorch(dtype: Any, soft_cap: float | None) -> None:
    targets, both = torch.tensor([0, WORDS - 1, 7]), [logits(dtype) for _ in range(2)]
    given = both[0].double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(
        given if soft_cap is None else (given / soft_cap).tanh() * soft_cap, targets, reduction="none"
    )
    exact.sum().backward()
    assert chunks._is_fused(both[0], soft_cap)
    found, right = (how(one, targets, soft_cap, True) for how, one in zip((chunks._by_kernel, chunks._block), both))
    assert torch.allclose(found, right, rtol=1e-6)
    off, theirs = (float((one - given.grad).norm()) for one in both)
    # A CPU rounds the gradient of tanh once, a GPU three times, as the kernel does.
    assert off <= (2 if soft_cap else 1.001) * theirs


def test_without_a_gradient_there_is_a_loss() -> None:
    targets = torch.tensor([4, 5, 6])
    found, right = (how(logits(), targets, 30.0, False) for how in (chunks._by_kernel, chunks._block))
    assert torch.allclose(found, right, rtol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        ("found -= 1.0f;", ""),
        ("most + logf(", "logf("),
        ("1.0f - T::rounded(x[k] * x[k])", "1.0f"),
        ("sum = __fadd_rn(sum, expf(", "if (k) sum = __fadd_rn(sum, expf("),
    ],
)
def test_a_kernel_that_is_wrong_is_not_used(
    change_file: Callable[[str, str, str], None], wrong: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    change_file("cross_entropy.cuh", *wrong)
    with caplog.at_level("INFO", logger="gemma4_compat"):
        assert not chunks._is_fused(logits(), 30.0)
    assert "PyTorch computes the loss in chunks" in caplog.text


@CAPS
def test_a_step_has_its_loss_and_gradients(monkeypatch: pytest.MonkeyPatch, soft_cap: float | None) -> None:
    monkeypatch.setattr(test_chunks, "WORDS", 52)
    right = test_chunks.step(test_chunks.plain, torch.bfloat16, soft_cap)
    monkeypatch.setattr(chunks, "_block", None)  # nothing is left to PyTorch
    monkeypatch.setattr(chunks, "_is_fused", lambda *_: True)
    found = test_chunks.step(test_chunks.chunked, torch.bfloat16, soft_cap)
    assert torch.allclose(found[0], right[0], rtol=1e-5)
    for one, other in zip(found[1:], right[1:], strict=True):
        assert (one - other).norm() <= test_chunks.BOUND[torch.bfloat16] * other.norm()


def test_logits_that_the_kernel_does_not_take_are_left_to_pytorch() -> None:
    for other in (logits(torch.float32), logits()[:, :-1], logits()[:, :5003].contiguous()):
        assert not chunks._is_fused(other, None)


def test_a_label_that_is_no_word_raises() -> None:
    with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|index"):
        chunks._by_kernel(logits(), torch.tensor([0, WORDS, 1]), None, True)
