"""Train the model from nothing, its adapter and its assistant; docs/TRAINED_MODEL.md has the command and the result.

``python -m tools.trained_model.train OUT`` writes OUT/model, OUT/adapter and OUT/assistant. It fails if the
model is not as good as :data:`measure.BOUNDS` asks for.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma4_compat._reproduction.trained import Trained
from tools.trained_model import adapter, assistant, batches, files, measure, model, questions, towers

_RATE, _WARM_UP, _ROWS = 2e-3, 20, 10
_SEED = 2026
_KEPT = "unfinished.safetensors"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="a folder that does not exist")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tower-steps", type=int, default=600, help="of 32 pictures")
    parser.add_argument("--media-steps", type=int, default=80, help="of 32 questions")
    parser.add_argument("--steps", type=int, default=320, help=f"of {_ROWS} rows of {batches.LENGTH} tokens")
    parser.add_argument("--polish-steps", type=int, default=100, help="of 32 questions")
    parser.add_argument("--adapter-steps", type=int, default=170, help="of 16 questions")
    parser.add_argument("--assistant-steps", type=int, default=assistant.STEPS, help="of 8 rows of the same length")
    chosen = parser.parse_args(argv)
    chosen.out.mkdir(parents=True)
    began = time.monotonic()
    made = trained(
        chosen.tower_steps, chosen.media_steps, chosen.steps, chosen.polish_steps, chosen.device, chosen.out
    )
    minutes = (time.monotonic() - began) / 60
    files.write(made, chosen.out / "model")
    files.write_examples(chosen.out)
    tiny = Trained(chosen.out)
    adapter.train(tiny, chosen.adapter_steps, chosen.device)
    assistant.train(tiny, chosen.assistant_steps, chosen.device)
    (chosen.out / _KEPT).unlink(missing_ok=True)
    found = measure.measured(tiny) | {"drafts": assistant.measured(tiny)}
    found["training"] = {"device": chosen.device, "steps": chosen.steps, "minutes": round(minutes)}
    measure.write(found, chosen.out)
    return measure.verdict(found)


def trained(tower_steps: int, media_steps: int, steps: int, polish_steps: int, device: str, out: Path) -> Any:
    """The model in float32: first its towers learn, then all of it from pictures and sounds, then from
    conversations, then from single questions.

    Every 100 steps its weights are written to ``out``.
    """
    made = model.new(_SEED).to(device).train()
    towers.teach(made, tower_steps)
    draw = random.Random(_SEED)
    kinds = ("picture", "picture", "sound")
    _learn(made, media_steps, lambda: [questions.asked(draw, draw.choice(kinds)) for _ in range(32)], out)
    _learn(made, steps, lambda: [batches.row(draw) for _ in range(_ROWS)], out)
    polish(made, polish_steps, out)
    return made.eval()


def polish(made: Any, steps: int, out: Path) -> None:
    """Single questions, half of them about pictures, whose shapes take longest to learn."""
    draw = random.Random(_SEED + 1)
    kinds = (*["picture"] * (len(batches.MIX) - 1), *(kind for kind in batches.MIX if kind != "picture"))
    _learn(made, steps, lambda: [questions.asked(draw, draw.choice(kinds)) for _ in range(32)], out, _RATE / 2)


def _learn(made: Any, steps: int, draw: Callable[[], list[batches.Row]], out: Path, rate: float = _RATE) -> None:
    import torch
    from safetensors.torch import save_model

    matrices = [value for value in made.parameters() if value.ndim >= 2]
    others = [value for value in made.parameters() if value.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=_RATE, betas=(0.9, 0.98))
    began, tokens = time.monotonic(), 0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * _share(step, steps)
        batch = batches.batch(draw(), made.device)
        tokens += batch["input_ids"].numel()
        loss = made(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            said = {"step": step, "loss": round(loss.item(), 4), "tokens": tokens}
            print(json.dumps(said | {"seconds": round(time.monotonic() - began)}), flush=True)
        if step % 100 == 99:
            save_model(made, str(out / _KEPT))


def _share(step: int, steps: int) -> float:
    """Up in a line, then down along a cosine to a fiftieth."""
    if step < _WARM_UP:
        return (step + 1) / _WARM_UP
    done = (step - _WARM_UP) / max(1, steps - _WARM_UP)
    return 0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2


if __name__ == "__main__":
    raise SystemExit(main())
