"""benchmarks/decoding/own_kernels.py, with kernels that the host compiles."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
import torch

from benchmarks.decoding import own_kernels
from gemma4_compat._decoding import kernels
from tests.unit.decoding.host_kernels import HostCompiler

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> Any:
    reason = HostCompiler.obstacle()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    yield
    kernels._kernels.pop(CPU, None)


def test_attention_errs_less_than_pytorchs() -> None:
    found = own_kernels.attention(CPU, few=True)["errors"]
    assert [(one["width"], one["keys"]) for one in found] == [(256, 1), (256, 64), (512, 1), (512, 64)] * 2
    assert own_kernels.wrong(found) == []
    assert own_kernels.wrong([{**found[1], "same_bits": False}])
    assert own_kernels.wrong([{**found[1], "largest": [1.0, 0.5]}])


def test_every_shape_of_the_variants_is_tried() -> None:
    tried = list(own_kernels.signatures(few=False))
    assert len(set(tried)) == len(tried) > 300
    assert {name for name, _, _ in tried} == {"mean", "4-bit product", "shift of a sliding cache", "4-bit weight"}


def test_trials_say_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_kernels, "signatures", lambda few: [("mean", (1, 32), torch.float32)])
    monkeypatch.setattr(torch.Tensor, "mean", lambda self, *_, **__: torch.zeros((*self.shape[:-1], 1)))
    assert own_kernels.trials(CPU, few=True) == {
        "mean": {"tried": 1, "differ": ["((1, 32), torch.float32)"], "errors": {}}
    }
