"""transformers-qat-gradients: adapters on a QAT checkpoint learn; the forward stays as it is, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat.patches.training.transformers_qat_gradients import PATCH
from tests.patches.promise import Promise
from tests.patches.quantization import qat


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"[1-9]\d* of \d+ weights of an adapter have zero gradients"
    exact = False


@qat.needs_quantizer
@pytest.mark.parametrize("step", [0.05, 0.0])
def test_the_derivative_is_that_of_fake_quantization(step: float) -> None:
    """Torch has the same in float32, for another formula of the forward."""
    import torch
    from transformers.integrations.gemma_quant import apply_srq

    x = 20 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    scale = torch.tensor(step)
    expected = torch.fake_quantize_per_tensor_affine(other, step, 0, -128, 127) if step else other * 1
    found = apply_srq(one, scale)
    assert torch.allclose(found, expected)
    weights = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(one.grad, other.grad)
    with torch.no_grad():
        assert torch.equal(found, apply_srq(x, scale))


@qat.needs_quantizer
def test_gradients_of_the_scale_stay_upstreams() -> None:
    import torch
    from transformers.integrations.gemma_quant import apply_srq

    from gemma4_compat import install, revert

    def gradient() -> Any:
        scale = torch.tensor(0.05, requires_grad=True)
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        apply_srq(x, scale).sum().backward()
        return scale.grad

    found = gradient()
    revert(PATCH.id)
    try:
        from transformers.integrations.gemma_quant import apply_srq

        assert torch.equal(found, gradient())
    finally:
        install()


@qat.needs_quantizer
@pytest.mark.parametrize("place", ["nowhere", "layers"])
def test_an_adapter_learns(workspace: Any, place: str) -> None:
    import torch

    model = qat.load(workspace.qat())
    if place != "nowhere":
        model = workspace.dispatch_map(model, qat.layout(model, place))
    model = qat.adapted(model, init_lora_weights=True)
    batch = workspace.inputs(text_only=True)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.1, losses


@qat.needs_quantizer
def test_a_forward_with_gradients_has_the_same_bits(workspace: Any) -> None:
    import torch

    model = qat.adapted(qat.load(workspace.qat()))
    batch = workspace.inputs()
    with torch.no_grad():
        expected = model(**batch).logits
    assert torch.equal(model(**batch).logits.detach(), expected)


@qat.needs_quantizer
def test_the_trainer_takes_it(workspace: Any) -> None:
    assert qat.load(workspace.qat()).hf_quantizer.is_trainable
