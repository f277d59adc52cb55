"""The towers learn first: what is in a picture and in a sound, read off their soft tokens by linear heads.

A language model learns to look at soft tokens only once they tell something. The heads are thrown away. Those of the
12B, whose embedders are linear themselves, have three layers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from gemma4_compat._lab import trained
from tools.trained_model import media
from tools.trained_model import model as tokens

_RATE, _ROWS, _SEED = 4e-3, 32, 11
_PARTS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")


def teach(model: Any, steps: int) -> None:
    """Train the towers or embedders and the projections to the language model's width."""
    _taught(model.model.get_image_features, (len(media.COLOURS), len(media.SHAPES)), _pictures, model, steps)
    if model.config.audio_config is not None:
        sounds = steps if _unified(model) else steps // 8
        _taught(model.model.get_audio_features, (len(media.SOUNDS),), _sounds, model, sounds)


def _taught(
    features: Callable[..., Any], classes: tuple[int, ...], draw: Callable[..., Any], model: Any, steps: int
) -> None:
    import torch

    torch.manual_seed(_SEED)
    width = model.config.get_text_config().hidden_size
    unified = _unified(model)
    head = _deep(width, sum(classes)) if unified else torch.nn.Linear(width, sum(classes))
    head.to(model.device)
    parts = [getattr(model.model, name, None) for name in _PARTS]
    values = [value for part in (*parts, head) if part is not None for value in part.parameters()]
    optimizer = torch.optim.AdamW(values, lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    chance = random.Random(_SEED)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min((step + 1) / 20, 1 - step / steps)
        batch, labels = draw(chance, unified)
        soft = features(**{name: value.to(model.device) for name, value in batch.items()}).pooler_output
        soft = torch.stack(list(soft)).float()
        # Each soft token tells it: a sum over them is what attention reads.
        scores = head(soft if unified else soft.mean(1)).split(classes, dim=-1)
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


def teach_through(model: Any, steps: int) -> None:
    """Train all weights of a model without towers to recognize pictures and sounds.

    A linear head reads the last hidden state of a prompt that has soft tokens and no text.
    """
    import torch
    from torch.nn.functional import cross_entropy

    torch.manual_seed(_SEED)
    classes = (len(media.COLOURS), len(media.SHAPES), len(media.SOUNDS))
    head = torch.nn.Linear(model.config.get_text_config().hidden_size, sum(classes)).to(model.device)
    values = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(values, lr=_RATE / 4, betas=(0.9, 0.98), weight_decay=0.01)
    chance = random.Random(_SEED)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE / 4 * min((step + 1) / 20, 1 - step / steps)
        scores: list[Any] = []
        labels: list[Any] = []
        for token, number, draw in ((tokens.IMAGE, 1, _pictures), (tokens.AUDIO, 3, _sounds)):
            batch, drawn = draw(chance, True)
            ids = torch.tensor([[tokens.BOS, token - 1, *[token] * trained.SOFT_TOKENS, token + 1]] * _ROWS)
            given = {"input_ids": ids, "mm_token_type_ids": number * (ids == token).long(), **batch}
            read = model.model(**{name: value.to(model.device) for name, value in given.items()})
            found = head(read.last_hidden_state[:, -1]).split(classes, dim=-1)
            scores += found[:2] if number == 1 else found[2:]
            labels += [label.to(model.device) for label in drawn]
        loss = sum(cross_entropy(score, label) for score, label in zip(scores, labels, strict=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == steps - 1:
            pairs = zip(scores, labels, strict=True)
            right = [round((score.argmax(-1) == label).float().mean().item(), 2) for score, label in pairs]
            print(json.dumps({"through the language model": step, "right": right}), flush=True)


def _unified(model: Any) -> bool:
    return bool(model.config.model_type == "gemma4_unified")


def _deep(width: int, classes: int) -> Any:
    """What the language model can do with the soft tokens: something with each, then with all."""
    from torch.nn import GELU, Flatten, Linear, Sequential

    each, together = Linear(width, width), Linear(trained.SOFT_TOKENS * width, width)
    return Sequential(each, GELU(), Flatten(), together, GELU(), Linear(width, classes))


def _pictures(chance: random.Random, unified: bool) -> tuple[dict[str, Any], list[Any]]:
    import torch

    drawn = [chance.choice(media.pairs(unseen=False)) for _ in range(_ROWS)]
    colours = [list(media.COLOURS).index(colour) for colour, _ in drawn]
    shapes = [media.SHAPES.index(shape) for _, shape in drawn]
    batch = trained.seen([media.picture(chance, *one) for one in drawn], unified=unified)
    return batch, [torch.tensor(colours), torch.tensor(shapes)]


def _sounds(chance: random.Random, unified: bool) -> tuple[dict[str, Any], list[Any]]:
    import torch

    names = [chance.choice(media.SOUNDS) for _ in range(_ROWS)]
    batch = trained.heard([media.sound(chance, name) for name in names], unified=unified)
    return batch, [torch.tensor([media.SOUNDS.index(name) for name in names])]
