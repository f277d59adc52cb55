"""F45: several threads in one split model, each exact. ``python -m tests.unit.offload.threads`` runs 1,000
forwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.patches.offload.streamed_models import adapted, assert_as_accelerate_left_it
from tests.unit.offload import threads

CELLS = threads.cells()


@pytest.mark.parametrize(("store", "quantization", "adapter"), CELLS)
def test_forwards_of_three_threads(workspace: Any, store: str, quantization: str | None, adapter: str | None) -> None:
    given = threads.prompts(workspace)
    expected = threads.answers(threads.adapted(workspace, workspace.load(quantization), adapter), given)
    model = threads.split(workspace, store, quantization, adapter)
    found = threads.check(model, given, expected, forwards=12, threads=3)
    assert found["raised"] == []
    assert found["exact"] == 12
    assert_as_accelerate_left_it(model)


@pytest.mark.parametrize("store", threads.STORES)
def test_generate_towers_and_a_thread_that_fails(workspace: Any, one_device: Callable[..., Any], store: str) -> None:
    import torch

    batch = workspace.inputs()
    whole, model = workspace.load(), threads.split(workspace, store)
    expected = one_device(None, None).tokens
    images = {"pixel_values": batch["pixel_values"], "image_position_ids": batch["image_position_ids"]}
    with torch.no_grad():
        features = whole.get_image_features(**images)
    tokens, seen = [], []

    def generate() -> None:
        tokens.append(model.generate(**batch, max_new_tokens=6, do_sample=False))

    @torch.no_grad()
    def look() -> None:
        for _ in range(6):
            seen.append(model.get_image_features(**images))

    def fail() -> None:
        for _ in range(6):
            with pytest.raises(IndexError):
                model(input_ids=torch.full((1, 4), 10**6))

    assert threads.run_together([generate, generate, look, fail]) == [None] * 4
    assert all(torch.equal(answer.cpu(), expected) for answer in tokens)
    tensors = [[value for value in flat(answer) if value is not None] for answer in (features, *seen)]
    assert all(torch.equal(a, b) for answer in tensors[1:] for a, b in zip(tensors[0], answer, strict=True))
    assert_as_accelerate_left_it(model)


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_training_steps_beside_forwards(workspace: Any, quantization: str | None) -> None:
    """In eval mode, so that both threads run the same model; gradients and answers of one device."""
    import torch

    batch = workspace.inputs()
    whole = adapted(workspace, workspace.load(quantization), "language").eval()
    model = adapted(workspace, threads.split(workspace, "ram", quantization), "language").eval()
    given = threads.prompts(workspace)
    expected, right = threads.answers(whole, given), gradients(whole, batch)
    found: list[Any] = []

    def train() -> None:
        for _ in range(3):
            found.append(gradients(model, batch))

    def fail() -> None:
        for _ in range(3):
            with pytest.raises(ValueError, match="stop"):
                gradients(model, batch, fails=True)

    def answer() -> None:
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(threads.answers(model, given), expected, strict=True))

    assert threads.run_together([train, answer, fail]) == [None] * 3
    for one in found:
        assert all(torch.equal(a, b) for a, b in zip(one, right, strict=True))
    assert_as_accelerate_left_it(model)


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_a_gradient_of_a_gradient(workspace: Any, quantization: str | None, streamers: list[Any]) -> None:
    """F46: create_graph keeps the layers' memory as long as the graph lives, as one device does."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, results = workspace.inputs(text_only=True), []
    for base in (workspace.load(quantization), threads.split(workspace, "ram", quantization)):
        model = adapted(workspace, base, "language").eval()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        for _ in range(2):
            with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
                loss = model(**batch).logits.float().square().mean()
            first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
            penalty = torch.stack([value.square().sum() for value in first if value is not None]).sum()
            model(**batch)
            second = torch.autograd.grad(penalty, weights, allow_unused=True)
            results.append([value.detach() for value in (*first, *second) if value is not None])
            del loss, first, penalty, second
    for right, found in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))
        assert any(value.any() for value in found)
    left = [g for one in streamers for g in one._groups if g is not None and g.on_device and g is not one._prefetched]
    assert left == []
    assert_as_accelerate_left_it(model)


def gradients(model: Any, batch: dict[str, Any], *, fails: bool = False) -> list[Any]:
    import torch

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    me = threading.get_ident()

    def stop(_: Any) -> None:
        raise ValueError("stop")

    def stop_backward(_module: Any, _inputs: Any, output: Any) -> None:
        if threading.get_ident() == me:
            flat(output)[0].register_hook(stop)

    layer = model.base_model.model.model.language_model.layers[1]
    handle = layer.register_forward_hook(stop_backward) if fails else None
    try:
        output = model(**batch).logits
    finally:
        if handle is not None:
            handle.remove()
    return list(torch.autograd.grad(output.float().square().mean(), weights))


def flat(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in flat(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in flat(item)]
    return []
