"""Threads that decode at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._graphs import fused_steps
from gemma4_compat._kernels import kernels
from gemma4_compat._lab import tiny
from tests.unit.generation.calls import Models, base, generate, static_cache, steps, text
from tests.unit.kernels.host_kernels import HostCompiler
from tests.unit.offload import threads

pytestmark = pytest.mark.usefixtures("tapes")
EAGER = {"disable_compile": True}
ROUNDS = 3


def answer(model: Any, index: int, way: dict[str, Any]) -> Any:
    """With a cache of its own: before transformers 5.15 the one that ``generate`` makes is the model's."""
    return generate(model, text(model, 12, seed=index), way, past_key_values=static_cache(model, 32)).sequences


def wrong(models: list[Any]) -> list[int]:
    """Which of several threads, each with a model, got another answer than alone."""
    import torch

    expected = [answer(model, index, EAGER) for index, model in enumerate(models)]
    found: list[int] = []

    def work(index: int) -> None:
        for _ in range(ROUNDS):
            if not torch.equal(answer(models[index], index, {}), expected[index]):
                found.append(index)

    raised = threads.run_together([lambda index=index: work(index) for index in range(len(models))], limit=100)
    assert raised == [None] * len(models)
    return found


@pytest.mark.parametrize("where", ["device", "streamed"])
def test_one_model(models: Models, where: str) -> None:
    model = models.fresh(None, where=where)
    assert wrong([model, model]) == []
    assert steps(model).replayed > 0
    assert steps(model).reasons == ()


def test_two_models(models: Models) -> None:
    both = [models.fresh(None), models.fresh("4bit-double", "language")]
    assert wrong(both) == []
    for model in both:
        assert steps(model).replayed > 0
        assert steps(model).reasons == ()


class InBackground(HostCompiler):
    """Compiles in a thread, and again where the kernels are wanted."""

    def begin(self, texts: Any) -> list[Any]:
        pool = ThreadPoolExecutor(1)
        future = pool.submit(self.compiled, texts)
        pool.shutdown(wait=False)
        return [future]


def test_two_models_whose_kernels_are_compiled_meanwhile(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = HostCompiler.unsupported_reason()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setitem(kernels.COMPILERS, "cpu", InBackground)
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(fused_steps.Progress, "early", 2)
    monkeypatch.setattr(fused_steps.Progress, "after", 7)
    both = [models.fresh(None), models.fresh("4bit-double", "language")]
    assert wrong(both) == []
    for model in both:
        assert (steps(model).fused, steps(model).not_fused, steps(model).reasons) == (1, (), ())


@pytest.mark.parametrize("where", ["device", "streamed"])
def test_forwards_beside_a_generate(models: Models, where: str) -> None:
    import torch

    model = models.fresh(None, where=where)
    expected, prompt = answer(model, 0, EAGER), text(model, 9)
    wrong = []
    with torch.no_grad():
        logits = model(**prompt).logits

    def forwards() -> None:
        with torch.no_grad():
            wrong.extend(index for index in range(12) if not torch.equal(model(**prompt).logits, logits))

    def generates() -> None:
        wrong.extend(index for index in range(ROUNDS) if not torch.equal(answer(model, 0, {}), expected))

    assert threads.run_together([forwards, generates], limit=100) == [None, None]
    assert wrong == []
    assert steps(base(model)).replayed > 0
    assert steps(model).reasons == ()


@pytest.mark.parametrize("offloaded", [False, True])
def test_forwards_and_generates_of_a_dispatched_model(models: Models, offloaded: bool) -> None:
    """Hooks that a thread bypasses in its forward are in place where another looks at the model."""
    import torch
    from accelerate import dispatch_model

    main, model = torch.device("cpu"), models.workspace.load()
    placement = tiny.device_map(model, "layers" if offloaded else "none", main=main, offloaded="cpu")
    skip = tiny.skip_keys(model)
    model = dispatch_model(model, placement, main_device=main, skip_keys=skip, force_hooks=True)
    gemma4_compat.decode_fast(model, exact=True)
    model.generation_config.cache_implementation = None

    def forwards_of_accelerate() -> list[Any]:
        return [vars(module)["forward"] for module in model.modules() if "_hf_hook" in vars(module)]

    def answers(way: dict[str, Any]) -> list[Any]:
        return [
            generate(model, batch, way, past_key_values=static_cache(model, 32)).sequences
            for batch in (text(model, 12), models.workspace.inputs())
        ]

    before, prompt = forwards_of_accelerate(), models.workspace.inputs()
    with torch.no_grad():
        logits = model(**prompt).logits
    expected = answers(EAGER)
    for _ in range(ROUNDS):  # everything is captured
        assert all(map(torch.equal, answers({}), expected))
    alone = steps(model)
    wrong: list[str] = []

    def forwards() -> None:
        with torch.no_grad():
            wrong.extend("forward" for _ in range(8) if not torch.equal(model(**prompt).logits, logits))

    def generates(way: dict[str, Any]) -> None:
        wrong.extend(f"{way}" for _ in range(ROUNDS) if not all(map(torch.equal, answers(way), expected)))

    works = [forwards, lambda: generates({}), lambda: generates(EAGER)]
    assert threads.run_together(works, limit=100) == [None] * len(works)
    assert wrong == []
    assert forwards_of_accelerate() == before
    together = steps(model)
    assert together.captured == alone.captured
    assert together.recaptures == alone.recaptures
    assert together.reasons == ()
