"""Transformers' pipelines, given a model object."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.one_device import modalities

OPTIONS = {"max_new_tokens": 6, "do_sample": False}


def text(model: Any, processor: Any, _image: Any) -> Any:
    from transformers import pipeline

    generate = pipeline("text-generation", model=model, tokenizer=processor.tokenizer)
    assert generate.device == model.device
    chat = [{"role": "user", "content": "Hello"}]
    return [generate("Hello", **OPTIONS), generate(chat, **OPTIONS), generate(["a", "bcd"], batch_size=2, **OPTIONS)]


def images(model: Any, processor: Any, image: Any, task: str = "image-text-to-text") -> Any:
    from transformers import pipeline

    generate = pipeline(task, model=model, processor=processor)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    found = generate(text=[{"role": "user", "content": parts}], return_full_text=False, **OPTIONS)
    return [one["generated_text"] for one in found]


def anything(model: Any, processor: Any, image: Any) -> Any:
    pytest.importorskip("torchvision", reason="the any-to-any pipeline needs torchvision")
    return images(model, processor, image, "any-to-any")


@pytest.mark.parametrize("quantization", [None, "4bit"])
@pytest.mark.parametrize("task", [text, images, anything])
def test_it_answers_as_on_one_device(
    whole: Any, split: Any, processor: Any, tmp_path: Path, task: Callable[..., Any], quantization: str | None
) -> None:
    from PIL import Image

    image = Image.open(modalities.write_png(tmp_path / "image.png", 1))
    assert task(split(quantization), processor, image) == task(whole(quantization), processor, image)
