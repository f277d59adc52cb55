"""Loads a checkpoint under DeepSpeed's ZeRO-3 on the CPU, in one process, and says what differs from a plain load."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}

import gemma4_compat  # noqa: E402, F401  # isort: skip
import deepspeed  # noqa: E402
import torch  # noqa: E402
from transformers import Gemma4ForConditionalGeneration  # noqa: E402
from transformers.integrations import HfDeepSpeedConfig  # noqa: E402


def main(checkpoint: str) -> None:
    plain = Gemma4ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    deepspeed.init_distributed("gloo")
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    model = Gemma4ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    assert config.is_zero3()
    found: dict[str, list[str]] = {"buffers": [], "parameters": []}
    for (name, one), (_, other) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        if not torch.equal(one.float(), other.float()):
            found["buffers"].append(name)
    for (name, one), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        with deepspeed.zero.GatheredParameters(other):
            if not torch.equal(one, other.detach()):
                found["parameters"].append(name)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
