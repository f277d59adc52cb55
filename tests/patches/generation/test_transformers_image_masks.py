"""transformers-image-masks: the tokens of an image attend to each other in sliding layers, inside the window."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.generation.transformers_image_masks import PATCH
from tests.patches.promise import Promise

LENGTH, WINDOW = 32, 8
#: Where the images are.
IMAGES = {
    "first": [(1, 7)],
    "later": [(16, 22)],
    "several": [(2, 6), (7, 10), (20, 26)],
    "longer than the window": [(4, 24)],
    "to the end": [(26, 32)],
}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"logits of a text with an image are off by \d"
    exact = False  # the logits differ by rounding


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(workspace: Any, request: pytest.FixtureRequest) -> Any:
    checkpoint = workspace.cached(tiny_models.build_checkpoint, text_variant="31B")
    return tiny.load(checkpoint, device=workspace.main, attn_implementation=request.param).float()


def text(model: Any, rows: int = 1) -> Any:
    import torch

    return torch.randint(3, 240, (rows, LENGTH), generator=torch.Generator().manual_seed(5)).to(model.device)


def kinds(ids: Any, *spans: tuple[int, int], kind: int = 1) -> Any:
    import torch

    found = torch.zeros_like(ids)
    for start, stop in spans:
        found[:, start:stop] = kind
    return found


def by_hand(model: Any, ids: Any, spans: list[tuple[int, int]], **kwargs: Any) -> Any:
    """The logits with masks that are made here; the model takes them as they are."""
    import torch

    query, key = torch.meshgrid(*[torch.arange(ids.shape[1], device=ids.device)] * 2, indexing="ij")
    seen = {"full_attention": key <= query, "sliding_attention": key <= query}
    for start, stop in spans:
        image = (query >= start) & (query < stop) & (key >= start) & (key < stop)
        seen["sliding_attention"] = seen["sliding_attention"] | image
    seen["sliding_attention"] = seen["sliding_attention"] & (
        key > query - model.config.get_text_config().sliding_window
    )
    masks = {name: mask[None, None] for name, mask in seen.items()}
    if model.config._attn_implementation == "eager":
        lowest = torch.finfo(model.dtype).min
        masks = {name: torch.where(mask, 0.0, lowest).to(model.dtype) for name, mask in masks.items()}
    return model(ids, attention_mask=masks, **kwargs).logits


@pytest.mark.parametrize("kind", [1, 2], ids=["image", "video"])
@pytest.mark.parametrize("where", IMAGES)
def test_read_at_once(model: Any, where: str, kind: int) -> None:
    import torch

    ids = text(model)
    with torch.no_grad():
        expected = by_hand(model, ids, IMAGES[where])
        plain = by_hand(model, ids, [])
        for use_cache in (False, True):
            found = model(ids, mm_token_type_ids=kinds(ids, *IMAGES[where], kind=kind), use_cache=use_cache).logits
            assert torch.allclose(expected, found, atol=1e-4)
    assert (expected - plain).abs().max() > 0.1


@pytest.mark.parametrize("cache", ["DynamicCache", "configured", "StaticCache"])
@pytest.mark.parametrize("where", ["later", "to the end"])
def test_an_image_in_a_later_part(model: Any, where: str, cache: str) -> None:
    import torch
    from transformers import DynamicCache, StaticCache

    ids = text(model)
    made = {
        "DynamicCache": lambda: DynamicCache(),
        "configured": lambda: DynamicCache(config=model.config),
        "StaticCache": lambda: StaticCache(config=model.config, max_cache_len=48),
    }[cache]()
    parts = []
    with torch.no_grad():
        for start, stop in ((0, 1), (1, 13), (13, LENGTH)):
            batch = {"mm_token_type_ids": kinds(ids, *IMAGES[where])}
            parts.append(model(ids[:, start:stop], past_key_values=made, **batch).logits)
        assert torch.allclose(by_hand(model, ids, IMAGES[where]), torch.cat(parts, dim=1), atol=1e-4)


def test_a_batch_with_padding(model: Any) -> None:
    import torch

    ids = text(model, rows=2)
    mask, seen = torch.ones_like(ids), kinds(ids, (10, 18))
    mask[1, :6] = 0
    with torch.no_grad():
        found = model(ids, attention_mask=mask, mm_token_type_ids=seen).logits
        assert torch.allclose(by_hand(model, ids[:1], [(10, 18)]), found[:1], atol=1e-4)
        alone = model(ids[1:, 6:], mm_token_type_ids=seen[1:, 6:]).logits
        assert torch.allclose(alone, found[1:, 6:], atol=1e-4)


def test_training(model: Any) -> None:
    import torch

    ids = text(model)
    batch = {"mm_token_type_ids": kinds(ids, *IMAGES["several"])}
    weight = model.model.language_model.layers[0].self_attn.q_proj.weight
    gradients = []
    model.train()
    try:
        for logits in (by_hand(model, ids, IMAGES["several"], **batch), model(ids, **batch).logits):
            (gradient,) = torch.autograd.grad(logits.square().mean(), weight)
            gradients.append(gradient)
    finally:
        model.eval()
    assert torch.allclose(*gradients, atol=1e-4 * gradients[0].abs().max().item())


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_generate(workspace: Any, model: Any, options: dict[str, Any]) -> None:
    import torch

    batch = tiny.without(workspace.inputs(), "input_features")
    settings = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        found = model.generate(**batch, **settings, **options).logits[0]
        assert torch.allclose(model(**batch).logits[:, -1], found, atol=1e-4)


def test_a_prompt_without_an_image_is_left_alone(model: Any) -> None:
    import torch

    import gemma4_compat

    ids = text(model)
    with torch.no_grad():
        found = model(ids).logits
        gemma4_compat.revert(PATCH.id)
        try:
            assert torch.equal(found, model(ids).logits)
        finally:
            gemma4_compat.install()
