"""transformers-assisted-turns: texts with drafts that continue a cache."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.generation.transformers_assisted_cache import PATCH as ASSISTED_CACHE
from gemma4_compat.patches.generation.transformers_assisted_turns import PATCH
from tests.conftest import is_affected
from tests.helpers import pairwise
from tests.patches.promise import Promise
from tests.unit.prefix_cache.chats import near, text

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a second turn with prompt lookup: its logits are off by [\d.]+"
    exact = False  # several tokens at once round in another way


def loaded(workspace: Any, variant: str | None) -> Any:
    if variant is None:
        return workspace.load().float()
    if variant == variants.UNIFIED:
        pytest.importorskip("transformers.models.gemma4_unified")
        folder = workspace.cached(tiny_models.build_checkpoint, variant=variant)
    else:
        folder = workspace.cached(tiny_models.build_checkpoint, text_variant=variant)
    return tiny.load(folder, device=workspace.main).float()


def drafting(workspace: Any, way: str) -> dict[str, Any]:
    if way == "lookup":
        return {"prompt_lookup_num_tokens": 3}
    if way == "model":
        return {"assistant_model": workspace.load_text().float()}
    try:
        return {"assistant_model": workspace.load_assistant().float()}
    except ImportError as error:
        pytest.skip(str(error))


def repeating(length: int, seed: int, device: Any) -> Any:
    """Tokens that end as they begin, so that prompt lookup drafts at once, int64 [1, length]."""
    import torch

    ids = text(length - 3, seed).to(device)
    return torch.cat([ids, ids[:, :3]], dim=-1)


CASES = [
    *pairwise((None, "31B", variants.UNIFIED), ("lookup", "model"), *[(False, True)] * 3),
    *pairwise((None,), ("assistant",), *[(False, True)] * 3),
]


@pytest.mark.parametrize(("variant", "way", "forgets", "only_new", "padded"), CASES)
def test_three_turns(
    workspace: Any, variant: str | None, way: str, forgets: bool, only_new: bool, padded: bool
) -> None:
    import torch
    from transformers import DynamicCache

    model, options = loaded(workspace, variant), {**OPTIONS, **drafting(workspace, way)}
    forgets &= not is_affected(ASSISTED_CACHE)  # where it is, such a cache is refused
    cache = DynamicCache(config=model.config) if forgets else DynamicCache()
    ids = repeating(13, 0, model.device)
    mask = torch.ones_like(ids)
    mask[:, : 2 * padded] = 0
    for turn in range(3):
        expected, held = model.generate(ids, attention_mask=mask, **OPTIONS), int(cache.get_seq_length())
        left_out = held if only_new else 0
        found = model.generate(ids[:, left_out:], attention_mask=mask, past_key_values=cache, **options)
        found.sequences = torch.cat([ids[:, :left_out], found.sequences], dim=-1)
        near(found, expected)
        assert cache.get_seq_length() == expected.sequences.shape[1] - 1
        ids = torch.cat([expected.sequences, repeating(9, turn + 1, model.device)], dim=-1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)


@pytest.mark.parametrize("variant", [None, "31B", variants.UNIFIED])
def test_a_turn_after_one_with_an_image_and_a_sound(workspace: Any, variant: str | None) -> None:
    import torch
    from transformers import DynamicCache

    model, cache = loaded(workspace, variant), DynamicCache()
    media = tiny.inputs(model.device, variant=variant)
    first = model.generate(**media, **OPTIONS, past_key_values=cache)
    ids = torch.cat([first.sequences, repeating(9, 1, model.device)], dim=-1)
    longer = {
        name: torch.nn.functional.pad(media[name], (0, ids.shape[1] - media[name].shape[1]), value=value)
        for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0))
        if name in media
    }
    expected = model.generate(**{**media, **longer, "input_ids": ids}, **OPTIONS)
    near(model.generate(ids, **longer, **OPTIONS, past_key_values=cache, prompt_lookup_num_tokens=3), expected)


def test_embeddings_of_the_whole_text(workspace: Any) -> None:
    import torch
    from transformers import DynamicCache

    model, cache = workspace.load().float(), DynamicCache()
    first = model.generate(repeating(13, 0, model.device), **OPTIONS, past_key_values=cache)
    ids = torch.cat([first.sequences, repeating(9, 1, model.device)], dim=-1)
    embeds = model.get_input_embeddings()(ids)
    expected = model.generate(inputs_embeds=embeds, **OPTIONS)
    options = {**OPTIONS, **drafting(workspace, "assistant"), "past_key_values": cache}
    near(model.generate(inputs_embeds=embeds, **options), expected)


def test_what_cannot_be_continued_is_one_clear_error_that_leaves_the_cache(workspace: Any) -> None:
    from transformers import DynamicCache

    model, cache = workspace.load().float(), DynamicCache()
    first = model.generate(text(20, 0).to(model.device), **OPTIONS, past_key_values=cache)
    ids = first.sequences
    options: dict[str, Any] = {**OPTIONS, "past_key_values": cache, "prompt_lookup_num_tokens": 3}
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"holds 25 tokens, and the prompt .* has 25"):
        model.generate(ids[:, :-1], **options)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match="output_hidden_states with an assistant"):
        model.generate(ids, **options, output_hidden_states=True)
    assert cache.get_seq_length() == ids.shape[1] - 1
    near(model.generate(ids, **options), model.generate(ids, **OPTIONS))
