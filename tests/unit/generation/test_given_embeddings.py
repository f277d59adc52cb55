"""Replay after ``inputs_embeds``, and beams of several images and sounds: as without it."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny

OPTIONS = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}


def assert_same(model: Any, batch: dict[str, Any], **options: Any) -> None:
    import torch

    asked = {**batch, **OPTIONS, "output_logits": True, **options}
    expected = model.generate(**asked)
    gemma4_compat.decode_fast(model)
    found = model.generate(**asked)
    assert torch.equal(expected.sequences, found.sequences)
    largest = max(float(value.abs().max()) for value in expected.logits)
    assert all(torch.allclose(*pair, atol=1e-4 * largest) for pair in zip(expected.logits, found.logits))


@pytest.mark.usefixtures("tapes")
def test_embeddings(workspace: Any) -> None:
    model, batch = workspace.load().float(), workspace.inputs(text_only=True)
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach()
    assert_same(model, {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]})


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_several_media(workspace: Any, options: dict[str, Any]) -> None:
    assert_same(workspace.load().float(), tiny.several_media(workspace.inputs()), **options)
