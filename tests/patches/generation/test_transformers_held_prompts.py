"""transformers-held-prompts: prompts that are not longer than what a given cache holds."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat.patches.generation.transformers_held_prompts import PATCH
from tests.patches.promise import Promise
from tests.unit.prefix_cache.chats import text

OPTIONS = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a prompt that the cache holds: its logits are off by [\d.]+"
    exact = False  # the repair is an error


@pytest.mark.parametrize("shorter", [0, 1, 9])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_nothing_new_is_one_clear_error_that_leaves_the_cache(workspace: Any, shorter: int, kind: str) -> None:
    import torch
    from transformers import DynamicCache, StaticCache

    model = workspace.load().float()
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=64)
    options: dict[str, Any] = {**OPTIONS, "past_key_values": cache, "disable_compile": True}
    first = model.generate(text(20, 0).to(model.device), **options)
    ids = first.sequences[:, : 23 - shorter]
    with pytest.raises(
        gemma4_compat.Gemma4CompatError, match=rf"holds 23 tokens, and the prompt .* has {23 - shorter}"
    ):
        model.generate(ids, **options)
    more = torch.cat([first.sequences, text(3, 1).to(model.device)], dim=-1)
    expected = model.generate(more, **OPTIONS).sequences
    assert torch.equal(model.generate(more, **options).sequences, expected)


def test_a_mask_of_the_new_tokens_only(workspace: Any) -> None:
    """They were read at the positions of a text that begins with them."""
    import torch

    model = workspace.load().float()
    first = model.generate(text(20, 0).to(model.device), **OPTIONS)
    new = torch.cat([first.sequences[:, -1:], text(5, 1).to(model.device)], dim=-1)
    mask = torch.ones_like(torch.cat([first.sequences, new[:, 1:]], dim=-1))
    with pytest.raises(gemma4_compat.Gemma4CompatError, match="an attention_mask for the whole text"):
        model.generate(new, attention_mask=torch.ones_like(new), past_key_values=first.past_key_values, **OPTIONS)
    found = model.generate(new, attention_mask=mask, past_key_values=first.past_key_values, **OPTIONS)
    whole = torch.cat([first.sequences, new[:, 1:]], dim=-1)
    assert torch.equal(found.sequences[:, -4:], model.generate(whole, **OPTIONS).sequences[:, -4:])
