"""transformers-lookup-media: prompt lookup beside images and sounds."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._models import variants
from gemma4_compat._reproduction import tiny, tiny_models
from gemma4_compat.patches.generation.transformers_lookup_media import PATCH, candidates
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"ValueError: Image features and image tokens do not match, tokens: 7, features: 4"
    exact = False  # tokens are compared


@pytest.mark.parametrize("variant", [None, variants.UNIFIED])
@pytest.mark.parametrize("place", [3, 11])  # before the image and before the sound
@pytest.mark.parametrize("fast", [False, True])
def test_a_prompt_that_ends_as_what_stands_before_an_image(
    workspace: Any, variant: str | None, place: int, fast: bool
) -> None:
    import gemma4_compat

    model = workspace.load()
    if variant == variants.UNIFIED:
        pytest.importorskip("transformers.models.gemma4_unified")
        model = tiny.load(workspace.cached(tiny_models.build_checkpoint, variant=variant), device=workspace.main)
    model = model.float()
    if fast:
        gemma4_compat.decode_fast(model, assistants=True)
    batch = tiny.inputs(model.device, variant=variant)
    batch["input_ids"][0, -1] = batch["input_ids"][0, place]
    options = {"max_new_tokens": 12, "do_sample": False}
    assert model.generate(**batch, **options, prompt_lookup_num_tokens=3).equal(model.generate(**batch, **options))


def test_drafts_end_before_a_place_and_others_are_kept() -> None:
    import torch

    text = torch.tensor([[5, 9, 5]])  # with a place in the prompt itself
    for drafts, kept in (([1, 2], 2), ([1, 9, 2], 1), ([9], 0), ([], 0)):
        found = torch.tensor([[*text[0].tolist(), *drafts]])
        given, logits = candidates(lambda _ids, found=found: (found, None), {9}, text)
        assert given.tolist() == [[5, 9, 5, *drafts[:kept]]]
        assert logits is None
