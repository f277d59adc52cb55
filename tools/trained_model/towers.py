"""The towers learn first: what is in a picture and in a sound, read off their soft tokens by linear heads.

A language model learns to look at soft tokens only once they tell something. The heads are thrown away.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from gemma4_compat._reproduction import trained
from tools.trained_model import media

_RATE, _ROWS, _SEED = 4e-3, 32, 11


def teach(model: Any, steps: int) -> None:
    """Train both towers and the projections to the language model's width."""
    _taught(model.model.get_image_features, (len(media.COLOURS), len(media.SHAPES)), _pictures, model, steps)
    _taught(model.model.get_audio_features, (len(media.SOUNDS),), _sounds, model, steps // 8)


def _taught(
    features: Callable[..., Any], classes: tuple[int, ...], draw: Callable[..., Any], model: Any, steps: int
) -> None:
    import torch

    torch.manual_seed(_SEED)
    width = model.config.get_text_config().hidden_size
    head = torch.nn.Linear(width, sum(classes), device=model.device)
    parts = model.model
    values = [
        value
        for part in (parts.vision_tower, parts.audio_tower, parts.embed_vision, parts.embed_audio, head)
        for value in part.parameters()
    ]
    optimizer = torch.optim.AdamW(values, lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    chance = random.Random(_SEED)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min((step + 1) / 20, 1 - step / steps)
        batch, labels = draw(chance)
        soft = features(**{name: value.to(model.device) for name, value in batch.items()}).pooler_output
        soft = torch.stack(list(soft)).float()
        # Each soft token tells it: a sum over them is what attention reads.
        scores = head(soft.mean(1)).split(classes, dim=-1)
        pairs = list(zip(scores, labels, strict=True))
        loss = sum(torch.nn.functional.cross_entropy(score, label.to(model.device)) for score, label in pairs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == steps - 1:
            right = [
                round((score.argmax(-1) == label.to(model.device)).float().mean().item(), 2) for score, label in pairs
            ]
            print(json.dumps({"towers": draw.__name__.strip("_"), "step": step, "right": right}), flush=True)


def _pictures(chance: random.Random) -> tuple[dict[str, Any], list[Any]]:
    import torch

    drawn = [chance.choice(media.pairs(unseen=False)) for _ in range(_ROWS)]
    colours = [list(media.COLOURS).index(colour) for colour, _ in drawn]
    shapes = [media.SHAPES.index(shape) for _, shape in drawn]
    batch = trained.seen([media.picture(chance, *one) for one in drawn])
    return batch, [torch.tensor(colours), torch.tensor(shapes)]


def _sounds(chance: random.Random) -> tuple[dict[str, Any], list[Any]]:
    import torch

    names = [chance.choice(media.SOUNDS) for _ in range(_ROWS)]
    return trained.heard([media.sound(chance, name) for name in names]), [
        torch.tensor([media.SOUNDS.index(name) for name in names])
    ]
