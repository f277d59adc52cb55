"""Experts in 4 bits on a GPU see each token by itself: batches and drafts have the bits of single tokens."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch

import gemma4_compat
from gemma4_compat._generation import continuous, experts_alone
from gemma4_compat._graphs import decoder, fused_steps
from gemma4_compat._lab import tiny_models
from tests.unit.generation import calls
from tests.unit.generation.test_assisted import SAMPLED, ask, counted, drafting, same
from tests.unit.generation.test_assisted import any_pace as any_pace
from tests.unit.generation.test_continuous import PROMPTS, decoded
from tests.unit.offload.test_expert_lookup import loaded, placed


@pytest.fixture
def model(workspace: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> Any:
    """A tiny 26B-A4B in 4 bits, with its experts on the GPU or in host memory."""
    monkeypatch.setattr(fused_steps.Progress, "after", 8)
    found = loaded(workspace, workspace.cached(tiny_models.build_moe_checkpoint), "4bit-double")
    found = found if where == "device" else placed(workspace, found, "experts", where)
    found.generation_config.eos_token_id = None
    return found


@pytest.mark.parametrize("where", ["device", "memory"])
def test_each_row_has_the_bits_of_the_text_alone(model: Any) -> None:
    """Of 16 rows, whose experts are streamed from host memory as a whole; a text alone looks its own up there."""
    gemma4_compat.decode_fast(model, reuse_prefix=True)
    assert continuous.unsupported_reason(model) is None
    prompts = [(length, tokens + 8, step) for step, (length, tokens, _) in enumerate(PROMPTS * 3)]
    with torch.no_grad():
        texts = decoded(model, 16, 64, prompts)
    same_bits = [torch.equal(torch.stack(text.logits), text.expected.to(text.logits[-1].dtype)) for text in texts]
    assert same_bits == [True] * len(texts)
    found = decoder.statistics(model)
    assert (found.reasons, found.not_fused) == ((), ())
    assert found.replayed > 60


@pytest.mark.usefixtures("any_pace")
@pytest.mark.parametrize("where", ["device", "memory"])
def test_tokens_are_those_without_drafts(model: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    gemma4_compat.decode_fast(model, assistants=True)
    assert experts_alone.unsupported_reason(model) is None
    for seed, (length, options) in enumerate([(3, {}), (30, SAMPLED), (12, {})]):
        given = calls.text(model, length, seed=seed)
        expected = ask(model, given, new=100, **options)
        same(expected, ask(model, given, new=100, prompt_lookup_num_tokens=5, **options))
        with monkeypatch.context() as patched:
            drafting(patched, expected[0], 0.8)
            same(expected, ask(model, given, new=100, prompt_lookup_num_tokens=7, **options))
    found = counted(model)
    assert (found.reasons, found.not_fused) == ((), ())
    assert found.accepted > 100
    assert found.fused
    assert (found.experts_kept > 0) == (where == "memory")
