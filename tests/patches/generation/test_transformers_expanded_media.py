"""transformers-expanded-media: beams and returned sequences of prompts with several images, videos and sounds."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from gemma4_compat.patches.generation import transformers_expanded_media
from gemma4_compat.patches.generation.transformers_expanded_media import PATCH
from tests.patches.promise import Promise

TOKENS = {"image": tiny_configs.IMAGE_TOKEN, "video": tiny_configs.VIDEO_TOKEN, "audio": tiny_configs.AUDIO_TOKEN}
FRAMES = 2


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"several (images|sounds) in a prompt: the logits are off by [\d.]+"
    exact = False  # a larger batch rounds in another way


def model_of(workspace: Any, variant: str) -> Any:
    if variant == variants.UNIFIED:
        pytest.importorskip("transformers.models.gemma4_unified")
    return tiny.load(workspace.cached(tiny_models.build_checkpoint, variant=variant), device=workspace.main).float()


def prompts(model: Any, variant: str, *, counts: tuple[int, ...] = (2, 0, 1)) -> list[dict[str, Any]]:
    """A batch for each prompt: one with so many images, videos and sounds, each another one."""
    import torch

    one = tiny.inputs(variant=variant)
    generator = torch.Generator().manual_seed(5)
    flat = "num_frames_per_video" in inspect.signature(model.model.get_video_features).parameters
    found = []
    for count in counts:
        ids = torch.randint(3, 240, (1, 60), generator=generator)
        pixels, positions = one["pixel_values"], one["image_position_ids"]
        batch: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
        for number in range(count):
            ids[0, 2 + 6 * number : 6 + 6 * number] = TOKENS["image"]
            ids[0, 16 + 12 * number : 20 + 12 * number] = TOKENS["video"]  # a frame each
            ids[0, 21 + 12 * number : 25 + 12 * number] = TOKENS["video"]
        if count:
            batch["pixel_values"] = torch.rand(count, *pixels.shape[1:], generator=generator)
            batch["image_position_ids"] = positions.repeat(count, 1, 1)
            shape = (count * FRAMES,) if flat else (count, FRAMES)
            batch["pixel_values_videos"] = torch.rand(*shape, *pixels.shape[1:], generator=generator)
            batch["video_position_ids"] = positions[0].expand(*shape, *positions.shape[1:]).clone()
            if flat:
                batch["num_frames_per_video"] = torch.full((count,), FRAMES)
        if count and "input_features" in one:
            mask = one["input_features_mask"].repeat(count, 1)
            mask[:, -mask.shape[1] // 4 :] = False  # padding, of which the last token is made
            batch["input_features"] = torch.randn(count, *one["input_features"].shape[1:], generator=generator)
            batch["input_features_mask"] = mask
            for number in range(count):
                ids[0, 44 + 6 * number : 47 + 6 * number] = TOKENS["audio"]
        kinds = [(ids == TOKENS[kind]).long() * value for kind, value in (("image", 1), ("video", 2), ("audio", 3))]
        found.append({"input_ids": ids, "mm_token_type_ids": sum(kinds), **batch})
    return [{name: value.to(model.device) for name, value in batch.items()} for batch in found]


def together(batches: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    names = dict.fromkeys(name for batch in batches for name in batch)
    return {name: torch.cat([batch[name] for batch in batches if name in batch]) for name in names}


def generated(model: Any, batch: dict[str, Any], **options: Any) -> Any:
    asked = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": list(TOKENS.values())}
    return model.generate(**batch, **asked, return_dict_in_generate=True, output_logits=True, **options)


def off(model: Any, batches: list[dict[str, Any]], **options: Any) -> float:
    """How far the first logits of any beam are from those of its prompt by itself, and one answer for each."""
    import torch

    times = options.get("num_beams", options.get("num_return_sequences", 1))
    expected = torch.cat([generated(model, batch).logits[0] for batch in batches])
    found = generated(model, together(batches), **options)
    return float((found.logits[0] - expected.repeat_interleave(times, dim=0)).abs().max() / expected.abs().max())


WAYS: list[dict[str, Any]] = [
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 2, "use_cache": False},
    {"num_beams": 2, "cache_implementation": "static"},
    {"num_return_sequences": 2, "do_sample": True},
]


@pytest.mark.parametrize("variant", variants.NAMES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way))
def test_each_copy_has_the_media_of_its_prompt(workspace: Any, variant: str, way: dict[str, Any]) -> None:
    import torch

    model = model_of(workspace, variant)
    batches = prompts(model, variant)
    way = dict(way)
    if way.pop("do_sample", False):
        torch.manual_seed(0)
        expected = torch.cat([generated(model, batch).logits[0] for batch in batches])
        options = {"max_new_tokens": 2, "do_sample": True, "return_dict_in_generate": True, "output_logits": True}
        found = model.generate(**together(batches), **options, **way).logits[0]
        assert torch.allclose(found, expected.repeat_interleave(2, dim=0), atol=1e-4 * float(expected.abs().max()))
        return
    assert off(model, batches, **way) <= 1e-4
    alone = [generated(model, batch, **way).sequences for batch in batches]
    assert torch.equal(generated(model, together(batches), **way).sequences, torch.cat(alone))


@pytest.mark.parametrize("counts", [(1, 1), (0, 2), (3,)])
def test_any_number_in_a_prompt(workspace: Any, counts: tuple[int, ...]) -> None:
    model = model_of(workspace, "E2B")
    batches = prompts(model, "E2B", counts=counts) if max(counts) < 3 else [_three_sounds(model)]
    assert off(model, batches, num_beams=2) <= 1e-4


def _three_sounds(model: Any) -> dict[str, Any]:
    """One prompt, with sounds of several lengths."""
    import torch

    batch = tiny.without(tiny.inputs(model.device), "image")
    ids = batch["input_ids"][:, :1].repeat(1, 30) + 1
    ids[:, 2:6] = ids[:, 8:11] = ids[:, 11:13] = TOKENS["audio"]
    mask = torch.ones(3, 16, dtype=torch.bool, device=model.device)
    mask[1, 12:] = mask[2, 8:] = False
    features = torch.randn(3, 16, 128, generator=torch.Generator().manual_seed(2)).to(model.device)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return found | {"input_features": features, "input_features_mask": mask}


@pytest.mark.parametrize("offload", ["towers", "layers", "both"])
def test_a_split_model_with_an_adapter(workspace: Any, offload: str) -> None:
    from peft import PeftModel

    batches = prompts(workspace.load(), "E2B")
    model = PeftModel.from_pretrained(workspace.dispatch(workspace.load().float(), offload), workspace.adapter("all"))
    assert off(model.eval(), batches, num_beams=2) <= 1e-4


def test_the_tensors_of_the_caller_stay(workspace: Any) -> None:
    import torch

    model = model_of(workspace, "E2B")
    batch = together(prompts(model, "E2B"))
    before = {name: value.clone() for name, value in batch.items()}
    generated(model, batch, num_beams=2)
    assert all(torch.equal(batch[name], value) for name, value in before.items())


def test_features_that_no_placeholder_asks_for_are_upstreams_error(workspace: Any) -> None:
    model = model_of(workspace, "E2B")
    batch = together(prompts(model, "E2B", counts=(1, 1)))
    batch["input_features"], batch["input_features_mask"] = (
        batch[name][:1] for name in ("input_features", "input_features_mask")
    )
    with pytest.raises((ValueError, RuntimeError), match="do not match"):
        generated(model, batch, num_beams=2)


@pytest.mark.parametrize(
    "sizes, asked, expected",
    [
        ([4, 4], [8], [0, 1, 0, 1]),
        ([4, 4, 2], [8, 0, 2], [0, 1, 0, 1, 2, 2]),
        ([4], [0, 4], [0, 0]),
        ([], [0, 0], []),
        ([4, 4], [4], None),
        ([4, 4], [6, 2], None),
        ([4], [4, 4], None),
    ],
)
def test_the_order(sizes: list[int], asked: list[int], expected: list[int] | None) -> None:
    assert transformers_expanded_media._order(sizes, asked, 2) == expected
