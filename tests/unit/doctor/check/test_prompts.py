"""Prompts: the same on every machine, none with a special token, media of the shape that each model takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gemma4_compat import Gemma4CompatError
from gemma4_compat._doctor.check import prompts
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny_configs


def test_kinds() -> None:
    assert prompts.kinds(tiny_configs.config()) == ["text", "long text", "image", "sound"]
    assert prompts.kinds(tiny_configs.config(variant="31B")) == ["text", "long text", "image"]
    assert prompts.kinds(tiny_configs.config().get_text_config()) == ["text", "long text"]


def test_random_ids_are_plain() -> None:
    config = tiny_configs.config()
    ids = prompts.random_ids(config, 2000, seed=1)
    assert ids.shape == (1, 2000)
    assert not set(ids[0].tolist()) & {0, 1, 2, *range(249, 256)}
    assert torch.equal(ids, prompts.random_ids(config, 2000, seed=1))


def test_a_long_text_is_longer_than_the_window(tmp_path: Path) -> None:
    config = tiny_configs.config()
    batch = prompts.build("long text", config, tmp_path, longest=200).batch
    assert batch["input_ids"].shape[1] > config.get_text_config().sliding_window
    assert prompts.build("long text", config, tmp_path, longest=20).batch["input_ids"].shape == (1, 20)


@pytest.mark.parametrize("variant", [None, variants.UNIFIED])
def test_media_go_into_the_model(variant: str | None, tmp_path: Path) -> None:
    import transformers

    if variant and not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("this transformers has no 12B")
    config = tiny_configs.config(variant=variant) if variant else tiny_configs.config()
    kind = "Gemma4Unified" if variant else "Gemma4"
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    text = prompts.build("text", config, tmp_path, longest=100)
    for kind in ("image", "sound"):
        batch = prompts.build(kind, config, tmp_path, longest=100).batch
        assert set(text.batch) < set(batch)
        with torch.no_grad():
            assert model(**batch).logits.isfinite().all()


def test_a_picture_needs_a_processor(tmp_path: Path) -> None:
    with pytest.raises(Gemma4CompatError, match=r"--image '.*cat\.png' needs the checkpoint's processor"):
        prompts.build("image", tiny_configs.config(), tmp_path, longest=100, image=tmp_path / "cat.png")


def test_a_picture_is_asked_about_with_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    import transformers
    from PIL import Image

    asked = []

    class Processor:
        chat_template = "..."

        def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, Any]:
            asked.append((messages[0]["content"], options["return_dict"]))
            return {"input_ids": torch.tensor([[1, 2]]), "pixel_values": torch.zeros(1, 4, 4)}

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *_, **__: Processor())
    (tmp_path / "processor_config.json").write_text("{}")
    Image.new("L", (3, 2)).save(tmp_path / "cat.png")
    image = tmp_path / "cat.png"
    prompt = prompts.build("image", tiny_configs.config(), tmp_path, longest=100, image=image)
    (((picture, text), as_dict),) = asked
    assert (picture["image"].mode, picture["image"].size, as_dict) == ("RGB", (3, 2), True)
    assert text["text"] == "What is in this picture?"
    assert set(prompt.batch) == {"input_ids", "pixel_values"}
