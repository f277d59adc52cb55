"""What is copied out of a mapped file is announced to the system before: the right bytes, and nothing else changes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gemma4_compat._offload.transfer import read_ahead, row_lookup

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_WILLNEED"), reason="this system takes no advice")


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Address and length of what is announced; the system takes it, too. Nothing is taken to be in memory."""
    said: list[tuple[int, int]] = []
    real = read_ahead._advise()

    def advise(start: int, size: int, kind: int) -> int:
        assert kind == mmap.MADV_WILLNEED
        assert start % mmap.PAGESIZE == 0
        said.append((start, size))
        result = real(start, size, kind)
        assert result == 0
        return int(result)

    monkeypatch.setattr(read_ahead, "_advise", lambda: advise)
    monkeypatch.setattr(read_ahead, "_is_in_memory", lambda start, end: False)
    return said


@pytest.fixture
def mapped(tmp_path: Path) -> Callable[..., Any]:
    """A float32 tensor of this shape, mapped from a file."""

    def make(*shape: int) -> Any:
        path = tmp_path / "weight"
        np.arange(int(np.prod(shape)), dtype=np.float32).tofile(path)
        return torch.from_numpy(np.memmap(path, dtype=np.float32, mode="c", shape=shape))

    return make


def covered(said: list[tuple[int, int]], tensor: Any) -> bool:
    """Whether the bytes of a contiguous tensor are among those announced."""
    first = tensor.data_ptr()
    pages = range(first // mmap.PAGESIZE, -(-(first + tensor.nbytes) // mmap.PAGESIZE))
    known = {
        page for start, size in said for page in range(start // mmap.PAGESIZE, -(-(start + size) // mmap.PAGESIZE))
    }
    return set(pages) <= known


def test_rows_are_announced_whole_and_no_others(advice: list[tuple[int, int]], mapped: Callable[..., Any]) -> None:
    weight = mapped(16, 3 * read_ahead.STEP // 4 + 5)  # longer than an advice, and not a whole number of pages
    read_ahead.rows(weight, [2, 9])
    assert covered(advice, weight[2])
    assert covered(advice, weight[9])
    assert not covered(advice, weight[4])
    assert all(size <= read_ahead.STEP for _, size in advice)
    assert sum(size for _, size in advice) < 2 * (weight[0].nbytes + mmap.PAGESIZE)


def test_rows_of_a_table_on_disk_are_announced(advice: list[tuple[int, int]], mapped: Callable[..., Any]) -> None:
    weight = mapped(64, 2048)
    tokens = torch.tensor([[7, 50, 7]])
    rows, renumbered = row_lookup.gather(weight, tokens, "cpu", mapped=True)
    assert torch.equal(rows[renumbered], weight[tokens])
    assert covered(advice, weight[7])
    assert covered(advice, weight[50])
    assert not covered(advice, weight[20])
    before = len(advice)
    row_lookup.gather(weight, tokens, "cpu")  # in host memory: nothing to announce
    assert len(advice) == before


def test_what_is_in_memory_is_not_announced(monkeypatch: pytest.MonkeyPatch, mapped: Callable[..., Any]) -> None:
    said: list[int] = []
    monkeypatch.setattr(read_ahead, "_advise", lambda: lambda start, *_: said.append(start))
    weight = mapped(8, 2048)
    weight.sum()
    read_ahead.rows(weight, range(8))
    assert said == []
    monkeypatch.setattr(read_ahead, "_residency", lambda: None)  # a system that does not tell
    read_ahead.rows(weight, range(8))
    assert len(said) == 8


def test_without_advice_the_same_is_read(monkeypatch: pytest.MonkeyPatch, mapped: Callable[..., Any]) -> None:
    monkeypatch.setattr(read_ahead, "_advise", lambda: None)
    weight = mapped(64, 2048)
    rows, _ = row_lookup.gather(weight, torch.tensor([3, 60]), "cpu", mapped=True)
    assert torch.equal(rows, weight[[3, 60]])


def test_refused_advice_is_no_error(monkeypatch: pytest.MonkeyPatch, mapped: Callable[..., Any]) -> None:
    monkeypatch.setattr(read_ahead, "_advise", lambda: lambda *_: -1)
    monkeypatch.setattr(read_ahead, "_is_in_memory", lambda start, end: False)
    weight = mapped(8, 2048)
    read_ahead.rows(weight, [1])
    assert weight[1].tolist() == list(range(2048, 4096))


def test_a_tensor_without_values_is_left_alone(advice: list[tuple[int, int]]) -> None:
    read_ahead.rows(torch.empty(0, 4), [])
    read_ahead.rows(torch.empty(4, 0), [1])
    assert advice == []


def test_a_system_without_advice_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_WILLNEED")
    assert read_ahead._advise.__wrapped__() is None
