"""transformers-resave-quantized: what was loaded from a quantized checkpoint is saved as it was.

Bit by bit, split and with experts: tests/one_device/test_round_trips.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat.patches.checkpoints.transformers_resave_quantized import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "NotImplementedError"


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double", "8bit"])
@pytest.mark.parametrize("original", [True, False])
def test_the_same_names_as_in_the_file(workspace: Any, tmp_path: Path, quantization: str, original: bool) -> None:
    from safetensors.torch import load_file

    workspace.load(quantization).save_pretrained(tmp_path / "first")
    model = tiny.load(tmp_path / "first")
    conversions = list(model._weight_conversions)
    model.save_pretrained(tmp_path / "again", save_original_format=original)
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "again"))
    assert first.keys() == again.keys()
    assert all(first[name].equal(again[name]) for name in first)
    assert model._weight_conversions == conversions
