"""A step with fused kernels has the bits of the step without, or it stays without."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")


from gemma4_compat._graphs import decoder, fused_steps
from gemma4_compat._kernels import kernels
from tests.helpers import pairwise
from tests.unit.generation import calls
from tests.unit.generation.calls import Models
from tests.unit.kernels.host_kernels import HostCompiler


@pytest.fixture
def fusing(tapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on the CPU are fused, too, at their second replay."""
    reason = HostCompiler.unsupported_reason()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    monkeypatch.setattr(fused_steps.Progress, "after", 2)


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
    monkeypatch.setattr(kernels.Kernels, "prepare", lambda self, texts, _signatures, **_: not self._compile(texts))
    calls.compared(model, calls.ask(model, new=8))
    assert calls.steps(model).fused == 0
    (reason,) = calls.steps(model).not_fused
    assert "differs bitwise" in reason
    assert [record.message for record in caplog.records].count(
        f"gemma4_compat: decoding without fused kernels, with the same bits: {reason}"
    ) == 1


@pytest.mark.parametrize("what", ["compile", "capture", "compare"])
def test_a_failure_leaves_the_step_as_it_was(
    fusing: None, models: Models, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    model = models.fresh(None, "language", "streamed")

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel today")

    where: Any = fused_steps if what == "compare" else kernels.Kernels
    monkeypatch.setattr(where, {"compile": "_compile", "capture": "launch", "compare": "_are_equal"}[what], fails)
    monkeypatch.setattr(kernels, "_kernels", {})
    calls.compared(model, calls.ask(model, new=8))
    assert (calls.steps(model).fused, calls.steps(model).not_fused) == (0, ("RuntimeError: no kernel today",))
    assert calls.steps(model).captured == 1


class Slow(HostCompiler):
    """Compiles in the background; the test says when that is done."""

    futures: list[Future[None]]
    waited: list[bool]

    def begin(self, _texts: Any) -> list[Any]:
        if not self.futures:
            self.futures.append(Future())
        return self.futures

    def compiled(self, texts: Any) -> Any:
        self.waited.append(not all(future.done() for future in self.futures))
        for future in self.futures:
            if future.done():
                future.result()
        return super().compiled(texts)


@pytest.fixture
def slow(tapes: Any, monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    """Steps are looked at in their second replay, and fused in the fifth at the latest."""
    reason = HostCompiler.unsupported_reason()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(Slow, "futures", [], raising=False)
    monkeypatch.setattr(Slow, "waited", [], raising=False)
    monkeypatch.setitem(kernels.COMPILERS, "cpu", Slow)
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(fused_steps.Progress, "early", 2)
    monkeypatch.setattr(fused_steps.Progress, "after", 5)
    return Slow


def replayed(model: Any, count: int) -> None:
    """So many replays, with the bits of the steps that are not replayed."""
    before = calls.steps(model)
    new = count + (1 if before.captured else 2)

    def run(way: dict[str, Any]) -> list[Any]:
        cache = calls.static_cache(model)  # of the same length in each call
        return [calls.generate(model, calls.text(model), way, new=new, past_key_values=cache)]

    calls.compared(model, run)
    assert calls.steps(model).replayed == before.replayed + count


def test_it_goes_on_while_kernels_are_compiled(slow: type[Slow], models: Models) -> None:
    model = models.fresh()
    replayed(model, 1)
    assert slow.futures == []
    replayed(model, 3)
    (future,) = slow.futures
    assert (calls.steps(model).fused, slow.waited) == (0, [])
    future.set_result(None)
    with mock.patch.object(fused_steps.Progress, "after", 10**6):
        replayed(model, 1)
    assert (calls.steps(model).fused, calls.steps(model).not_fused) == (1, ())
    assert not any(slow.waited)
    replayed(model, 3)
    assert (calls.steps(model).captured, calls.steps(model).fused) == (1, 1)


def test_it_waits_in_the_end(slow: type[Slow], models: Models) -> None:
    model = models.fresh()
    replayed(model, 4)
    assert (calls.steps(model).fused, slow.waited) == (0, [])
    replayed(model, 1)
    assert calls.steps(model).fused == 1
    assert slow.waited[0]


def test_kernels_that_are_there_are_used_at_once(
    slow: type[Slow], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "begin", HostCompiler.begin)
    model = models.fresh()
    replayed(model, 2)
    assert (calls.steps(model).fused, calls.steps(model).not_fused) == (1, ())


def test_a_failure_in_the_background_leaves_the_step_as_it_was(slow: type[Slow], models: Models) -> None:
    model = models.fresh()
    replayed(model, 2)
    slow.futures[0].set_exception(RuntimeError("no kernel today"))
    replayed(model, 5)
    assert (calls.steps(model).fused, calls.steps(model).not_fused) == (0, ("RuntimeError: no kernel today",))
    assert len(slow.waited) == 1  # not again


def test_what_is_undone_meanwhile_begins_anew(slow: type[Slow], models: Models) -> None:
    model, other = models.fresh(), models.fresh(None, "language")
    replayed(model, 2)
    replayed(other, 2)
    decoder.of(calls.base(model)).clear()
    slow.futures[0].set_result(None)
    replayed(other, 1)
    assert (calls.steps(model).fused, calls.steps(other).fused) == (0, 1)
    calls.compared(model, calls.ask(model, new=7))  # an eager step, and five replays of another graph
    assert (calls.steps(model).fused, calls.steps(model).captured) == (1, 2)


def test_without_a_compiler_nothing_is_fused(tapes: Any, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_steps.Progress, "after", 2)
    model = models.fresh()
    calls.compared(model, calls.ask(model, new=8))
    found = calls.steps(model)
    assert (found.fused, found.not_fused) == (0, ())
    assert found.replayed == 6
