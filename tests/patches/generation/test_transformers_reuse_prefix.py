"""transformers-reuse-prefix: its promise, and pipelines. tests/unit/prefix_cache has the details."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny
from gemma4_compat.patches.generation.transformers_reuse_prefix import PATCH
from tests.one_device import modalities
from tests.patches.promise import Promise
from tests.world.clients import models

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"the second turn reads (\d+) of \1 tokens"
    exact = False  # what is reused was computed by other forwards


@pytest.mark.parametrize("task", ["text-generation", "image-text-to-text", "any-to-any"])
def test_a_chat_through_a_pipeline(workspace: Any, tmp_path: Path, task: str) -> None:
    """Each turn reads what is new, and answers as a pipeline that reads everything."""
    pytest.importorskip("PIL", reason="the image pipelines need pillow")
    if task == "any-to-any":
        pytest.importorskip("torchvision", reason="the any-to-any pipeline needs torchvision")
    from PIL import Image
    from transformers import pipeline

    processor = models.processor()
    given: dict[str, Any] = (
        {"tokenizer": processor.tokenizer} if task == "text-generation" else {"processor": processor}
    )
    model, plain = (tiny.load(workspace.larger(positions=64), device=workspace.main).float() for _ in range(2))
    gemma4_compat.decode_fast(model, reuse_prefix=True, graphs=False)
    chat, other = (pipeline(task, model=one, **given) for one in (model, plain))
    content: Any = "Hello, who are you and what do you do?"
    if task != "text-generation":
        image = Image.open(modalities.write_png(tmp_path / "image.png", 1))
        content = [{"type": "image", "image": image}, {"type": "text", "text": content}]
    messages: list[dict[str, Any]] = []
    counted = gemma4_compat.statistics(model).decoding
    for turn, said in enumerate((content, "Why?", "And then?")):
        parts = [{"type": "text", "text": said}] if isinstance(said, str) else said
        messages.append({"role": "user", "content": parts})
        before = counted.prompt_tokens_read, counted.prompt_tokens_reused
        text, expected = (answer(one, messages, task) for one in (chat, other))
        assert text == expected
        read, reused = counted.prompt_tokens_read - before[0], counted.prompt_tokens_reused - before[1]
        assert (reused > read) == (turn > 0), (read, reused, counted.not_reused)
        messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})


def answer(chat: Any, messages: list[dict[str, Any]], task: str) -> str:
    if task == "text-generation":
        return str(chat(messages, return_full_text=False, **OPTIONS)[0]["generated_text"])
    return str(chat(text=messages, return_full_text=False, **OPTIONS)[0]["generated_text"])
