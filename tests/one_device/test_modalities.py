"""From PNG and WAV files through upstream's own processor to features, tokens and text, with quantized towers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_adapters, tiny_models
from gemma4_compat._lab.scenarios import relative
from tests.one_device import modalities

QUANTIZATIONS = ["4bit", "4bit-double", "8bit"]
SENSES = ["vision", "audio", "video"]
#: How far features may be from those of the same weights, dequantized: rounding of the kernels, which a tiny random
#: tower magnifies. Measured on three stacks: 0.033 at most. The quantization itself moves them by 0.3 to 0.5 (4-bit),
#: 0.05 (8-bit).
KERNELS = 0.08


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build_checkpoint(tmp_path_factory.mktemp("modalities"), positions=64)


@pytest.fixture(scope="module")
def processor() -> Any:
    pytest.importorskip("PIL", reason="needs pillow: pip install 'gemma4-compat[images]'")
    return modalities.processor()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    return {
        "wide.png": modalities.write_png(folder / "wide.png", 0),
        "other.png": modalities.write_png(folder / "other.png", 1),
        "tall.png": modalities.write_png(folder / "tall.png", 2, (30, 90)),
        "long.wav": modalities.write_wav(folder / "long.wav", 0),
        "other.wav": modalities.write_wav(folder / "other.wav", 1),
        "short.wav": modalities.write_wav(folder / "short.wav", 2, 0.4),
    }


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Callable[[str | None], Any]:
    """``model(quantization)``: loaded once, towers quantized with everything else."""
    known: dict[str | None, Any] = {}

    def load(quantization: str | None) -> Any:
        if quantization not in known:
            known[quantization] = tiny.load(checkpoint, quantization, towers=True)
        return known[quantization]

    return load


@pytest.fixture
def perceive(processor: Any, files: dict[str, Path]) -> Callable[[Any, str], list[Any]]:
    """``perceive(model, sense)``: its features of two different files."""

    def run(model: Any, sense: str) -> list[Any]:
        if sense == "video":
            pairs = [("wide.png", "other.png"), ("other.png", "tall.png")]
            inputs = [modalities.clip(processor, "", [files[name] for name in pair]) for pair in pairs]
        elif sense == "vision":
            inputs = [modalities.chat(processor, "", image=files[name]) for name in ("wide.png", "other.png")]
        else:
            inputs = [modalities.chat(processor, "", sound=files[name]) for name in ("long.wav", "other.wav")]
        return [features(model, batch, sense) for batch in inputs]

    return run


def features(model: Any, batch: Any, sense: str) -> Any:
    """Soft tokens of the image, sound or video in a batch; a row each, float32."""
    import torch

    inner = model.model
    with torch.no_grad():
        if sense == "audio":
            found = inner.get_audio_features(batch["input_features"], batch["input_features_mask"], return_dict=True)
            return found.pooler_output[found.attention_mask].float()
        if sense == "vision":
            found = inner.get_image_features(batch["pixel_values"], batch["image_position_ids"], return_dict=True)
        else:
            counts = {"num_frames_per_video": batch["num_frames_per_video"]} if "num_frames_per_video" in batch else {}
            found = inner.get_video_features(
                batch["pixel_values_videos"], batch["video_position_ids"], return_dict=True, **counts
            )
        parts = found.pooler_output
        return (torch.cat(list(parts)) if isinstance(parts, (list, tuple)) else parts).float().flatten(0, -2)


@pytest.mark.parametrize("sense", SENSES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_two_files_are_told_apart_as_without_quantization(
    checkpoint: Path, model: Any, perceive: Any, quantization: str, sense: str
) -> None:
    first, second = perceive(model(quantization), sense)
    plain = perceive(tiny.dequantize(tiny.load(checkpoint, quantization, towers=True)), sense)
    high = perceive(model(None), sense)
    assert relative(second, first) > 0.8 * relative(high[1], high[0])
    for found, dequantized, reference in zip((first, second), plain, high):
        assert relative(found, dequantized) < KERNELS
        # What the quantized weights themselves do to the features cannot be avoided; nothing may come on top.
        assert relative(found, reference) < relative(dequantized, reference) + KERNELS / 2


@pytest.mark.parametrize("sense", SENSES)
@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_no_worse_than_quantizing_the_same_linears_by_hand(
    model: Any, perceive: Any, checkpoint: Path, quantization: str, sense: str
) -> None:
    import bitsandbytes

    by_hand = tiny.load(checkpoint)
    reference = perceive(model(None), sense)
    for name, linear in quantized_linears(model(quantization)):
        parent, _, own = name.rpartition(".")
        plain = by_hand.get_submodule(name)
        shape = (linear.in_features, linear.out_features, linear.bias is not None)
        if quantization == "4bit":
            import torch

            made = bitsandbytes.nn.Linear4bit(*shape, compute_dtype=torch.bfloat16, quant_type="nf4")
            made.weight = bitsandbytes.nn.Params4bit(plain.weight.data, requires_grad=False, quant_type="nf4")
        else:
            made = bitsandbytes.nn.Linear8bitLt(*shape, has_fp16_weights=False)
            made.weight = bitsandbytes.nn.Int8Params(plain.weight.data, requires_grad=False, has_fp16_weights=False)
        made.bias = plain.bias
        setattr(by_hand.get_submodule(parent), own, made.to("cpu"))
    for found, other, best in zip(perceive(model(quantization), sense), perceive(by_hand.eval(), sense), reference):
        assert relative(found, best) <= relative(other, best) + KERNELS / 2


def quantized_linears(model: Any) -> list[tuple[str, Any]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.startswith("Linear4bit") or type(module).__name__ == "Linear8bitLt"
    ]


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_a_sound_that_is_padded_is_heard_as_alone(
    model: Any, processor: Any, files: dict[str, Path], quantization: str | None
) -> None:
    import torch

    names = ["long.wav", "short.wav"]
    both = processor(
        text=[f"{processor.audio_token} ?"] * 2,
        audio=[modalities.read_wav(files[name]) for name in names],
        return_tensors="pt",
    )
    assert not both["input_features_mask"].all(), "one of them is padded"
    with torch.no_grad():
        found = model(quantization).model.get_audio_features(
            both["input_features"], both["input_features_mask"], return_dict=True
        )
    for row, mask, name in zip(found.pooler_output, found.attention_mask, names):
        alone = features(model(quantization), modalities.chat(processor, "", sound=files[name]), "audio")
        assert torch.equal(row[mask].float(), alone)


def conversation(model: Any, processor: Any, files: dict[str, Path]) -> tuple[list[str], list[Any]]:
    """Two prompts, each with an image and a sound; the model's texts and the logits of each prompt."""
    import torch

    texts, logits = [], []
    prompts = [("What is this, and what do you hear?", "wide.png", "long.wav"), ("And here?", "tall.png", "short.wav")]
    for text, image, sound in prompts:
        batch = modalities.chat(processor, text, files[image], files[sound])
        with torch.no_grad():
            logits.append(model(**batch).logits)
            tokens = model.generate(**batch, max_new_tokens=8, do_sample=False)
        texts.append(processor.decode(tokens[0, batch["input_ids"].shape[1] :]))
    return texts, logits


@pytest.mark.parametrize(
    "quantization", [None, *(pytest.param(name, marks=pytest.mark.full) for name in QUANTIZATIONS)]
)
def test_a_chat_with_an_image_and_a_sound(
    checkpoint: Path, processor: Any, files: dict[str, Path], tmp_path: Path, quantization: str | None
) -> None:
    """Quantized, the towers offloaded, an adapter on all towers: what everything on one device says."""
    import torch
    from peft import PeftModel

    adapter = tiny_adapters.build_adapter(checkpoint, tmp_path / "adapter", "towers")
    base = tiny.load(checkpoint, quantization, towers=True)
    expected = conversation(PeftModel.from_pretrained(base, adapter), processor, files)
    without = conversation(tiny.load(checkpoint, quantization, towers=True), processor, files)
    assert not torch.equal(expected[1][0], without[1][0]), "the adapter does something"
    assert len(set(expected[0])) == 2
    model = tiny.load(checkpoint, quantization, towers=True)
    placement = tiny.device_map(model, "towers", main="cpu", offloaded="disk")
    split = PeftModel.from_pretrained(tiny.dispatch(model, placement, tmp_path / "offload"), adapter)
    away = {found.path for found in gemma4_compat.find_meta_tensors(split) if found.offloaded}
    assert any("vision_tower" in path for path in away)
    assert any("audio_tower" in path for path in away)
    for _ in range(2):
        texts, logits = conversation(split, processor, files)
        assert texts == expected[0]
        assert all(torch.equal(found, reference) for found, reference in zip(logits, expected[1]))


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_chats_of_different_lengths_in_one_batch(
    checkpoint: Path, processor: Any, files: dict[str, Path], tmp_path: Path, quantization: str | None
) -> None:
    from PIL import Image

    names = [("wide.png", "long.wav"), ("tall.png", "short.wav")]
    batch = processor(
        text=[
            f"{processor.image_token} and {processor.audio_token}?",
            f"{processor.image_token}{processor.audio_token}",
        ],
        images=[[Image.open(files[image])] for image, _ in names],
        audio=[modalities.read_wav(files[sound]) for _, sound in names],
        return_tensors="pt",
    )
    assert not batch["attention_mask"].all(), "one of them is padded"
    whole = tiny.load(checkpoint, quantization, towers=True)
    model = tiny.load(checkpoint, quantization, towers=True)
    placement = tiny.device_map(model, "both", main="cpu", offloaded="disk")
    assert_same(tiny.dispatch(model, placement, tmp_path), whole, batch)


def assert_same(split: Any, whole: Any, batch: Any) -> None:
    """Three forwards and a generate of a split model are those of one device."""
    import torch

    with torch.no_grad():
        expected = whole(**batch).logits
        for _ in range(3):
            assert torch.equal(split(**batch).logits, expected)
    tokens = whole.generate(**batch, max_new_tokens=8, do_sample=False)
    assert torch.equal(split.generate(**batch, max_new_tokens=8, do_sample=False), tokens)


def test_a_video_in_a_chat(checkpoint: Path, processor: Any, files: dict[str, Path], tmp_path: Path) -> None:
    batch = modalities.clip(processor, "What happens?", [files["wide.png"], files["other.png"]])
    whole = tiny.load(checkpoint, "4bit", towers=True)
    model = tiny.load(checkpoint, "4bit", towers=True)
    placement = tiny.device_map(model, "towers", main="cpu", offloaded="disk")
    assert_same(tiny.dispatch(model, placement, tmp_path), whole, batch)
