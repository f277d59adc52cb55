"""Continuous batching on a GPU: each text has the logits of its own ``generate``, from this package's kernels."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch

import gemma4_compat
from gemma4_compat._generation import continuous
from gemma4_compat._graphs import decoder
from tests.unit.generation.test_continuous import PROMPTS, decoded


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("quantization", [None, "4bit", "4bit-double"])
def test_each_row_has_the_bits_of_the_text_alone(workspace: Any, quantization: str | None, rows: int) -> None:
    model = workspace.load(quantization).eval()
    model.generation_config.eos_token_id = None
    gemma4_compat.decode_fast(model, reuse_prefix=True)
    assert continuous.unsupported_reason(model) is None
    prompts = [(length, tokens + 8, step) for step, (length, tokens, _) in enumerate(PROMPTS * 3)]
    with torch.no_grad():
        texts = decoded(model, rows, 64, prompts)
    same = [torch.equal(torch.stack(text.logits), text.expected.to(text.logits[-1].dtype)) for text in texts]
    assert same == [True] * len(texts)
    assert decoder.statistics(model).replayed > 60
