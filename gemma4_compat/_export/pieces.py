"""The tensors of an exported adapter, made one after the other while they are written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._checkpoint import shards
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._export.plain import Module, instead


@dataclass(frozen=True)
class Piece:
    """One tensor: ``make()`` is it, of ``shape`` and of the torch dtype named ``dtype``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Any]


@dataclass(frozen=True)
class Written:
    """What a reader gets.

    Attributes:
        pieces: the tensors.
        config: ``adapter_config.json``; None for a reader with one file.
        command: what loads it; ``OUT`` stands for the folder.
        added: modules that the adapter has nothing for.
        notes: other things to know.
        warning: why no release of the reader loads it; empty where one does.
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
    """Raise ``Gemma4CompatError`` if there are any ``modules``, which ``reader`` cannot have for this ``reason``."""
    if found := list(modules):
        raise Gemma4CompatError(
            f"{reader} cannot have this adapter: {reason} ({len(found)} of its modules, such as {found[0].where!r}). "
            f"{instead(reader)}"
        )


def save(folder: Path, file: str, pieces: Sequence[Piece]) -> None:
    """Write the tensors into one safetensors file."""
    outputs = [shards.Output(piece.name, piece.dtype, piece.shape) for piece in pieces]
    values = {piece.name: lambda make=piece.make: iter((make(),)) for piece in pieces}
    (name,) = shards.write(folder, [outputs], values)
    (folder / name).rename(folder / file)


def save_json(folder: Path, file: str, data: Mapping[str, Any]) -> None:
    """Write a configuration."""
    shards.write_text(folder / file, json.dumps(data, indent=2) + "\n")


def number(value: float) -> float | int:
    """A whole number without a point, as configurations have them."""
    return int(value) if math.isfinite(value) and value == int(value) else value
