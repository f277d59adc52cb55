"""train_fast: graphs with fused kernels have the bits of those without, or stay as they are; statistics tell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("transformers.modeling_layers")
import torch

import gemma4_compat
from gemma4_compat._kernels import kernels, noted
from gemma4_compat._kernels.match import on_demand
from gemma4_compat._lab.stand_ins import tape
from gemma4_compat._training.captured import fusing, layers
from tests.patches.training.parts import only
from tests.patches.training.test_transformers_chunked_loss import batch
from tests.unit.kernels.host_kernels import HostCompiler
from tests.unit.training.test_streamed_steps import streamed
from tests.unit.training.test_train_fast import SETTLED, adapted, gradients, same, step, tapes

__all__ = ["tapes"]
pytestmark = pytest.mark.skipif(
    HostCompiler.unsupported_reason() is not None, reason=str(HostCompiler.unsupported_reason())
)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of layers on the CPU are emulated."""
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    kernels._kernels.pop(torch.device("cpu"), None)
    yield
    kernels._kernels.pop(torch.device("cpu"), None)


@pytest.fixture
def given(workspace: Any) -> dict[str, Any]:
    return batch(workspace, text_only=True)


def in_bf16(model: Any) -> Any:
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)
    return model


MODELS: dict[str, Any] = {
    "checkpointed": lambda workspace: adapted(workspace.load()),
    "not checkpointed": lambda workspace: adapted(workspace.load(), checkpointed=False),
    "an adapter in bf16": lambda workspace: in_bf16(adapted(workspace.load())),
    "4 bits": lambda workspace: adapted(workspace.load("4bit")),
    "streamed": lambda workspace: streamed(workspace, workspace.load()),
    "all weights": lambda workspace: workspace.load().train(),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "checkpointed" else pytest.mark.full) for name in MODELS]
)
def test_losses_and_gradients(fused: None, workspace: Any, given: dict[str, Any], name: str) -> None:
    """Of steps with one backward pass, and with two; the adapter changes in place."""
    model = MODELS[name](workspace)

    def steps() -> list[list[Any]]:
        found = [step(model, given)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(**given, use_cache=False).loss.backward()
        found.append(gradients(model))
        for weight in model.parameters():
            if weight.grad is not None:
                weight.data += weight.grad
        found.append(step(model, given))
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data.copy_(before[id(weight)])
        return found

    before = {id(weight): weight.detach().clone() for weight in model.parameters() if weight.requires_grad}
    right = steps()
    only(model, graphs=True)
    for _ in range(3):
        assert all(map(same, right, steps()))
    counted = gemma4_compat.statistics(model).training
    assert counted.reasons == counted.not_fused == ()
    assert counted.fused == 2 * counted.captured == 2 * len(layers.decoder_layers(model))


def settled_model(model: Any, given: dict[str, Any], steps: int = SETTLED) -> Any:
    """With graphs, after steps that have the bits of those without."""
    right = step(model, given)
    only(model, graphs=True)
    for _ in range(steps):
        assert same(right, step(model, given))
    return model


def settled(model: Any, given: dict[str, Any], steps: int = SETTLED) -> Any:
    """The statistics after such steps."""
    counted = gemma4_compat.statistics(settled_model(model, given, steps)).training
    assert counted.captured == len(layers.decoder_layers(model))
    return counted


def test_known_kernels_are_captured_at_once(
    fused: None, workspace: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass is captured once, and compared with a pass without a graph, also in other models of these shapes."""
    number = 2 * len(layers.decoder_layers(settled_model(adapted(workspace.load()), given)))
    captures: list[None] = []
    capture = tape.Tape.capture
    monkeypatch.setattr(tape.Tape, "capture", lambda self, run: captures.append(None) or capture(self, run))
    counted = settled(adapted(workspace.load()), given, steps=layers.CAPTURED_AT)
    assert (len(captures), counted.fused, counted.not_fused) == (number, number, ())
    launch = kernels.Kernels.launch

    def wrong(self: kernels.Kernels, kernel: Any) -> None:
        launch(self, kernel)
        kernel.tensors[-1].add_(1)

    monkeypatch.setattr(kernels.Kernels, "launch", wrong)
    assert settled(adapted(workspace.load()), given).not_fused == ("a fused layer differs bitwise",)
    assert not kernels.of(torch.device("cpu")).recall(noted.shapes_of(workspace.load()), fusing.KIND)


class Writing:
    """Stands for a recording: each replay writes the next of these numbers."""

    def __init__(self, target: Any, numbers: Sequence[float]) -> None:
        self.target, self.numbers = target, iter(numbers)

    def replay(self) -> None:
        self.target.fill_(next(self.numbers))


@pytest.mark.parametrize(
    ("plain", "candidate", "reason"),
    [
        ([1.0], 1.0, None),
        ([1.0, 1.0], 1.0001, "a fused layer differs bitwise"),
        ([1.0, 1.25], 0.75, None),  # attention adds gradients up in another order each time
        ([1.0, 1.25], 2.0, "a fused layer differs bitwise"),
        ([1.0, 1.25], math.nan, "a fused layer differs bitwise"),
    ],
)
def test_what_is_compared(plain: list[float], candidate: float, reason: str | None) -> None:
    target, told = torch.zeros(4), []
    found = fusing.Replays(Writing(target, [*plain, 7.0]), [target])
    found.offer(Writing(target, [candidate, 8.0]), told.append)
    found.replay()
    assert target[0] == (candidate if candidate in plain else plain[-1])
    found.replay()
    assert (told, target[0]) == ([reason], 8.0 if reason is None else 7.0)


def test_kernels_with_other_bits_are_not_kept(
    fused: None, workspace: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.Kernels, "accepts", lambda _self, _signature: True)  # not even a CPU's tanh
    counted = settled(adapted(workspace.load()), given)
    assert counted.not_fused == ("a fused layer differs bitwise",)


def test_a_capture_that_fails(
    fused: None, workspace: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no memory\nfor this")

    monkeypatch.setattr(on_demand.OnDemand, "_compute", broken)
    counted = settled(adapted(workspace.load()), given)
    assert (counted.fused, counted.not_fused) == (0, ("RuntimeError: no memory",))


def test_kernels_that_read_addresses(
    fused: None, workspace: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other packages put such norms in place of transformers'."""
    model = adapted(workspace.load())
    kind = type(layers.decoder_layers(model)[0].input_layernorm)
    before = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states: before(self, hidden_states))
    counted = settled(model, given)
    assert counted.fused == 0
    assert "is not of a library" in str(counted.not_fused)


def test_without_kernels_graphs_stay_as_they_are(workspace: Any, given: dict[str, Any]) -> None:
    counted = settled(adapted(workspace.load()), given)
    assert (counted.fused, counted.not_fused) == (0, ("there are no kernels for cpu",))


def test_nothing_waits_for_the_compiler(
    fused: None, workspace: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are replayed as they are while kernels are being compiled."""
    awaited: Future[None] = Future()
    monkeypatch.setattr(HostCompiler, "begin", lambda _self, _texts: [awaited])
    model = settled_model(adapted(workspace.load()), given)
    assert gemma4_compat.statistics(model).training.fused == 0
    awaited.set_result(None)
    step(model, given)
    assert gemma4_compat.statistics(model).training.fused > 0
