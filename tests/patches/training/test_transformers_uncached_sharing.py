"""Without a cache, and under checkpointing, 5.5.0 and 5.5.1 share keys and values as every later release does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat.patches.training.transformers_uncached_sharing import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"without a cache the logits differ by \d"


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_a_split_model_without_a_cache(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None
) -> None:
    import torch

    model = workspace.split(quantization)
    with torch.no_grad():
        logits = model(**tiny.inputs(workspace.main), use_cache=False).logits.float().cpu()
    assert torch.equal(logits, one_device(quantization, None).logits[0])


def test_generating_without_a_cache(workspace: Any) -> None:
    import torch

    model, batch = workspace.load(), tiny.inputs(workspace.main, text_only=True)
    tokens = [model.generate(**batch, max_new_tokens=4, do_sample=False, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*tokens)
