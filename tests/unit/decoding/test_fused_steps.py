"""A step with fused kernels has the bits of the step without, or it stays without."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("torch")


from gemma4_compat._decoding import fused_steps, kernels
from tests.helpers import pairwise
from tests.unit.decoding import calls
from tests.unit.decoding.calls import Models
from tests.unit.decoding.host_kernels import HostCompiler


@pytest.fixture
def fusing(tapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on the CPU are fused, too, at their second replay."""
    reason = HostCompiler.obstacle()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    monkeypatch.setattr(fused_steps, "AFTER", 2)


FACTORS = ([None, "4bit-double"], [None, "language"], ["device", "host", "streamed"])
#: Cells of the fast suite.
FAST = pairwise(*FACTORS)


@pytest.mark.parametrize(
    "quantization, adapter, where",
    [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.full) for cell in itertools.product(*FACTORS)],
)
def test_answers_are_the_same(
    fusing: None, models: Models, quantization: str | None, adapter: str | None, where: str
) -> None:
    model = models.fresh(quantization, adapter, where)
    calls.compared(model, calls.ask(model, new=8))
    found = calls.steps(model)
    assert found.fused == 1, found
    assert found.not_fused == ()
    calls.compared(model, calls.ask(model, new=8))
    assert (calls.steps(model).captured, calls.steps(model).fused) == (1, 1)  # the next call has the same graph


def test_other_bits_leave_the_step_as_it_was(
    fusing: None, models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.fresh()
    launch = kernels.Kernels.launch

    def wrong(self: kernels.Kernels, kernel: Any) -> None:
        launch(self, kernel)
        if kernel.written:  # in a replay, too: the recorder sees it
            kernel.tensors[-1].zero_()

    monkeypatch.setattr(kernels.Kernels, "launch", wrong)
    monkeypatch.setattr(kernels.Kernels, "accepts", lambda self, signature: signature[0] != "gelu_tanh")
    monkeypatch.setattr(kernels.Kernels, "prepare", lambda self, texts, _signatures: not self._compile(texts))
    calls.compared(model, calls.ask(model, new=8))
    assert calls.steps(model).fused == 0
    (reason,) = calls.steps(model).not_fused
    assert "other bits" in reason
    assert [record.message for record in caplog.records].count(
        f"gemma4_compat: decoding without fused kernels, with the same bits: {reason}"
    ) == 1


@pytest.mark.parametrize("what", ["compile", "capture", "compare"])
def test_a_failure_leaves_the_step_as_it_was(
    fusing: None, models: Models, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    model = models.fresh(None, "language", "streamed")

    def fails(*_: Any) -> None:
        raise RuntimeError("no kernel today")

    where: Any = fused_steps if what == "compare" else kernels.Kernels
    monkeypatch.setattr(where, {"compile": "_compile", "capture": "launch", "compare": "_are_equal"}[what], fails)
    monkeypatch.setattr(kernels, "_kernels", {})
    calls.compared(model, calls.ask(model, new=8))
    assert (calls.steps(model).fused, calls.steps(model).not_fused) == (0, ("RuntimeError: no kernel today",))
    assert calls.steps(model).captured == 1


def test_without_a_compiler_nothing_is_fused(tapes: Any, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_steps, "AFTER", 2)
    model = models.fresh()
    calls.compared(model, calls.ask(model, new=8))
    found = calls.steps(model)
    assert (found.fused, found.not_fused) == (0, ())
    assert found.replayed == 6
