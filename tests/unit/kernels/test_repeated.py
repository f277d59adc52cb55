"""A kernel that was written for values like these is the kernel that would be written for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._kernels.fuse import repeated, row_kernels
from gemma4_compat._kernels.fuse.pointwise import Load, Number, Part, Value
from tests.unit.kernels.kernel_examples import _adapted, _normed


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_known", {})


def plain(number: float = 0.5, *, shared: bool = False, stride: int = 1) -> list[Value]:
    """Two results, one of which the other reads."""
    given = torch.zeros(64)
    other = given if shared else torch.zeros(64)
    scaled = Value("multiply", (Load(given, (stride,)), Number(number)), (32,), torch.float32, memory=torch.zeros(32))
    return [
        scaled,
        Value("add", (Part(scaled, 0, (1,)), Load(other, (1,))), (32,), torch.float32, memory=torch.zeros(32)),
    ]


def normed() -> list[Value]:
    return [_normed(Part(_adapted(torch.float32, 16, 1, 1536), 0, (1536, 1)))]


def assert_as_written(values: list[Value]) -> None:
    found, signatures = repeated.kernels_of(values)
    expected = row_kernels.kernels_of(values)
    assert [(one.text, one.written, one.sizes, one.block, one.grid) for one in found] == [
        (one.text, one.written, one.sizes, one.block, one.grid) for one in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert [(tensor.data_ptr(), tensor.dtype) for tensor in one.tensors] == [
            (tensor.data_ptr(), tensor.dtype) for tensor in other.tensors
        ]
    assert {value.signature for value in values} <= set(signatures)


@pytest.mark.parametrize("make", [plain, normed])
def test_the_second_time_nothing_is_written(make: Callable[[], list[Value]], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = [make() for _ in range(3)]  # at addresses of their own
    for values in kept[:2]:
        assert_as_written(values)
    assert len(repeated._known) == 1
    expected = row_kernels.kernels_of(kept[2])
    monkeypatch.setattr(row_kernels, "kernels_of", None)
    found, _ = repeated.kernels_of(kept[2])
    assert [one.text for one in found] == [one.text for one in expected]
    assert [[tensor.data_ptr() for tensor in one.tensors] for one in found] == [
        [tensor.data_ptr() for tensor in one.tensors] for one in expected
    ]


def test_what_differs_is_written_anew() -> None:
    kept = [plain(), plain(0.0), plain(-0.0), plain(shared=True), plain(stride=2), normed()]
    for values in kept:
        assert_as_written(values)
    assert len(repeated._known) == len(kept)


def test_it_forgets_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_MOST_KNOWN", 2)
    for number in range(5):
        assert_as_written(plain(float(number)))
    assert len(repeated._known) <= 2
