"""Rows of a full sliding cache are moved by one kernel, with the bits of PyTorch's copies."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._decoding import kernels, shifting
from tests.unit.decoding.host_kernels import HostCompiler

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(HostCompiler.obstacle() is not None, reason=str(HostCompiler.obstacle()))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)


def drawn(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rows_moved(keys: Any, values: Any, new_keys: Any, new_values: Any) -> bool:
    """Whether a kernel moved the rows; they have the right bits in any case."""
    expected = [torch.cat((held[:, :, 1:], new), -2) for held, new in ((keys, new_keys), (values, new_values))]
    found = shifting.kernel_of(keys, values, new_keys, new_values)
    shifting.by_kernel(keys, values, new_keys, new_values, True)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])
    return found is not None


@pytest.mark.parametrize("word", shifting._WORDS)
@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_a_trial_of_each_kernel(word: int, times: int) -> None:
    dtype = torch.bfloat16 if word == 2 else torch.float32
    assert kernels.of(CPU).prepare([], [(shifting.OPERATION, (word, times), dtype)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 8, 16), (3, 2, 8, 32), (1, 1, 512, 256), (2, 1, 5, 20), (1, 3, 33, 7), (1, 2, 1, 16), (1, 1, 3000, 24)],
)
def test_layers(shape: tuple[int, ...], dtype: Any) -> None:
    batch, heads, _, width = shape
    keys, values = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype).neg()
    for turn in range(2):
        fresh = drawn(2, batch, 1, heads, width, dtype=dtype) + turn  # transposed, as a layer's are
        assert rows_moved(keys, values, *fresh.transpose(2, 3))


def test_a_new_row_within_other_numbers() -> None:
    keys, values = drawn(2, 2, 8, 16), drawn(2, 2, 8, 16)
    both = drawn(2, 1, 5, 16)
    assert rows_moved(keys, values, both[:, :, 1:3].transpose(1, 2), both[:, :, 3:].transpose(1, 2))
    unaligned = drawn(2 * 2 * 16 + 1)[1:].view(2, 2, 1, 16)
    assert rows_moved(keys, values, unaligned, unaligned.clone())


def test_what_does_not_suit_is_copied_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gemma4_compat")
    shifting._say.cache_clear()
    fresh = drawn(1, 2, 1, 16)
    for _ in range(2):
        strided = drawn(1, 8, 2, 16).transpose(1, 2)
        assert not rows_moved(strided, strided.clone(memory_format=torch.preserve_format), fresh, fresh)
    assert len([one for one in caplog.records if "no kernel suits" in one.message]) == 1
    assert not rows_moved(drawn(1, 2, 8, 16), drawn(1, 2, 8, 32), fresh, drawn(1, 2, 1, 32))


def test_a_kernel_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_kernels", {})
    shifting._text.cache_clear()
    monkeypatch.setattr(shifting, "_TEXT", shifting._TEXT.replace("(at + 1u) * words]", "at * words]"))
    keys, values, fresh = drawn(1, 1, 8, 16), drawn(1, 1, 8, 16), drawn(1, 1, 1, 16)
    assert rows_moved(keys, values, fresh, fresh)  # there is one, which has failed its trial
    assert kernels.of(CPU).inexact() == [f"{shifting.OPERATION} of torch.bfloat16"]
    shifting._text.cache_clear()


def test_the_trial_sees_a_missing_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator runs the threads of some blocks backwards."""
    monkeypatch.setattr(kernels, "_kernels", {})
    shifting._text.cache_clear()
    monkeypatch.setattr(shifting, "_TEXT", shifting._TEXT.replace("__syncthreads();", ""))
    assert not kernels.of(CPU).prepare([], [(shifting.OPERATION, (16, 2), torch.bfloat16)])
    shifting._text.cache_clear()
