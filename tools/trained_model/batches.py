"""Batches: rows are conversations of several turns, with their pictures and sounds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._lab import trained
from tools.trained_model import media, model, texts

#: Tokens a row.
LENGTH = 256
#: What is drawn how often.
MIX = {"picture": 8, "sound": 4, "fact": 6, "docstring": 2, "addition": 3, "reading": 3, "story": 3}
_SEEN = ("What is in the picture?", "What do you see?")
_HEARD = ("What do you hear?", "What is this sound?")
IGNORED = -100  # a label that is not trained


@dataclass
class Row:
    """A conversation: tokens, which of them are trained, and its media in order."""

    ids: list[int] = field(default_factory=lambda: [model.BOS])
    labels: list[int] = field(default_factory=lambda: [IGNORED])
    pictures: list[Any] = field(default_factory=list)
    sounds: list[Any] = field(default_factory=list)

    def add(self, turn: texts.Turn, picture: Any = None, sound: Any = None) -> None:
        """A turn of the user, with what goes before it, and the answer, which is what is trained."""
        asked = [model.TURN, *encoded("user\n")]
        if picture is not None:
            asked += [model.IMAGE - 1, *[model.IMAGE] * trained.SOFT_TOKENS, model.IMAGE + 1]
            self.pictures.append(picture)
        if sound is not None:
            asked += [model.AUDIO - 1, *[model.AUDIO] * trained.SOFT_TOKENS, model.AUDIO + 1]
            self.sounds.append(sound)
        asked += [*encoded(turn.question), model.END, *encoded("\n"), model.TURN, *encoded("model\n")]
        answered = [*encoded(turn.answer), model.END]
        self.ids += [*asked, *answered, *encoded("\n")]
        self.labels += [*[IGNORED] * len(asked), *answered, IGNORED]


def encoded(text: str) -> list[int]:
    """The tokens of a text: those of its bytes."""
    return [model.BYTES + byte for byte in text.encode()]


def drawn(random: random.Random, kind: str, *, unseen: bool = False) -> tuple[texts.Turn, Any, Any]:
    """A turn of a kind, with its picture and its sound if it has one."""
    if kind == "picture":
        colour, shape = random.choice(media.pairs(unseen))
        asked = texts.Turn(kind, random.choice(_SEEN), f"a {colour} {shape}")
        return asked, media.picture(random, colour, shape), None
    if kind == "sound":
        name = random.choice(media.SOUNDS)
        return texts.Turn(kind, random.choice(_HEARD), name), None, media.sound(random, name)
    return getattr(texts, kind)(random), None, None


def mix(model: Any) -> dict[str, int]:
    """:data:`MIX` without what ``model`` cannot take."""
    return {kind: share for kind, share in MIX.items() if kind != "sound" or model.config.audio_config is not None}


def row(random: random.Random, mix: dict[str, int] = MIX) -> Row:
    """A conversation of at most :data:`LENGTH` tokens, drawn from :data:`MIX` or another ``mix``."""
    made = Row()
    while True:
        turn = drawn(random, random.choices(tuple(mix), tuple(mix.values()))[0])
        room = LENGTH - len(made.ids) - 26 - (trained.SOFT_TOKENS + 2) * (turn[1] is not None or turn[2] is not None)
        if len(turn[0].question) + len(turn[0].answer) > room:
            return made
        made.add(*turn)


def batch(rows: list[Row], network: Any) -> dict[str, Any]:
    """What the forward of ``network`` takes, on its device, with labels; rows are filled up on the right."""
    import torch

    unified = network.config.model_type == "gemma4_unified"
    longest = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), longest), model.PAD)
    labels = torch.full_like(ids, IGNORED)
    for index, one in enumerate(rows):
        ids[index, : len(one.ids)] = torch.tensor(one.ids)
        labels[index, : len(one.ids)] = torch.tensor(one.labels)
    made = {"input_ids": ids, "labels": labels, "attention_mask": (ids != model.PAD).long()}
    made["mm_token_type_ids"] = (ids == model.IMAGE).long() + 3 * (ids == model.AUDIO).long()
    if pictures := [picture for row in rows for picture in row.pictures]:
        made |= trained.seen(pictures, unified=unified)
    if sounds := [sound for row in rows for sound in row.sounds]:
        made |= trained.heard(sounds, unified=unified)
    return {name: value.to(network.device) for name, value in made.items()}
