"""Train the model from nothing, its adapter and its assistant; docs/TRAINED_MODEL.md has the command and the result.

``python -m tools.trained_model.train OUT`` writes OUT/model, OUT/adapter and OUT/assistant. With ``--kind`` it trains
a twin of another kind, which has no assistant. It fails if the model is not as good as :data:`measure.BOUNDS` asks.
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

from gemma4_compat._lab.trained import Trained
from tools.trained_model import adapter, assistant, batches, files, kinds, measure, model, questions, towers

_RATE, _WARM_UP, _ROWS = 2e-3, 20, 10
_SEED = 2026
#: How many steps each kind takes of what :func:`trained` does, and of its adapter's.
STEPS = {
    "E2B": {
        "tower_steps": 600,
        "media_steps": 80,
        "steps": 320,
        "through_steps": 0,
        "polish_steps": 100,
        "last_steps": 0,
        "adapter_steps": 170,
    },
    "12B": {
        "tower_steps": 600,
        "media_steps": 150,
        "steps": 600,
        "through_steps": 400,
        "polish_steps": 120,
        "last_steps": 200,
        "adapter_steps": 200,
    },
    "26B-A4B": {
        "tower_steps": 1500,
        "media_steps": 150,
        "steps": 700,
        "through_steps": 0,
        "polish_steps": 0,
        "last_steps": 0,
        "adapter_steps": 300,
    },
}
_KEPT = "unfinished.safetensors"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="a folder that does not exist")
    parser.add_argument("--kind", choices=kinds.NAMES, default=kinds.NAMES[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tower-steps", type=int, help="of 32 pictures")
    parser.add_argument("--media-steps", type=int, help="of 32 questions")
    parser.add_argument("--steps", type=int, help=f"of {_ROWS} rows of {batches.LENGTH} tokens")
    parser.add_argument("--through-steps", type=int, help="of 32 pictures and 32 sounds")
    parser.add_argument("--polish-steps", type=int, help="of 32 questions")
    parser.add_argument("--last-steps", type=int, help="of 32 questions, nearly all about pictures and sounds")
    parser.add_argument("--adapter-steps", type=int, help="of 16 questions")
    parser.add_argument("--assistant-steps", type=int, default=assistant.STEPS, help="of 8 rows of the same length")
    kind = parser.parse_known_args(argv)[0].kind
    parser.set_defaults(**STEPS[kind])
    chosen = parser.parse_args(argv)
    chosen.out.mkdir(parents=True)
    began = time.monotonic()
    made = trained(chosen.kind, {name: vars(chosen)[name] for name in STEPS[kind]}, chosen.device, chosen.out)
    minutes = (time.monotonic() - began) / 60
    files.write(made, chosen.out / "model")
    files.write_examples(chosen.out)
    tiny = Trained(chosen.out)
    adapter.train(tiny, chosen.adapter_steps, chosen.device)
    (chosen.out / _KEPT).unlink(missing_ok=True)
    found = measure.measured(tiny)
    if chosen.kind == kinds.NAMES[0]:
        assistant.train(tiny, chosen.assistant_steps, chosen.device)
        found["drafts"] = assistant.measured(tiny)
    found["training"] = {"device": chosen.device, "steps": chosen.steps, "minutes": round(minutes)}
    measure.write(found, chosen.out)
    return measure.verdict(found)


def trained(kind: str, steps: dict[str, int], device: str, out: Path) -> Any:
    """The model in float32: first its towers learn, then all of it from pictures and sounds, then from
    conversations, then from single questions, in so many ``steps`` (one of :data:`STEPS`).

    Without towers, the language model itself has to recognize pictures and sounds. Prompts of soft tokens without text
    teach it that before the single questions, most of which are then about pictures and sounds.

    Every 100 steps its weights are written to ``out``.
    """
    made = model.new(_SEED, kind).to(device).train()
    towers.teach(made, steps["tower_steps"])
    draw, mix = random.Random(_SEED), batches.mix(made)
    asked = tuple(one for one in ("picture", "picture", "sound") if one in mix)
    _learn(made, steps["media_steps"], lambda: [questions.asked(draw, draw.choice(asked)) for _ in range(32)], out)
    _learn(made, steps["steps"], lambda: [batches.row(draw, mix) for _ in range(_ROWS)], out)
    if steps["through_steps"]:
        towers.teach_through(made, steps["through_steps"])
    polish(made, steps["polish_steps"], out)
    draw = random.Random(_SEED + 2)
    asked = (*["picture"] * 5, *["sound"] * 4, "fact", "docstring")
    _learn(
        made,
        steps["last_steps"],
        lambda: [questions.asked(draw, draw.choice(asked)) for _ in range(32)],
        out,
        _RATE / 2,
    )
    return made.eval()


def polish(made: Any, steps: int, out: Path) -> None:
    """Single questions, half of them about pictures, whose shapes take longest to learn.

    A model without towers is asked about pictures and sounds in most of them, and tells no stories, which are long.
    """
    draw, mix = random.Random(_SEED + 1), batches.mix(made)
    asked = (*["picture"] * (len(mix) - 1), *(kind for kind in mix if kind != "picture"))
    if made.config.model_type == "gemma4_unified":
        asked = (*["picture"] * 5, *["sound"] * 3, *["fact"] * 2, "docstring", "addition", "reading")
    _learn(made, steps, lambda: [questions.asked(draw, draw.choice(asked)) for _ in range(32)], out, _RATE / 2)


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
        batch = batches.batch(draw(), made)
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
