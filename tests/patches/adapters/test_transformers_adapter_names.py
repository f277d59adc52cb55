"""Images, videos and sounds of a batch with one adapter a row (F119)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_configs
from gemma4_compat.patches.adapters.transformers_adapter_names import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"Length of `adapter_names` should be the same as the number of inputs|the rows' logits are off by"
    exact = False


def adapted(workspace: Any, *, split: bool = False) -> Any:
    """The model in float32 with the adapters "one" in towers and "other" everywhere."""
    from peft import PeftModel

    model = workspace.load().float()
    model = workspace.dispatch(model) if split else model
    model = PeftModel.from_pretrained(model, workspace.adapter("towers"), adapter_name="one")
    model.load_adapter(str(workspace.adapter("all")), "other")
    return model.eval()


def assert_rows(model: Any, batch: dict[str, Any], own: list[list[int]], names: list[str]) -> None:
    """Each row has the logits, and the text with beams, of the row by itself.

    ``own``: the images and sounds of each row.
    """
    import torch

    of_rows = ("input_ids", "attention_mask", "mm_token_type_ids")
    options = {"max_new_tokens": 3, "num_beams": 2, "suppress_tokens": [*_PLACES]}
    with torch.no_grad():
        found = model(**batch, adapter_names=names).logits
        tokens = model.generate(**batch, adapter_names=names, **options)
        for index, (name, items) in enumerate(zip(names, own)):
            model.set_adapter(name)
            alone = {key: value[[index] if key in of_rows else items] for key, value in batch.items()}
            alone = {key: value for key, value in alone.items() if len(value)}
            expected = model(**alone).logits[0]
            assert (found[index] - expected).abs().max() < 1e-4 * expected.abs().max()
            assert torch.equal(tokens[index], model.generate(**alone, **options)[0])


_PLACES = (tiny_configs.IMAGE_TOKEN, tiny_configs.AUDIO_TOKEN, tiny_configs.VIDEO_TOKEN)


@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.full)])
def test_two_of_each_and_one_of_each(workspace: Any, split: bool) -> None:
    batch = tiny.several_media(workspace.inputs())
    assert_rows(adapted(workspace, split=split), batch, [[0, 1], [2]], ["other", "one"])


def test_two_and_none(workspace: Any) -> None:
    """As many images as rows."""
    batch = tiny.several_media(workspace.inputs())
    for token in _PLACES:
        batch["input_ids"][1][batch["input_ids"][1] == token] = 9
    batch["mm_token_type_ids"][1] = 0
    batch = {name: value[:2] for name, value in batch.items()}
    assert_rows(adapted(workspace), batch, [[0, 1], []], ["one", "other"])


def test_the_12b(workspace: Any) -> None:
    other = workspace.unified()
    if other is None:
        pytest.skip("this release has no 12B")
    assert_rows(adapted(other), tiny.several_media(other.inputs()), [[0, 1], [2]], ["one", "other"])


def test_videos(workspace: Any) -> None:
    """Two videos of two frames in the first row, one in the second."""
    import torch

    model = adapted(workspace)
    given = tiny.several_media(workspace.inputs())
    ids = torch.randint(3, 240, (2, 24), generator=torch.Generator().manual_seed(2))
    ids[0, 4:12] = ids[0, 14:22] = ids[1, 6:14] = tiny_configs.VIDEO_TOKEN
    frames = torch.randn(3, 2, *given["pixel_values"].shape[1:], generator=torch.Generator().manual_seed(4))
    places = given["image_position_ids"][:1].expand(3, 2, -1, -1)
    flat = "num_frames_per_video" in inspect.signature(model.get_base_model().model.get_video_features).parameters

    def of(videos: list[int]) -> dict[str, Any]:
        batch = {"pixel_values_videos": frames[videos], "video_position_ids": places[videos]}
        if flat:
            batch = {name: value.flatten(0, 1) for name, value in batch.items()}
            batch["num_frames_per_video"] = torch.full((len(videos),), 2)
        return batch

    with torch.no_grad():
        found = model(input_ids=ids, **of([0, 1, 2]), adapter_names=["other", "one"]).logits
        for index, (name, videos) in enumerate((("other", [0, 1]), ("one", [2]))):
            model.set_adapter(name)
            expected = model(input_ids=ids[[index]], **of(videos)).logits[0]
            assert (found[index] - expected).abs().max() < 1e-4 * expected.abs().max()


def test_what_no_row_owns_is_an_error(workspace: Any) -> None:
    import torch

    model, batch = adapted(workspace), tiny.several_media(workspace.inputs())
    batch["input_ids"][0, 4] = 9  # an image with a placeholder less
    with (
        pytest.raises(ValueError, match=r"each image belongs to one row. These have \[4, 4, 4\] tokens"),
        torch.no_grad(),
    ):
        model(**batch, adapter_names=["one", "other"])
    if "mm_encoder_outputs" not in inspect.signature(model.get_base_model().forward).parameters:
        return  # images are encoded after the rows are repeated, and each copy can have its own adapter
    batch = tiny.several_media(workspace.inputs())
    with pytest.raises(ValueError, match="4 names for 2 prompts"), torch.no_grad():
        model.generate(**batch, adapter_names=["one", "other"] * 2, num_return_sequences=2, do_sample=True)
