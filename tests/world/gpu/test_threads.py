"""Several threads in one split model on a GPU, gradients of gradients, and what deleted models leave behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._engine.runtime import locks
from tests.patches.offload.streamed_models import adapted, assert_as_accelerate_left_it
from tests.unit.offload import leftovers, threads

FORWARDS = 400  # each alone on the card takes a minute


@pytest.mark.parametrize("adapter", threads.ADAPTERS)
@pytest.mark.parametrize("quantization", threads.QUANTIZATIONS)
def test_forwards_of_four_threads(
    workspace: Any, record: Callable[[str, Any], None], quantization: str | None, adapter: str | None
) -> None:
    given = threads.prompts(workspace)
    expected = threads.answers(threads.adapted(workspace, workspace.load(quantization), adapter), given)
    for store in threads.STORES:
        model = threads.split(workspace, store, quantization, adapter)
        found = threads.check(model, given, expected, forwards=FORWARDS, threads=4)
        record(f"threads {store} {quantization or 'bf16'} {adapter}", found)
        assert found["raised"] == []
        assert found["exact"] == FORWARDS
        assert_as_accelerate_left_it(model)


@pytest.mark.parametrize("own_streams", [False, True], ids=["one stream", "streams of their own"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("quantization", threads.QUANTIZATIONS)
def test_two_backward_passes_and_forwards_at_once(
    workspace: Any, quantization: str | None, checkpointing: bool, own_streams: bool
) -> None:
    """The engine runs both backward passes in one thread, in turn."""
    import torch

    batch, given = workspace.inputs(text_only=True), threads.prompts(workspace)
    models = [
        adapted(workspace, base, "language").eval()
        for base in (workspace.load(quantization), threads.split(workspace, "ram", quantization))
    ]
    if checkpointing:
        for model in models:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for module in model.modules():  # checkpointed without dropout and the like
                module.training = hasattr(module, "gradient_checkpointing")
    whole, split = models
    expected = None if checkpointing else threads.answers(whole, given)
    right = gradients(whole, batch)
    found: list[Any] = []

    def train() -> None:
        with torch.cuda.stream(torch.cuda.Stream() if own_streams else torch.cuda.current_stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(4):
                found.append(gradients(split, batch))
            torch.cuda.current_stream().synchronize()

    def answer() -> None:
        for _ in range(4):
            answers = threads.answers(split, given)
            assert expected is None or all(torch.equal(a, b) for a, b in zip(answers, expected, strict=True))

    torch.cuda.synchronize()
    assert threads.run_together([train, train, answer], limit=60) == [None] * 3
    for one in found:
        assert all(torch.equal(a, b) for a, b in zip(one, right, strict=True))
    assert_as_accelerate_left_it(split)


def test_a_failed_backward_pass_gives_the_lock_back(workspace: Any) -> None:
    import torch

    model = adapted(workspace, threads.split(workspace, "ram"), "language").eval()
    hidden: list[Any] = []
    layer = model.base_model.model.model.language_model.layers[1]

    def stop(_: Any) -> None:
        raise ValueError("stop")

    def fail() -> None:
        for _ in range(4):
            handle = layer.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
            output = model(**workspace.inputs(text_only=True)).logits
            handle.remove()
            hidden.pop().register_hook(stop)
            with pytest.raises(ValueError, match="stop"):
                output.float().square().mean().backward()

    assert threads.run_together([fail], limit=60) == [None]
    assert [lock for lock in locks._locks if lock.holders()] == []
    with torch.no_grad():
        model(**workspace.inputs(text_only=True))


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_a_gradient_of_a_gradient(workspace: Any, quantization: str | None) -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    results = []
    for base in (workspace.load(quantization), threads.split(workspace, "ram", quantization)):
        model = adapted(workspace, base, "language").eval()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            loss = model(**workspace.inputs(text_only=True)).logits.float().square().mean()
        first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        penalty = torch.stack([value.square().sum() for value in first if value is not None]).sum()
        second = torch.autograd.grad(penalty, weights, allow_unused=True)
        results.append([value.detach() for value in (*first, *second) if value is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("store", threads.STORES)
def test_nothing_is_left_of_deleted_models(workspace: Any, record: Callable[[str, Any], None], store: str) -> None:
    found = leftovers.check(workspace, store, "4bit-double", loads=3)
    record(f"leftovers {store}", found)
    assert found["left"] == {}


def gradients(model: Any, batch: dict[str, Any]) -> list[Any]:
    import torch

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return list(torch.autograd.grad(model(**batch).logits.float().square().mean(), weights))
