"""Translate the keys of an adapter file to a model of another Gemma 4 class, or from another tool.

Works on plain names: no upstream library, no weights, no list of tuners. A key consists of the longest path of modules
that the model has, followed by a parameter of the tuner.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

#: PEFT's prefix of the base model's names.
PREFIX = "base_model.model."
#: Containers at the start of a name; classes differ in which of them they have, and in their order.
_CONTAINERS = frozenset({"base_model", "model", "language_model", "text_model", "module"})
#: Wrappers of torch.compile, FSDP and activation checkpointing, anywhere in a name.
_TRANSPARENT = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: The layer inside a clipped linear, and the names of the wrapper itself.
INNER = "linear"
_OF_WRAPPERS = frozenset({"input_min", "input_max", "output_min", "output_max", "modules_to_save"})
#: Modules that KV-shared layers have only in some releases; they are never used.
_SHARED = frozenset({"k_proj", "v_proj", "k_norm", "v_norm"})
_OWN = frozenset({"weight", "bias"})
#: A child without weights: the only child of the experts, which hold their weights as their own parameters.
_ACTIVATION = "act_fn"
#: PEFT's names for a trained copy of a module, and for trained rows of an embedding.
_COPY, _TOKENS = "modules_to_save", "token_adapter"


@dataclass(frozen=True)
class Translation:
    """The keys of an adapter, translated for one model.

    Attributes:
        names: key in the file -> the key PEFT itself would have written for this model (no adapter name in it).
        unused: keys of modules that this model never uses (k/v projections of KV-shared layers), safe to drop.
        unmatched: keys that belong to no module of this model.
        modules: key in ``names`` -> (module in the file, module in this model); keys without a module are left out.
    """

    names: Mapping[str, str]
    unused: tuple[str, ...]
    unmatched: tuple[str, ...]
    modules: Mapping[str, tuple[str, str]]

    @property
    def is_identity(self) -> bool:
        """Whether PEFT would have written the same keys for this model."""
        return not self.unused and not self.unmatched and all(key == name for key, name in self.names.items())


def translate(keys: Iterable[str], modules: Collection[str]) -> Translation:
    """Find the module of each key.

    It accepts keys from every Gemma 4 class (``Gemma4ForCausalLM``, ``Gemma4ForConditionalGeneration``, the bare
    models, the unified classes), with PEFT's prefix missing, doubled or incomplete, in the old order
    ``language_model.model``, with the adapter's name left in, on a clipped linear or on its inner ``.linear``. If two
    keys mean the same tensor, the one that needs no translation wins and the other is ``unmatched``.

    Args:
        keys: of an adapter file, such as ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``.
        modules: names of the base model's modules, without PEFT's prefix and without what PEFT itself put there, as
            ``named_modules`` gives them.
    """
    here = _Modules(modules)
    places = {key: here.find(key) for key in keys}
    leaves = [place for place in places.values() if place.is_leaf]
    adapter = _adapter_name(leaves)
    parameters = {place.parameter for place in leaves} | {_COPY}
    names: dict[str, str] = {}
    owners: dict[str, tuple[str, str]] = {}
    unused: list[str] = []
    unmatched: list[str] = []
    for key, place in places.items():
        if place.module is None:
            if len(place.rest) in (1, 2):  # without a module, like vera_A and prompt_embeddings
                names[key] = key
            else:
                unmatched.append(key)
        elif here.is_unused(place):
            unused.append(key)
        elif not place.is_leaf and len(place.rest) != 1 and place.parameter not in parameters:
            unmatched.append(key)  # this model lacks its module
        else:
            names[key] = ".".join((PREFIX + place.module, *_without_adapter(place.rest, adapter)))
            owners[key] = place.written, place.module
    taken = {key for key, name in names.items() if key == name}
    for key, name in [item for item in names.items() if item[0] != item[1]]:
        if name in taken:
            del names[key], owners[key]
            unmatched.append(key)
        taken.add(name)
    return Translation(names, tuple(unused), tuple(unmatched), owners)


def module_name(name: str, modules: Collection[str]) -> str | None:
    """The name in this model of a module of another class; None if there is no such module."""
    place = _Modules(modules).find(name)
    return None if place.rest else place.module


@dataclass(frozen=True)
class _Place:
    """A parsed key: the module in this model (None: no module), its name in the file, and the rest of the key."""

    module: str | None
    written: str
    rest: tuple[str, ...]
    is_leaf: bool

    @property
    def parameter(self) -> str:
        """The tuner's parameter (``lora_A``); an empty string for a weight of the module itself."""
        own = [part for part in self.rest if part != "base_layer"]
        return "" if not own or own[0] in _OWN else own[0]


class _Modules:
    """A model's modules by the part of their names that all classes have in common."""

    def __init__(self, modules: Collection[str]) -> None:
        self._names: dict[tuple[str, ...], str] = {}
        for name in modules:
            path = shared_part(name)
            if path:
                self._names.setdefault(path, name)
        self._parents = {path[:-1] for path in self._names if path[-1] != _ACTIVATION}

    def find(self, key: str) -> _Place:
        path = shared_part(key)
        depth = next((n for n in range(len(path), 0, -1) if path[:n] in self._names), 0)
        if not depth:
            return _Place(None, "", path, False)
        module, rest = path[:depth], path[depth:]
        inner = (*module, INNER)
        if inner in self._names and rest and rest[0] not in _OF_WRAPPERS:
            module = inner
        is_leaf = module not in self._parents or inner in self._names
        is_leaf &= not (rest and rest[0].isdigit())  # one module of a list that is a single module here
        if is_leaf and rest[1:] and rest[0] == INNER:  # no clipped linear here
            rest = rest[1:]
        parts = [part for part in key.removeprefix(PREFIX).split(".") if part not in _TRANSPARENT]
        written = ".".join(parts[: len(parts) - len(rest)])
        return _Place(self._names[module], written, rest, is_leaf)

    def is_unused(self, place: _Place) -> bool:
        """Whether the key belongs to a k/v projection (or norm) in a layer without one: a KV-shared layer."""
        path = shared_part(place.module or "")
        if not (path and path[-1] == "self_attn" and place.rest and place.rest[0] in _SHARED):
            return False
        return not any((*path, name) in self._names for name in ("k_proj", "v_proj"))


def shared_part(name: str) -> tuple[str, ...]:
    """The parts of a module's name that all classes have in common, without the containers it starts with."""
    parts = [part for part in name.split(".") if part and part not in _TRANSPARENT]
    start = next((n for n, part in enumerate(parts) if part not in _CONTAINERS), len(parts))
    return tuple(parts[start:])


def _adapter_name(places: Iterable[_Place]) -> str | None:
    """The adapter's name if it was left in the keys: the part that follows the parameter in all of them.

    A name other than ``default`` must be followed by another part; otherwise ``scale`` in ``some_tuner.scale`` would
    count as one.
    """
    found: set[str] = set()
    followed = False
    for place in places:
        if place.parameter and place.parameter != _COPY:
            rest = place.rest[place.rest.index(place.parameter) + (2 if place.parameter == _TOKENS else 1) :]
            found.add(rest[0] if rest else "")
            followed |= len(rest) > 1
    (name,) = found if len(found) == 1 else ("",)
    if name != "default" and (not followed or name in _OWN or name.isdigit()):
        return None
    return name or None


def _without_adapter(rest: tuple[str, ...], adapter: str | None) -> tuple[str, ...]:
    """The rest of a key without the adapter's name and without PEFT's name for a trained copy."""
    if rest and rest[0] == _COPY:
        rest = rest[1:]
        known = {adapter, "default"}
        return rest[1:] if len(rest) > 1 and rest[0] in known else rest
    kept = list(itertools.takewhile(lambda part: part == "base_layer", rest))
    own = list(rest[len(kept) :])
    at = 2 if own and own[0] == _TOKENS else 1
    if adapter is not None and len(own) > at and own[at] == adapter:
        del own[at]
    return (*kept, *own)
