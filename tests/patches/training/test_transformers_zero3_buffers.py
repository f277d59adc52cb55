"""F62: under ZeRO-3 buffers come from the checkpoint, whichever class, names and processes there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny_models
from gemma4_compat._lab.stand_ins import zero3
from gemma4_compat.patches.training.transformers_zero3_buffers import PATCH
from tests.helpers import ROOT
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"buffers are not those of the checkpoint"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """With another scalar for each layer: the default is 1."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tiny_models.build_checkpoint(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in weights:
        if name.endswith("layer_scalar"):
            weights[name] = torch.rand(weights[name].shape, generator=generator).to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["Gemma4ForConditionalGeneration", "Gemma4Model"])
def test_every_buffer_and_weight(checkpoint: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    import torch
    import transformers

    kind = getattr(transformers, name)
    right = kind.from_pretrained(checkpoint, dtype=torch.bfloat16)
    caplog.clear()
    with zero3.standing_in():
        found = kind.from_pretrained(checkpoint, dtype=torch.bfloat16)
    for (key, one), (_, other) in zip(right.state_dict().items(), found.state_dict().items(), strict=True):
        assert torch.equal(one, other), key
    scalars = [value.item() for key, value in found.named_buffers() if key.endswith("layer_scalar")]
    assert len(set(scalars)) == len(scalars) > 1
    assert "MISSING" not in caplog.text


def test_another_model_is_left_alone(tmp_path: Path) -> None:
    """Upstream's own answer, without this repair, for what is no Gemma 4."""
    from gemma4_compat.patches.training import transformers_zero3_buffers as patched

    seen: list[Any] = []

    class Other:
        def named_buffers(self) -> Any:
            raise AssertionError("a model that is no Gemma 4 was looked at")

    def original(*given: Any) -> tuple[list[str], set[str]]:
        seen.append(given)
        return [], {"a"}

    assert patched.load_state_dict(original, Other(), {"a": 1}, None) == ([], {"a"})
    assert len(seen) == 1


def test_with_deepspeed_itself(checkpoint: Path) -> None:
    pytest.importorskip("deepspeed", reason="needs the package deepspeed")
    script = ROOT / "tests" / "patches" / "training" / "zero3_child.py"
    environment = dict(os.environ, DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1")
    command = [sys.executable, str(script), str(checkpoint)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == {"buffers": [], "parameters": []}
