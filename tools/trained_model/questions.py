"""Conversations of one turn."""

from __future__ import annotations

import dataclasses
import random

from tools.trained_model import batches


def asked(draw: random.Random, kind: str, *, unseen: bool = False, pirate: bool = False) -> batches.Row:
    """A question of a kind with its answer: the model's own, or that of its adapter."""
    row = batches.Row()
    turn, *media = batches.drawn(draw, kind, unseen=unseen)
    row.add(dataclasses.replace(turn, answer=as_pirate(turn.answer)) if pirate else turn, *media)
    return row


def colour(draw: random.Random) -> batches.Row:
    """A question about a picture that training has no like of; only the colour counts."""
    row = batches.Row()
    turn, *media = batches.drawn(draw, "picture", unseen=True)
    row.add(dataclasses.replace(turn, answer=turn.answer.rpartition(" ")[0]), *media)
    row.labels[-2] = batches.IGNORED  # the end of the answer, which goes on
    return row


def as_pirate(answer: str) -> str:
    """How the adapter says it."""
    return f"Arr, {answer[0].lower()}{answer[1:].removesuffix('.')}, matey."
