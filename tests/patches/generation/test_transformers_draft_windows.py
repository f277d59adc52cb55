"""Draft models past their sliding window, whose drafts are right, or wrong."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._engine import versions
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.generation.transformers_draft_windows import PATCH, draft_always
from tests.helpers import without
from tests.patches.promise import Promise

#: Whether the release removes one token after a draft, however many were rejected.
ONE_TOKEN = versions.admits(PATCH.targets[-1].affected, versions.installed("transformers"))


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: The size of tensor a \(\d+\) must match the size of tensor b \(8\)"
    exact = False  # tokens are compared


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("seed", [0, 1], ids=["accepted", "rejected"])
@pytest.mark.parametrize("length", [3, 8, 30])
@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_tokens_are_those_without_drafts(workspace: Any, variant: str, length: int, seed: int, attention: str) -> None:
    """Texts that end before, at and after the window of 8 tokens."""
    import torch

    def load(seed: int) -> Any:
        checkpoint = workspace.cached(tiny_models.build_checkpoint, text_variant=variant, seed=seed)
        return tiny.load(checkpoint, device=workspace.main, attn_implementation=attention).float()

    model, drafts = load(0), draft_always(load(seed))
    ids = torch.arange(length, device=model.device)[None] % 80 + 3
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(expected, model.generate(ids, **options, assistant_model=drafts))


@pytest.mark.skipif(not ONE_TOKEN, reason="this release removes all rejected tokens")
def test_without_the_patch_rejected_tokens_stay_in_the_cache(workspace: Any) -> None:
    """In a window as long as that of a released model, which the text does not fill."""
    import torch

    checkpoints = [workspace.cached(tiny_models.build_checkpoint, seed=seed) for seed in (0, 1)]
    model, drafts = (tiny.load(checkpoint, device=workspace.main).float() for checkpoint in checkpoints)
    for one in (model, draft_always(drafts)):
        one.config.get_text_config().sliding_window = 512
    ids = torch.arange(12, device=model.device)[None] + 3
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
    expected = model.generate(ids, **options)
    for _ in range(2):
        assert torch.equal(expected, model.generate(ids, **options, assistant_model=drafts))
        with without(PATCH.id), pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
            model.generate(ids, **options, assistant_model=drafts)


def test_layers_keep_what_they_record(workspace: Any) -> None:
    """Rejected tokens can be removed after several updates, and layers that do not record are as they are."""
    import torch
    from transformers.cache_utils import DynamicSlidingWindowLayer

    if not hasattr(DynamicSlidingWindowLayer, "activate_past_recording"):
        pytest.skip("this release records nothing")
    recording, plain = DynamicSlidingWindowLayer(8), DynamicSlidingWindowLayer(8)
    recording.activate_past_recording()
    states = torch.arange(30.0)[None, None, :, None]
    for begin, end in ((0, 20), (20, 21), (21, 22), (22, 25)):
        given = states[:, :, begin:end]
        keys, values = recording.update(given, -given)
        others, _ = plain.update(given, -given)
        assert torch.equal(keys, others[:, :, -(7 + end - begin) :])
        assert torch.equal(values, -keys)
    recording.crop(-3)
    keys, _ = recording.update(states[:, :, 22:23], states[:, :, 22:23])
    assert keys.flatten().tolist() == list(range(15, 23))
