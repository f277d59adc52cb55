"""An image with a static cache, and what that patch leaves as it is."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.generation.transformers_static_images import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"off by \d"
    exact = False  # the logits differ by rounding


@pytest.mark.parametrize("variant", ["E2B", "31B", "26B-A4B"])
def test_every_token_after_an_image_and_a_sound(workspace: Any, variant: str) -> None:
    import torch

    model = tiny.load(
        workspace.cached(tiny_models.build_checkpoint, text_variant=variant), device=workspace.main
    ).float()
    batch = tiny.inputs(model.device)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected, found = (
        model.generate(**batch, **options, **cache) for cache in ({}, {"cache_implementation": "static"})
    )
    assert torch.equal(expected.sequences, found.sequences)
    for one, other in zip(expected.logits, found.logits):
        assert torch.allclose(one, other, atol=1e-4)
