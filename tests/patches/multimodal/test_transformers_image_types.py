"""F118: images without ``mm_token_type_ids``, and with types that do not mark them (12B, 26B-A4B, 31B)."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from gemma4_compat._lab.workspace import Workspace
from gemma4_compat.patches.multimodal.transformers_image_types import PATCH
from tests.helpers import without
from tests.patches.promise import Promise

TYPES = "mm_token_type_ids"
#: Random logits must not write places of images.
OPTIONS = {
    "max_new_tokens": 4,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
    "suppress_tokens": [tiny_configs.IMAGE_TOKEN, tiny_configs.AUDIO_TOKEN, tiny_configs.VIDEO_TOKEN],
}
LARGE = ["12B", "26B-A4B", "31B"]


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"without mm_token_type_ids are off by \d"


def loaded(workspace: Any, variant: str) -> Any:
    if variant == variants.UNIFIED:
        pytest.importorskip("transformers.models.gemma4_unified", reason="this transformers has no 12B")
        return workspace.unified().load().float()
    folder = workspace.cached(tiny_models.build_checkpoint, text_variant=variant)
    return tiny.load(folder, device=workspace.main).float()


@pytest.fixture(scope="module", params=LARGE)
def model(request: pytest.FixtureRequest, workspace: Any) -> Any:
    return loaded(workspace, request.param)


@pytest.fixture(scope="module")
def large(workspace: Any) -> Any:
    return loaded(workspace, "31B")


def prompt(model: Any) -> dict[str, Any]:
    """Of one row; without a sound, which no mask asks about."""
    unified = model.config.model_type.startswith("gemma4_unified")
    return tiny.without(tiny.inputs(model.device, variant=variants.UNIFIED if unified else None), "input_features")


def untyped(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != TYPES}


def padded(batch: dict[str, Any]) -> dict[str, Any]:
    """Three rows of different lengths, padded on the left: with two images, one, and none."""
    import torch

    ids = tiny.several_media(batch)["input_ids"]
    ids = torch.cat([ids, ids[1:].masked_fill(ids[1:] == tiny_configs.IMAGE_TOKEN, 7)])
    mask = torch.ones_like(ids)
    ids[1, :5] = mask[1, :5] = 0
    names = ("pixel_values", "image_position_ids")
    found = {"input_ids": ids, "attention_mask": mask, TYPES: (ids == tiny_configs.IMAGE_TOKEN).long()}
    return found | {name: torch.cat([batch[name]] * 3) for name in names}


def logits(model: Any, batch: dict[str, Any], **options: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(**batch, **options).logits


def generated(model: Any, batch: dict[str, Any], **options: Any) -> Any:
    import torch

    return torch.stack(model.generate(**batch, **OPTIONS, **options).logits)


def test_rows_with_images_and_without(model: Any) -> None:
    import torch

    batch = padded(prompt(model))
    assert torch.equal(logits(model, untyped(batch)), logits(model, batch))
    assert torch.equal(generated(model, untyped(batch)), generated(model, batch))
    beams = {"num_beams": 2, "max_new_tokens": 3, "do_sample": False, "suppress_tokens": OPTIONS["suppress_tokens"]}
    assert torch.equal(model.generate(**untyped(batch), **beams), model.generate(**batch, **beams))


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"cache_implementation": "static"}, {"use_cache": False}, {"prompt_lookup_num_tokens": 2}],
    ids=lambda options: next(iter(options)),
)
def test_every_way_to_generate(model: Any, options: dict[str, Any]) -> None:
    import torch

    batch = prompt(model)
    found = generated(model, untyped(batch), **options)
    assert torch.equal(found, generated(model, batch, **options))
    assert torch.allclose(found, generated(model, batch), atol=1e-4)


@pytest.mark.full
def test_chunks(model: Any) -> None:
    import torch

    batch = prompt(model)
    try:
        found = generated(model, untyped(batch), prefill_chunk_size=6)  # which ends inside the image
    except Gemma4CompatError as error:
        pytest.skip(f"before transformers 5.23.0: {error}")
    assert torch.allclose(found, generated(model, batch), atol=1e-4)


def test_videos(model: Any) -> None:
    import torch

    batch = prompt(model)
    flat = "num_frames_per_video" in inspect.signature(model.model.get_video_features).parameters
    batch["input_ids"][batch["input_ids"] == tiny_configs.IMAGE_TOKEN] = model.config.video_token_id
    batch[TYPES] *= 2
    values, places = batch.pop("pixel_values"), batch.pop("image_position_ids")
    batch |= {"pixel_values_videos": values if flat else values[None]}
    batch |= {"video_position_ids": places if flat else places[None]}
    if flat:
        batch["num_frames_per_video"] = torch.tensor([1], device=model.device)
    assert torch.equal(logits(model, untyped(batch)), logits(model, batch))


@pytest.mark.full
def test_embeddings_and_arguments_by_position(model: Any) -> None:
    import torch

    batch = prompt(model)
    expected = logits(model, batch)
    others = {name: value for name, value in untyped(batch).items() if name != "input_ids"}
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach()
    assert torch.equal(logits(model, {**others, "inputs_embeds": embeds}), expected)
    found = generated(model, {**others, "inputs_embeds": embeds})
    assert torch.equal(found, generated(model, batch))
    with torch.no_grad():
        inner = model.model(batch["input_ids"], batch["pixel_values"], **{
            name: value for name, value in others.items() if name != "pixel_values"
        })  # fmt: skip
        assert torch.equal(inner.last_hidden_state, model.model(**batch).last_hidden_state)


def test_the_image_of_a_second_turn(model: Any) -> None:
    import torch
    from transformers import DynamicCache

    batch = prompt(model)
    ids = batch["input_ids"]
    expected, options = generated(model, batch), OPTIONS | {"max_new_tokens": 1}
    for only_new in (False, True):
        cache = model.generate(ids[:, :3], **options).past_key_values
        second = untyped(batch) | {"past_key_values": cache}
        if only_new:
            second["input_ids"] = ids[:, 3:]
        assert torch.allclose(generated(model, second), expected, atol=1e-4)
    cache = DynamicCache(config=model.config)
    logits(model, {"input_ids": ids[:, :3]}, past_key_values=cache)
    later = untyped(batch) | {"input_ids": ids[:, 3:]}
    assert torch.allclose(logits(model, later, past_key_values=cache), logits(model, batch)[:, 3:], atol=1e-4)


def test_types_that_leave_an_image_out_are_refused(model: Any) -> None:
    import torch
    from transformers import DynamicCache

    batch = prompt(model)
    types = batch[TYPES]
    wrong = {"zeros": torch.zeros_like(types), "shifted": types.roll(1), "short": types[:, :6], "rows": types[:0]}
    for value in wrong.values():
        with pytest.raises(Gemma4CompatError, match=r"do not mark the image tokens of 1 .* 24 tokens"):
            logits(model, batch | {TYPES: value})
    with pytest.raises(Gemma4CompatError, match=r"shape \(1, 24\), all zero, .* Leave mm_token_type_ids out"):
        generated(model, batch | {TYPES: wrong["zeros"]}, cache_implementation="static")
    two = padded(batch)
    two[TYPES][1] = 0  # as of a rejected answer that is put beside a chosen one
    with pytest.raises(Gemma4CompatError, match=r"shape \(3, 40\) do not mark"):
        logits(model, two)
    cache = DynamicCache(config=model.config)
    logits(model, {"input_ids": batch["input_ids"][:, :3]}, past_key_values=cache)
    later = batch | {"input_ids": batch["input_ids"][:, 3:], TYPES: types[:, 3:]}
    with pytest.raises(Gemma4CompatError, match=r"shape \(1, 21\) .* of 24 tokens, of which the cache holds 3"):
        logits(model, later, past_key_values=cache)


def test_types_that_mark_it_are_left_alone(model: Any) -> None:
    """More rows or columns than the text has, or none for words at its end."""
    import torch

    batch = prompt(model)
    expected, types = logits(model, batch), batch[TYPES]
    given = (torch.nn.functional.pad(types, (0, 3)), types[:, :12], types.repeat(2, 1), types.to(torch.int32))
    for value in given:
        assert torch.equal(logits(model, batch | {TYPES: value}), expected)


def test_where_types_do_not_matter_nothing_is_asked(workspace: Any, large: Any) -> None:
    import torch

    small, batch = workspace.load(), workspace.inputs()
    expected = logits(small, batch)
    for types in ({}, {TYPES: torch.zeros_like(batch[TYPES])}, {TYPES: batch[TYPES][:, :2]}):
        assert torch.equal(logits(small, untyped(batch) | types), expected)
    text = tiny.inputs(large.device, text_only=True)
    with without(PATCH.id):
        upstream = logits(large, text), logits(large, text | {TYPES: torch.zeros_like(text["input_ids"])})
    for types, before in zip(({}, {TYPES: torch.zeros_like(text["input_ids"])}), upstream, strict=True):
        assert torch.equal(logits(large, text | types), before)


@pytest.mark.full
def test_gradients(model: Any) -> None:
    import torch

    def gradients(batch: dict[str, Any]) -> dict[str, Any]:
        model.zero_grad()
        model.train()(**batch, labels=batch["input_ids"]).loss.backward()
        found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        model.zero_grad()
        model.eval()
        return found

    expected, found = gradients(prompt(model)), gradients(untyped(prompt(model)))
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_compiled(large: Any) -> None:
    import torch

    batch, compiled = prompt(large), torch.compile(large.model, backend="eager")
    with torch.no_grad():
        found = compiled(**untyped(batch)).last_hidden_state
        assert torch.equal(found, large.model(**batch).last_hidden_state)


@pytest.mark.full
@pytest.mark.parametrize("variant", LARGE)
@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_a_split_model(tmp_path: Path, variant: str, quantization: str | None) -> None:
    import torch

    if variant == variants.UNIFIED:
        pytest.importorskip("transformers.models.gemma4_unified", reason="this transformers has no 12B")
    own = Workspace.build(tmp_path, variant)
    batch, model = own.inputs(), own.load(quantization)
    expected = logits(model, batch), generated(model, batch)
    for offload in ("both", "layers"):
        model = own.split(quantization, offload)
        assert torch.equal(logits(model, untyped(batch)), expected[0])
        assert torch.equal(generated(model, untyped(batch)), expected[1])


@pytest.mark.full
def test_prefix_tuning(workspace: Any) -> None:
    """Its keys and values are in the cache before the text, whose types do not count them."""
    import peft
    import torch

    torch.manual_seed(0)
    tuned = peft.get_peft_model(loaded(workspace, "31B"), peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3
    )).eval()  # fmt: skip
    batch = prompt(tuned)
    try:
        expected = logits(tuned, untyped(batch))
    except RuntimeError as error:
        pytest.skip(f"this release of PEFT has no prefix for such layers: {error}")
    assert torch.equal(logits(tuned, batch), expected)
    for given in (batch, untyped(batch)):
        assert torch.allclose(generated(tuned, given)[0], expected[:, -1], atol=1e-4)
