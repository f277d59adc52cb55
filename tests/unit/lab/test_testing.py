"""``gemma4_compat.testing``: the tiny models that users build for their own tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemma4_compat import Gemma4CompatError, testing
from tests.helpers import child


def test_importing_it_imports_no_library() -> None:
    code = "import sys; from gemma4_compat import testing; assert not {'torch', 'transformers'} & set(sys.modules)"
    assert child("-c", code).code == 0


@pytest.mark.parametrize("variant", [None, "E4B", "26B-A4B"])
def test_a_model_and_an_adapter_from_text_paths(tmp_path: Path, variant: str | None) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    checkpoint = testing.tiny_checkpoint(str(tmp_path / "model"), variant)
    assert checkpoint == str(tmp_path / "model")
    adapter = testing.tiny_adapter(checkpoint, tmp_path / "adapter", "language")
    inputs = testing.tiny_inputs(variant=variant)
    base = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        before = base(**inputs).logits
        after = PeftModel.from_pretrained(base, adapter).eval()(**inputs).logits
    assert before.shape == after.shape == (1, 24, 256)
    assert not torch.equal(before, after)
    assert ("input_features" in inputs) is (variant != "26B-A4B")
    assert set(testing.tiny_inputs(text_only=True)) == {"input_ids", "attention_mask"}


def test_bad_arguments_are_one_clear_error_and_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine", encoding="utf-8")
    with pytest.raises(Gemma4CompatError, match="exists and is not an empty folder"):
        testing.tiny_checkpoint(tmp_path)
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == "mine"
    for call in (lambda: testing.tiny_checkpoint(tmp_path / "x", "E3B"), lambda: testing.tiny_inputs(variant="E3B")):
        with pytest.raises(Gemma4CompatError, match="'E3B' is unknown; give one of E2B, E4B, 12B, 26B-A4B, 31B"):
            call()
    with pytest.raises(Gemma4CompatError, match="give one of language, towers, all"):
        testing.tiny_adapter(tmp_path, tmp_path / "x", "vision")
    assert not (tmp_path / "x").exists()
