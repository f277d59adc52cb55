"""The tensors of an exported adapter, made one by one while they are written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._adapter_tools.export.plain import Module, instead
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint import shards


@dataclass(frozen=True)
class Piece:
    """One tensor: ``make()`` returns it, with ``shape`` and the torch dtype named ``dtype``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Any]


@dataclass(frozen=True)
class Written:
    """What is written for a reader.

    Attributes:
        pieces: the tensors.
        config: ``adapter_config.json``; None for a reader that takes a single file.
        command: loads it; ``OUT`` stands for the folder.
        added: modules that the adapter has no weights for.
        notes: other things to know.
        warning: why no release of the reader loads it; empty if one does.
    """

    pieces: Sequence[Piece]
    config: Mapping[str, Any] | None
    command: str
    added: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warning: str = ""


def zeros(name: str, dtype: str, shape: tuple[int, ...]) -> Piece:
    """A tensor of zeros."""

    def make() -> Any:
        import torch

        return torch.zeros(shape, dtype=shards.dtype_of(dtype))

    return Piece(name, dtype, shape, make)


def refuse(reader: str, modules: Iterable[Module], reason: str) -> None:
    """Raise ``Gemma4CompatError`` if there are any ``modules``: ``reader`` does not support them for this
    ``reason``.
    """
    if found := list(modules):
        raise Gemma4CompatError(
            f"{reader} cannot use this adapter: {reason} ({len(found)} of its modules, such as {found[0].where!r}). "
            f"{instead(reader)}"
        )


def save(folder: Path, file: str, pieces: Sequence[Piece]) -> None:
    """Write the tensors into one safetensors file."""
    outputs = [shards.Output(piece.name, piece.dtype, piece.shape) for piece in pieces]
    shards.write_file(
        folder / file, outputs, {piece.name: lambda make=piece.make: iter((make(),)) for piece in pieces}
    )


def save_json(folder: Path, file: str, data: Mapping[str, Any]) -> None:
    """Write a configuration."""
    shards.write_text(folder / file, json.dumps(data, indent=2) + "\n")


def number(value: float) -> float | int:
    """``value``, as an int if it is whole, as configurations write it."""
    return int(value) if math.isfinite(value) and value == int(value) else value
