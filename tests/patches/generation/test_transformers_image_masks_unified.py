"""transformers-image-masks-unified: in the 12B, too, full attention is causal among the tokens of an image."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.trained import TWINS, Trained
from gemma4_compat.patches.generation.transformers_image_masks_unified import PATCH
from tests.helpers import ROOT
from tests.patches.generation.test_transformers_chunked_images import READS_IN_CHUNKS
from tests.patches.generation.test_transformers_image_masks import (
    IMAGES,
    kinds,
    test_a_batch_with_padding,
    test_an_image_in_a_later_part,
    test_read_at_once,
    test_training,
    text,
)
from tests.patches.promise import Promise

# The tests of the other large models; here they get the 12B of the fixture below.
__all__ = ["test_a_batch_with_padding", "test_an_image_in_a_later_part", "test_read_at_once", "test_training"]


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"logits of a text with an image are off by \d"
    exact = False  # the logits differ by rounding


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(workspace: Any, request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("transformers.models.gemma4_unified", reason="this transformers has no 12B")
    made = tiny_models.unified_model().to(workspace.main)
    made.set_attn_implementation(request.param)
    return made


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str)
def test_generate_and_a_forward_say_the_same(model: Any, options: dict[str, Any]) -> None:
    import torch

    ids = text(model)
    batch = {"input_ids": ids, "mm_token_type_ids": kinds(ids, *IMAGES["several"], (27, 30))}
    settings = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        found = model.generate(**batch, **settings, **options).logits[0]
        assert torch.allclose(model(**batch).logits[:, -1], found, atol=1e-4)


def test_a_prompt_without_an_image_is_left_alone(model: Any) -> None:
    import torch

    ids = text(model)
    with torch.no_grad():
        found = model(ids).logits
        gemma4_compat.revert(PATCH.id)
        try:
            assert torch.equal(found, model(ids).logits)
        finally:
            gemma4_compat.install()


def said(model: Any, batch: dict[str, Any]) -> list[Any]:
    """Logits of three forwards, of one without a cache, and of every token of ``generate`` in three ways."""
    import torch

    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    ways: list[dict[str, Any]] = [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 16}]
    with torch.no_grad():
        found = [model(**batch, **options).logits for options in ({}, {}, {}, {"use_cache": False})]
        for way in ways:
            made = model.generate(**batch, **settings, **way)
            found += [made.sequences, *made.logits]
    return found


@READS_IN_CHUNKS
@pytest.mark.parametrize("offload", ["both", "all layers", "towers"])
def test_the_bits_of_one_device_wherever_its_weights_are(offload: str, tmp_path: Path) -> None:
    import torch
    from accelerate import dispatch_model

    trained = Trained(ROOT / TWINS["12B"])
    batch = trained.prompt("What do you see?", picture="red-square")
    expected, model = said(trained.load(), batch), trained.load()
    main = torch.device("cpu")
    placement = tiny.device_map(model, offload, main=main, offloaded="disk")
    options = {"main_device": main, "offload_dir": str(tmp_path), "skip_keys": tiny.skip_keys(model)}
    found = said(dispatch_model(model, placement, **options), batch)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_arguments_by_position_and_a_compiled_model(model: Any) -> None:
    import torch

    ids = text(model)
    given = {"input_ids": ids, "mm_token_type_ids": kinds(ids, *IMAGES["several"])}
    names = list(inspect.signature(model.model.forward).parameters)
    by_position = [given.get(name) for name in names[: names.index("mm_token_type_ids") + 1]]
    with torch.no_grad():
        expected = model.model(**given).last_hidden_state
        assert torch.equal(model.model(*by_position).last_hidden_state, expected)
        assert torch.equal(torch.compile(model.model, backend="eager")(**given).last_hidden_state, expected)
