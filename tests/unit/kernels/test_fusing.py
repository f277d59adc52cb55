"""Pointwise operations that are put off are computed with PyTorch's bits, in time, and only if somebody holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._graphs import fused_steps
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.fuse import pointwise
from gemma4_compat._kernels.programs import Kernel
from tests.helpers import ROOT
from tests.unit.kernels.host_kernels import HostCompiler

CPU = torch.device("cpu")
SCALE = torch.tensor([0.7]).bfloat16()
pytestmark = pytest.mark.skipif(
    HostCompiler.unsupported_reason() is not None, reason=str(HostCompiler.unsupported_reason())
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)


class Launches(fused_steps._Launches):
    """Keeps the kernels that it launches."""

    def __init__(self) -> None:
        super().__init__(kernels.of(CPU))
        self.kernels: list[Kernel] = []

    def kernel(self, kernel: Kernel, signatures: Iterable[tuple[Any, ...]]) -> None:
        super().kernel(kernel, signatures)
        self.kernels.append(kernel)


def run(function: Callable[..., Any], *given: Any) -> tuple[Any, list[Kernel]]:
    """What the function returns when its operations are put off, and the kernels that there were."""
    for _ in range(4):
        sink, copies = Launches(), [value.clone() for value in given]
        with torch.no_grad(), fused_steps._fusing(CPU, sink):
            found = function(*copies)
        if not sink.texts:
            return found, sink.kernels
        kernels.of(CPU).prepare(list(sink.texts), list(sink.signatures))
    raise AssertionError("each run needs other kernels")


def assert_fused(function: Callable[..., Any], *given: Any, count: int = 1) -> None:
    found, launched = run(function, *given)
    with torch.no_grad():
        expected = function(*[value.clone() for value in given])
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        assert same_bits(one, other)
    assert len(launched) == count


def numbers(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_operations(dtype: Any) -> None:
    def several(x: Any, y: Any) -> tuple[Any, ...]:
        return x * y, x + y, x - y, x / y, -x, x * 0.3, x + 2, x.float(), x.float().pow(2), torch.where(x > y, x, y)

    assert_fused(several, numbers(2, 3, 8, dtype=dtype), numbers(3, 1, dtype=dtype), count=1)


def test_numbers_of_infinite_size_and_none() -> None:
    def constants(x: Any) -> tuple[Any, ...]:
        low = torch.scalar_tensor(float("-inf"), dtype=x.dtype, device=x.device)
        return torch.where(x > 0, low, x), x * 1e30, x * 1e-40

    assert_fused(constants, numbers(5))


def test_views_of_what_is_put_off() -> None:
    def turned(x: Any) -> tuple[Any, ...]:
        y = (x * 2).view(2, 3, 4).transpose(0, 1)
        left, right = y[..., :2], y[..., 2:]
        return torch.cat((-right, left), dim=-1) + y, y[1:, 0] * y[:2, 1]

    assert_fused(turned, numbers(24), count=2)  # the negative lies as its operand does, which no kernel of ours writes


def test_a_result_changed_in_place() -> None:
    def changed(x: Any) -> tuple[Any, ...]:
        y = x + 1
        before = y * 3
        y *= SCALE
        y += x
        return y, before

    assert_fused(changed, numbers(2, 8))


def test_part_of_a_result_changed_in_place() -> None:
    def changed(x: Any) -> tuple[Any, ...]:
        y = x + 1
        y[0] *= 2
        return (y,)

    assert_fused(changed, numbers(2, 8))


def test_what_a_result_is_computed_from_may_change() -> None:
    def changed(x: Any) -> tuple[Any, ...]:
        y = x * 2
        x.zero_()
        z = x + y
        x[1:].copy_(y[1:])
        return y, z, x

    assert_fused(changed, numbers(4), count=2)


def test_other_operations_find_results() -> None:
    def mean(x: Any) -> tuple[Any, ...]:
        y = x.float()
        root = torch.pow(y.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)
        return ((y * root).to(x.dtype),)

    assert_fused(mean, numbers(3, 16), count=2)


def test_what_nobody_holds_is_not_written() -> None:
    _, (kernel,) = run(lambda x: ((x.float() * 2 + 1).bfloat16(),), numbers(8))
    assert kernel.written == 1
    assert run(lambda x: [None for _ in (x * 2,)], numbers(8))[1] == []


def test_memory_that_is_freed_is_not_used_for_another_result() -> None:
    def chain(x: Any) -> tuple[Any, ...]:
        for _ in range(12):
            x = torch.cat((x[..., 4:], x[..., :4]), dim=-1) * SCALE + x.flip(-1) * 2
        return (x,)

    assert_fused(chain, numbers(2, 8), count=12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.long() + 1,),
        lambda x: (x.double() * 2,),
        lambda x: (torch.add(x, x, alpha=2),),
        lambda x: (x.T.contiguous() if x.ndim else x, x.T.clone(memory_format=torch.preserve_format)),
        lambda x: (x[:0] * 2,),
        lambda x: (x * torch.tensor(2.0, dtype=torch.float32),),
        lambda x: (torch.pow(x.float(), 3),),
    ],
)
def test_what_is_not_understood_runs_as_ever(function: Callable[..., Any]) -> None:
    found, _ = run(function, numbers(4, 4))
    for one, other in zip(found, function(numbers(4, 4)), strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert same_bits(one, other)


def test_sizes_are_no_part_of_a_kernel() -> None:
    (first,), (second,) = (run(lambda x: (x * 2 + 1,), numbers(1, 1, 1, length))[1] for length in (40, 56))
    assert first.text == second.text
    assert (first.sizes, second.sizes) == ((40,), (56,))


def test_an_operation_with_other_bits_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = pointwise.Operation("__fadd_rn({0}, {0})", torch.neg)
    monkeypatch.setitem(pointwise.operations(), "negate", wrong)
    fresh = kernels.Kernels(CPU)
    signature = ("negate", (torch.float32,), torch.float32)
    assert not fresh.prepare([], [signature])
    assert not fresh.accepts(signature)
    assert fresh.inexact() == ["negate of torch.float32"]


def test_the_docs_say_when_and_how_often() -> None:
    text = (ROOT / "docs" / "DECODING_NUMERICS.md").read_text(encoding="utf-8")
    assert f"After {fused_steps.Progress.early} replays of a graph" in text
    assert f"after {fused_steps.Progress.after} replays at the\nlatest" in text
    assert f"with {kernels._TRIED:,} random ones" in text


@pytest.mark.parametrize(
    ("kinds", "elements"),
    [((torch.bfloat16,), 1 << 16), ((torch.bfloat16, 0.5), 1 << 16), ((torch.float32, 0.5), kernels._TRIED)],
)
def test_every_value_of_16_bits_is_tried(kinds: tuple[Any, ...], elements: int) -> None:
    name = "multiply" if len(kinds) == 2 else "negate"
    (kernel,), _, expected = kernels.of(CPU)._trial((name, kinds, kinds[0]))
    (given,) = kernel.tensors[: len(kernel.tensors) - kernel.written]
    assert expected.numel() == elements
    if elements == 1 << 16:
        assert len(given.view(torch.int16).unique()) == elements
