"""benchmarks/decoding/long_text.py: what it takes for flat, and for the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
import torch

from benchmarks.decoding import long_text, models
from gemma4_compat._graphs import recording
from gemma4_compat._kernels import kernels
from gemma4_compat._lab.stand_ins import tape
from tests.unit.kernels.host_kernels import HostCompiler

MIB = 2**20


def looks(*mib: int) -> list[dict[str, int]]:
    return [{"token": 10 * (1 + n), "allocated": one * MIB, "reserved": 64 * MIB} for n, one in enumerate(mib)]


def test_memory_counts_from_the_first_tenth_of_the_text() -> None:
    assert long_text.grown(looks(1, 9, 9, 9), tokens=200) == {"allocated": 0, "reserved": 0}
    assert long_text.grown(looks(1, 9, 9, 15), tokens=200) == {"allocated": 6 * MIB, "reserved": 0}
    assert long_text.grown([], tokens=200) == {}


def test_the_first_token_that_differs() -> None:
    assert long_text.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert long_text.first_difference([1, 2, 3], [1, 5, 4]) == 1


def test_two_lengths_of_a_cache_give_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = HostCompiler.unsupported_reason()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    kept: list[dict[str, Any]] = []
    with tape.standing_in(recording.RECORDERS):
        models.build("tiny-E2B", tmp_path)
        model = models.load("gpu", tmp_path)
        if not hasattr(model.generation_config, "max_cache_len"):
            pytest.skip("this transformers has no max_cache_len")
        found = long_text.compared(model, 6, 12, lambda result: kept.append(dict(result)))
    kernels._kernels.pop(torch.device("cpu"), None)
    assert found["problems"] == []
    assert (found["first_difference"], found["distinct_tokens"] > 4) == (None, True)
    assert [one["room"] for one in found["runs"]] == [18, 36]
    assert len({one["digest"] for one in found["runs"]}) == 1
    assert len(kept) == 2
