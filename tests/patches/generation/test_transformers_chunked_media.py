"""A prefill in chunks of prompts with and without media."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny
from gemma4_compat.patches.generation.transformers_chunked_media import PATCH
from tests.conftest import is_affected
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"logits are off by \d"


@pytest.mark.skipif(not is_affected(PATCH), reason="transformers refuses it itself")
@pytest.mark.parametrize(
    ("left_out", "named"), [(None, "images and sounds"), ("input_features", "images"), ("image", "sounds")]
)
def test_the_error_names_what_would_be_left_out(workspace: Any, left_out: str | None, named: str) -> None:
    model, batch = workspace.load(), tiny.inputs(workspace.main)
    batch = batch if left_out is None else tiny.without(batch, left_out)
    message = rf"24 tokens with {named} cannot .*prefill_chunk_size=5: .*prefill_chunk_size=None"
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=message):
        model.generate(**batch, max_new_tokens=2, prefill_chunk_size=5)


def test_text_is_read_in_chunks(workspace: Any) -> None:
    import torch

    model, batch = workspace.load().float(), tiny.inputs(workspace.main, text_only=True)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(**batch, **options), model.generate(**batch, **options, prefill_chunk_size=5))
