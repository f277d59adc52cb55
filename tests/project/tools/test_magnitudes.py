"""Random weights with larger activations, and the first operation that leaves float16."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.training import magnitudes
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.scenarios import relative

#: eps of the norms; in another function the logits differ by more than a half.
SAME = 1e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A variant of each kind, in float32."""
    folder = tmp_path_factory.mktemp("magnitudes")
    known = [name for name in ("E2B", "12B", "26B-A4B") if name != variants.UNIFIED or variants.unified_classes()]
    return {name: tiny.load(tiny_models.build_checkpoint(folder / name, variant=name)).float() for name in known}


def _logits(model: Any, variant: str) -> Any:
    import torch

    with torch.no_grad():
        return model(**tiny.inputs(variant=variant)).logits


def test_a_rescaled_model_is_the_same_function(models: dict[str, Any]) -> None:
    import copy

    seen = set()
    for variant, model in models.items():
        expected = _logits(model, variant)
        for name in magnitudes.SAME_FUNCTION:
            if magnitudes.applies(name, model):
                scaled = magnitudes.rescale(copy.deepcopy(model), name, 8.0)
                assert relative(_logits(scaled, variant), expected) < SAME, (variant, name)
                seen.add(name)
    assert seen == set(magnitudes.SAME_FUNCTION) or variants.UNIFIED not in models


def test_the_other_rescalings_make_another_function(models: dict[str, Any]) -> None:
    import copy

    expected = _logits(models["E2B"], "E2B")
    for name in magnitudes.OTHER_FUNCTION:
        scaled = magnitudes.rescale(copy.deepcopy(models["E2B"]), name, 8.0)
        assert relative(_logits(scaled, "E2B"), expected) > 100 * SAME, name


def test_what_leaves_float16_first_is_the_product_and_a_hook_names_down_proj(models: dict[str, Any]) -> None:
    """F63: no module returns more than the published 2,080, and the product is beyond the limit."""
    import copy

    import torch

    model = magnitudes.rescale(copy.deepcopy(models["E2B"]), "MLP: gate and up", 2.0**7)
    batch = tiny.inputs(text_only=True)
    with torch.no_grad(), magnitudes.watch(model) as single:
        expected = model(**batch).logits
    with torch.no_grad(), magnitudes.watch(model.half()) as half:
        found = model(**batch).logits
    assert expected.isfinite().all()
    assert not found.isfinite().all()
    assert half.first is not None
    layer = half.first.removesuffix(".mlp: mul")
    assert layer.startswith("model.language_model.layers.")
    assert half.first_module == f"{layer}.mlp.down_proj"
    assert single.largest[half.first] > 65504
    assert single.largest_output < 2080
    assert (single.first, single.first_module) == (None, None)


def test_a_gradient_that_overflows_names_its_module(models: dict[str, Any]) -> None:
    import copy

    import torch

    model = copy.deepcopy(models["E2B"]).half()
    batch = tiny.inputs(text_only=True)
    with magnitudes.watch(model) as seen:
        loss = model(**batch, labels=batch["input_ids"]).loss
        assert seen.first is None
        (loss.float() * 2.0**30).backward()
    assert seen.first is not None
    assert seen.first.startswith("backward")
    assert torch.isfinite(loss)


def test_watching_leaves_no_hooks(models: dict[str, Any]) -> None:
    model = models["E2B"]
    with magnitudes.watch(model):
        _logits(model, "E2B")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("in_float32", [True, False])
def test_a_scaler_refuses_only_an_adapter_in_float16(models: dict[str, Any], in_float32: bool) -> None:
    """docs/FLOAT16.md: PEFT's default is what a ``GradScaler`` needs."""
    import contextlib
    import copy

    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        copy.deepcopy(models["E2B"]).half(),
        LoraConfig(r=2, target_modules=r".*language_model.*\.q_proj"),
        autocast_adapter_dtype=in_float32,
    )
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in weights} == {torch.float32 if in_float32 else torch.float16}
    batch = tiny.inputs(text_only=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with torch.autocast("cpu", torch.float16):
        scaler.scale(model(**batch, labels=batch["input_ids"]).loss).backward()
    refused = pytest.raises(ValueError, match="Attempting to unscale FP16 gradients")
    with contextlib.nullcontext() if in_float32 else refused:
        scaler.step(torch.optim.SGD(weights, lr=1e-3))


def test_the_softcap_of_the_logits_limits_the_loss_scale(models: dict[str, Any]) -> None:
    """docs/FLOAT16.md: its backward pass multiplies by 30 in float16; 24 tokens do not bear a scaler's first."""
    import copy

    model = copy.deepcopy(models["E2B"]).half()
    batch = tiny.inputs(text_only=True)
    found = []
    for power in (15, 16):
        model.zero_grad()
        (model(**batch, labels=batch["input_ids"]).loss * 2.0**power).backward()
        found.append(bool(model.model.language_model.norm.weight.grad.isfinite().all()))
    assert found == [True, False]
