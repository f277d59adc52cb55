"""An export for PEFT loads there without this package, with the outputs that the adapter has with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny
from tests.helpers import child
from tests.unit.adapter_tools.merge import adapters as made

WITHOUT = """
import json, sys, warnings
import torch
from peft import PeftModel
from transformers import Gemma4ForConditionalGeneration
assert "gemma4_compat" not in sys.modules
base, adapter = sys.argv[1:]
model = Gemma4ForConditionalGeneration.from_pretrained(base)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = PeftModel.from_pretrained(model, adapter).eval()
said = [str(one.message) for one in caught if "missing adapter keys" in str(one.message)]
with torch.no_grad():
    logits = model(input_ids=torch.tensor([[2, 5, 17, 33, 80]])).logits
print(json.dumps({"said": said, "bits": logits.view(torch.int16).flatten().tolist()[:5000]}))
"""


def with_shim(base: Path, adapter: Path) -> list[int]:
    import torch
    from peft import PeftModel

    model = PeftModel.from_pretrained(tiny.load(base), adapter).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[2, 5, 17, 33, 80]])).logits
    return logits.view(torch.int16).flatten().tolist()[:5000]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.full) for name in ("language", "text class")), "all"]
)
def test_without_the_shim(workspace: Any, tmp_path: Path, name: str) -> None:
    """Also keys of another class, which plain PEFT does not find."""
    adapter = workspace.text_adapter() if name == "text class" else workspace.adapter(name)
    report = gemma4_compat.export_adapter(adapter, tmp_path / "out", "peft", base=workspace.checkpoint)
    assert (report.rank, report.scale, report.added) == (None, None, ())
    done = child("-c", WITHOUT, str(workspace.checkpoint), str(tmp_path / "out"), timeout=120)
    assert done.code == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["said"] == []
    assert found["bits"] == with_shim(workspace.checkpoint, adapter)


@pytest.mark.parametrize("kind", ["LoHaConfig", "IA3Config", "VeraConfig", "AdaLoraConfig"])
def test_other_tuners(workspace: Any, tmp_path: Path, kind: str) -> None:
    """What follows the layer's name in a key is left as it is, and so is what belongs to no layer."""
    import peft
    from safetensors.torch import load_file

    options = {"feedforward_modules": r".*\.down_proj"} if kind == "IA3Config" else {"r": 4}
    if kind == "AdaLoraConfig":
        options = {"init_r": 4, "target_r": 4, "total_step": 10}
    config = getattr(peft, kind)(target_modules=r".*language_model\..*\.(q_proj|down_proj)", **options)
    adapter = made.make(workspace.checkpoint, tmp_path / "adapter", config)
    gemma4_compat.export_adapter(adapter, tmp_path / "out", "peft", base=workspace.checkpoint)
    before, after = (load_file(tmp_path / one / "adapter_model.safetensors") for one in ("adapter", "out"))
    assert set(before) == set(after)
    assert all((before[key] == after[key]).all() for key in before)
    assert with_shim(workspace.checkpoint, adapter) == with_shim(workspace.checkpoint, tmp_path / "out")
