"""float16, eager attention and positions that see no key."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny
from gemma4_compat._lab.scenarios import relative
from gemma4_compat.patches.multimodal.transformers_fp16_padding import BOUND, PATCH, build_low_logits, padded
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "the logits of a padded prompt are NaN"
    exact = False


def _logits(model: Any, batch: dict[str, Any]) -> Any:
    import torch

    with torch.no_grad():
        return model(**batch).logits[batch["attention_mask"].bool()].float().cpu()


def _without(model: Any, batch: dict[str, Any]) -> Any:
    gemma4_compat.revert(PATCH.id)
    try:
        return _logits(model, batch)
    finally:
        gemma4_compat.install()


def _build_12b(folder: Any) -> None:
    build_low_logits(folder, variant=variants.UNIFIED)


def test_the_12b(workspace: Any) -> None:
    import torch

    if workspace.unified() is None:
        pytest.skip("this transformers has no 12B")
    checkpoint, batch = workspace.cached(_build_12b), padded(workspace.main)
    half, single = (
        tiny.load(checkpoint, device=workspace.main, dtype=dtype, attn_implementation="eager")
        for dtype in (torch.float16, torch.float32)
    )
    assert not _without(half, batch).isfinite().all()
    assert relative(_logits(half, batch), _logits(single, batch)) < BOUND


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_where_nothing_overflows_all_bits_stay(workspace: Any, dtype: str) -> None:
    import torch

    model = tiny.load(
        workspace.checkpoint, device=workspace.main, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    for batch in (padded(workspace.main), padded(workspace.main, 0)):
        assert torch.equal(_logits(model, batch), _without(model, batch))


def test_generated_tokens_are_those_of_the_prompt_alone(workspace: Any) -> None:
    import torch

    batch = padded(workspace.main)
    model = tiny.load(
        workspace.cached(build_low_logits), device=workspace.main, dtype=torch.float16, attn_implementation="eager"
    )
    alone = {name: value[1:, 9:] for name, value in batch.items()}
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    found, expected = (model.generate(**given, **options)[-1, -6:].tolist() for given in (batch, alone))
    assert found == expected


def test_gradients_are_finite(workspace: Any) -> None:
    import torch

    batch = padded(workspace.main)
    gradients = []
    for dtype in (torch.float16, torch.float32):
        model = tiny.load(
            workspace.cached(build_low_logits), device=workspace.main, dtype=dtype, attn_implementation="eager"
        )
        labels = batch["input_ids"].masked_fill(~batch["attention_mask"].bool(), -100)
        model(**batch, labels=labels).loss.backward()
        gradients.append(model.model.language_model.norm.weight.grad.float())
    assert gradients[0].isfinite().all()
    assert relative(*gradients) < 0.1


def test_compiled_it_has_one_graph(workspace: Any) -> None:
    import torch

    batch = padded(workspace.main)
    model = tiny.load(
        workspace.cached(build_low_logits), device=workspace.main, dtype=torch.float16, attn_implementation="eager"
    )
    expected = _logits(model, batch)
    layer = model.model.language_model.layers[0].self_attn
    layer.forward = torch.compile(layer.forward, backend="eager")
    assert torch.equal(_logits(model, batch), expected)
