"""F35: two processes, whose sets of names have different orders, compute the same under DDP."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import scenarios
from gemma4_compat.patches.training.transformers_rotary_order import MODELING_GEMMA4, PATCH
from tests.conftest import is_affected
from tests.helpers import ROOT
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a second rank of DDP: logits differ by"


def buffers(model: Any) -> list[str]:
    """The text model's, as they are registered."""
    return [name for name, _ in model.named_buffers() if "attention" in name and "inv_freq" in name]


def test_one_order_in_every_process(workspace: Any) -> None:
    models = [
        scenarios.in_another_process(MODELING_GEMMA4, workspace.load, reverse=reverse) for reverse in (False, True)
    ]
    assert buffers(models[0]) == buffers(models[1])
    assert len(buffers(models[0])) == 4
    assert buffers(models[0]) == sorted(buffers(models[0]))


def test_copies_keep_it_and_every_process_saves_the_same(workspace: Any) -> None:
    rotary = workspace.load().model.language_model.rotary_emb
    for copied in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):
        assert buffers(copied) == buffers(rotary)
        assert list(copied.state_dict()) == list(rotary.state_dict()) == []


RANK = """
import gemma4_compat
import sys, torch
from pathlib import Path
from gemma4_compat._lab import tiny
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[3]), world_size=2)
model = tiny.load(Path(sys.argv[1])).requires_grad_(False)
model.lm_head.weight.requires_grad_(True)
batch = tiny.inputs(text_only=True)
alone = model(**batch).logits
ranks = torch.nn.parallel.DistributedDataParallel(model)
print("order", list({"sliding_attention", "full_attention"})[0], "equal", torch.equal(alone, ranks(**batch).logits))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("shim", [False, True], ids=["unpatched", "patched"])
def test_two_processes_under_ddp(workspace: Any, tmp_path: Path, shim: bool) -> None:
    environment = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore", CUDA_VISIBLE_DEVICES="")
    if not shim:
        environment["GEMMA4_COMPAT_DISABLE"] = "all"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(workspace.checkpoint), str(tmp_path / "meet"), str(rank)],
            env=dict(environment, PYTHONHASHSEED=str(seed)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, seed in enumerate(salts())
    ]
    said = []
    for rank in ranks:
        try:
            out, errors = rank.communicate(timeout=200)
        finally:
            rank.kill()
        assert "equal" in out, errors[-2000:]
        said.append(out.split())
    assert said[0][1] != said[1][1], "the salts give one order"
    assert said[0][3] == "True"
    assert said[1][3] == str(shim or not is_affected(PATCH))


def salts() -> tuple[int, int]:
    """Two values of ``PYTHONHASHSEED`` that give the two orders."""
    code = "print(list({'sliding_attention', 'full_attention'})[0])"
    seen: dict[str, int] = {}
    for seed in range(1, 30):
        environment = dict(os.environ, PYTHONHASHSEED=str(seed))
        command = [sys.executable, "-S", "-c", code]  # not -I, which ignores the salt
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
        seen.setdefault(done.stdout, seed)
        if len(seen) == 2:
            break
    first, second = seen.values()
    return first, second
