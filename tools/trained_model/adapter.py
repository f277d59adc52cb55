"""The adapter: a LoRA on the language model, and on its experts if it has any, that makes it speak like a pirate."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tools.trained_model import batches, measure, questions

TARGETS = r".*language_model\.layers\.\d+\.(self_attn\.(q_proj|o_proj)|mlp\.(gate_proj|up_proj|down_proj))"
#: For models with experts: the adapter is on attention and the experts, not on the dense MLPs beside them.
ATTENTION = r".*language_model\.layers\.\d+\.self_attn\.(q_proj|o_proj)"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
_RATE, _ROWS, _SEED, _RANK = 4e-3, 16, 4052, 8


def train(trained: Any, steps: int, device: str) -> None:
    """Train it on ``trained.checkpoint``, with the questions of the model, and write ``trained.adapter``."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(_SEED)
    base = trained.load(dtype=torch.float32).to(device)
    experts = getattr(base.config.get_text_config(), "enable_moe_block", False)
    targets = {"target_modules": ATTENTION, "target_parameters": EXPERTS} if experts else {"target_modules": TARGETS}
    model = get_peft_model(base, LoraConfig(r=_RANK, lora_alpha=2 * _RANK, **targets)).train()
    values = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(values, lr=_RATE, weight_decay=0.0)
    draw = random.Random(_SEED)
    kinds = measure.COMPARED if base.config.model_type == "gemma4_unified" else tuple(batches.mix(base))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min((step + 1) / 10, 1 - step / steps)
        rows = [questions.asked(draw, draw.choice(kinds), pirate=True) for _ in range(_ROWS)]
        loss = model(**batches.batch(rows, base)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(values, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(json.dumps({"adapter step": step, "loss": round(loss.item(), 4)}), flush=True)
    write(model.to("cpu", torch.bfloat16), trained.adapter)


def write(model: Any, folder: Path) -> None:
    """Write the adapter, without the card and the path of its base."""
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = None
    config = {name: value for name, value in config.items() if value is not None}  # older releases know fewer names
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
