"""A prefill in chunks of prompts with images, where image tokens see each other."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gemma4_compat import _tiny
from gemma4_compat.patches.transformers_chunked_images import PATCH, chunks
from tests.conftest import is_affected
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"ends inside an image the logits are off by \d"
    exact = False  # other kernels for other lengths


@pytest.mark.parametrize("size", [1, 3, 4, 7, 50])
def test_chunks_are_as_large_as_they_may_be_and_hold_whole_images(size: int) -> None:
    for seed in range(200):
        draw = random.Random(seed)
        length = draw.randint(1, 40)
        inside = [draw.random() < 0.4 for _ in range(length - 1)]
        found = chunks(inside, size)
        assert sum(found) == length
        end = 0
        for chunk in found:
            start, end = end, end + chunk
            assert end == length or not inside[end - 1]
            allowed = [cut for cut in range(start + 1, length + 1) if cut == length or not inside[cut - 1]]
            assert end == max([cut for cut in allowed if cut <= start + size], default=allowed[0])


@pytest.fixture(scope="module", params=["12B", "26B-A4B", "31B"])
def model(request: pytest.FixtureRequest, workspace: Any) -> Any:
    if request.param == "12B":
        return _tiny.unified_model().to(workspace.main)
    folder = workspace.made(_tiny.build_checkpoint, text_variant=request.param)
    return _tiny.load(folder, device=workspace.main).float()


@pytest.mark.skipif(not is_affected(PATCH), reason="transformers refuses images in chunks, or the shim does")
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", [1, 2], ids=["image", "video"])
@pytest.mark.parametrize("size", [1, 2, 5, 6, 7, 11, 23, 30])
def test_every_size_gives_the_answers_of_one_chunk(model: Any, size: int, kind: int, cache: str | None) -> None:
    import torch

    ids = _tiny.inputs(model.device, text_only=True)["input_ids"].repeat(2, 1)
    ids[1] = ids[1].flip(0)
    kinds = torch.zeros_like(ids)
    kinds[0, 4:8] = kinds[1, 9:13] = kinds[1, 14:17] = kind  # only the mask is asked about here
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options |= {"disable_compile": True} | ({"cache_implementation": cache} if cache else {})
    whole = model.generate(**batch, **options)
    found = model.generate(**batch, **options, prefill_chunk_size=size)
    assert torch.equal(whole.sequences, found.sequences)
    off = max(float((a - b).abs().max()) for a, b in zip(whole.logits, found.logits, strict=True))
    assert off <= 1e-4 * float(whole.logits[0].abs().max())
