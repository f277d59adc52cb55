"""Which module of a model each key of an adapter file belongs to, whatever class and tool the file came from.

Plain names in, plain names out: no upstream library, no weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Translation:
    """Where the keys of an adapter go in one model.

    Attributes:
        names: key in the file -> the key PEFT itself would have written for this model (no adapter name in it).
        dead: keys of modules this model has no use for (k/v projections of KV-shared layers); dropping them is right.
        unmatched: keys that belong nowhere here.
    """

    names: Mapping[str, str]
    dead: tuple[str, ...]
    unmatched: tuple[str, ...]


def translate(keys: Iterable[str], modules: Collection[str]) -> Translation:
    """Find the module of each key.

    Args:
        keys: of an adapter file, such as ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``.
        modules: names of the base model's modules, without PEFT's prefix, as ``named_modules`` gives them.
    """
    raise NotImplementedError
