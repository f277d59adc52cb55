"""F64: two processes with half of a model each give the answers of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._engine import versions
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.placement.transformers_tensor_parallel import PATCH
from tests.helpers import ROOT
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: aten.where.self got mixed torch.Tensor and DTensor"


RANK = """
import os, sys, gemma4_compat, torch
from transformers import Gemma4ForConditionalGeneration
torch.distributed.init_process_group("gloo")
model = Gemma4ForConditionalGeneration.from_pretrained(sys.argv[1], dtype=torch.float32, tp_plan="auto").eval()
with torch.no_grad():
    logits = model(**torch.load(f"{sys.argv[1]}/batch.pt")).logits
logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
expected = torch.load(f"{sys.argv[1]}/logits.pt")
off = (logits - expected).abs().max() / expected.abs().max()
kind = type(model.model.language_model.embed_tokens.weight).__name__
print(f"split {kind} off {off.item()}\\n", end="", flush=True)  # one write: another process prints at the same time
torch.distributed.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.skipif(
    versions.admits("<5.23", versions.installed("transformers") or "0"),
    reason="measured with transformers 5.23; older ones cannot load a Gemma 4 this way (5.6: its vision tower)",
)
def test_two_processes(tmp_path: Path) -> None:
    """Of an E4B: its two key-value heads are one for each process."""
    import torch

    checkpoint = tiny_models.build_checkpoint(tmp_path / "model", variant="E4B")
    batch: dict[str, Any] = tiny.inputs(text_only=True)
    with torch.no_grad():
        torch.save(tiny.load(checkpoint, dtype=torch.float32)(**batch).logits, checkpoint / "logits.pt")
    torch.save(batch, checkpoint / "batch.pt")
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore")
    done = subprocess.run(
        [*command, str(script), str(checkpoint)], env=environment, capture_output=True, text=True, timeout=300
    )
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("split")]
    assert len(said) == 2, done.stderr[-3000:]
    for _, kind, _, off in said:
        assert kind == "DTensor"
        assert float(off) <= 1e-4
