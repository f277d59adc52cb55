"""transformers-chunked-turns: prompts in chunks that continue a cache."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.generation.transformers_chunked_turns import PATCH
from tests.patches.promise import Promise
from tests.unit.prefix_cache.chats import ask, near, text


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a second turn that is read in chunks: its logits are off by [\d.]+"
    exact = False  # chunks round in another way


@pytest.mark.parametrize("variant", ["E2B", "31B", variants.UNIFIED])
@pytest.mark.parametrize("size", [1, 4, 9, 100])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("only_new", [False, True])
def test_three_turns_in_chunks(workspace: Any, variant: str, size: int, kind: str, only_new: bool) -> None:
    import torch
    from transformers import DynamicCache, StaticCache

    if variant == variants.UNIFIED:
        pytest.importorskip("transformers.models.gemma4_unified")
        folder = workspace.cached(tiny_models.build_checkpoint, variant=variant)
    else:
        folder = workspace.cached(tiny_models.build_checkpoint, text_variant=variant)
    model = tiny.load(folder, device=workspace.main).float()
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=64)
    options: dict[str, Any] = {"past_key_values": cache, "disable_compile": True, "prefill_chunk_size": size}
    ids = text(13, 0).to(model.device)
    for turn in range(3):
        expected, held = ask(model, ids), int(cache.get_seq_length())
        if only_new and held:
            found = ask(model, ids[:, held:], attention_mask=torch.ones_like(ids), **options)
            found.sequences = torch.cat([ids[:, :held], found.sequences], dim=-1)
        else:
            found = ask(model, ids, **options)
        near(found, expected)
        ids = torch.cat([found.sequences, text(9, turn + 1).to(model.device)], dim=-1)
