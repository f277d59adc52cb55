"""Fit an adapter from another class or tool to a Gemma 4 model; both loaders (PEFT's, transformers') use this.

The file determines which layers an adapter is for; its config only has the names they had in training. So if the keys
had to be translated, the config is changed to target the layers that the file has weights for.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters import clipped, matching, translation
from gemma4_compat._gemma4.adapters.translation import PREFIX, Translation

_SHOWN = 3
#: Parts after a module's name that a tuner's layer does not have: trained copies, biases, rows of an embedding.
_NOT_TUNED = {
    *("weight", "bias", "modules_to_save", "original_module", "token_adapter"),
    *("input_min", "input_max", "output_min", "output_max"),
}


@dataclass(frozen=True)
class Loading:
    """The adapter being loaded: its name or folder, the keys of its file, and the results of :func:`translate`.

    ``shapes`` are those of the weights in the file, by key, as far as known. ``created`` are the layers created
    without values, in the order of the tuners that did so.
    """

    source: str
    keys: tuple[str, ...]
    found: dict[tuple[Sequence[str], Sequence[str]], Translation] = field(default_factory=dict, compare=False)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    created: list[Any] = field(default_factory=list, compare=False)


_loading: ContextVar[Loading | None] = ContextVar("_loading", default=None)


def loading(source: Any, keys: Iterable[str]) -> contextlib.AbstractContextManager[None]:
    """Inside, the adapter being loaded has these keys (if a mapping: with shapes) in its file."""
    shapes = keys if isinstance(keys, Mapping) else {}
    return in_place.bound(_loading, Loading(str(source), tuple(keys), shapes=shapes))


def being_loaded() -> Loading | None:
    """The adapter of the innermost :func:`loading`."""
    return _loading.get()


def base_of(model: Any) -> Any:
    """The model inside a PEFT model, or ``model``. PEFT's own method needs the active adapter, which may be deleted,
    and a mixed model has no such method.
    """
    if not any(kind.__module__ in ("peft.peft_model", "peft.mixed_model") for kind in type(model).__mro__):
        return model
    inner = model.base_model
    return inner.model if type(inner).__module__.startswith("peft.") else inner


def modules_of(model: Any) -> tuple[str, ...]:
    """Names of the base model's modules, without adapter modules."""
    return tuple(_names(base_of(model)))


def _names(root: Any) -> Iterator[str]:
    waiting = [("", root)]
    while waiting:
        name, module = waiting.pop()
        while type(module).__module__.startswith("peft."):
            inner = module._modules.get("base_layer", module._modules.get("original_module"))
            if inner is None:
                break
            module = inner
        yield name
        if module._modules:  # most modules have none
            children, prefix = dict(module.named_children()), f"{name}." if name else ""
            waiting += [(prefix + key, children[key]) for key in reversed(children)]


def translate(keys: Iterable[str], model: Any) -> Translation:
    """:func:`translation.translate` for the modules of ``model``, cached while an adapter is loaded."""
    given = tuple(keys), modules_of(model)
    adapter = being_loaded()
    known: dict[Any, Translation] = {} if adapter is None else adapter.found
    if given not in known:
        known[given] = translation.translate(*given)
    return known[given]


def shapes_in(
    source: Any, *, read: Callable[[], dict[str, Any]], subfolder: str | None = None
) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of an adapter's file: from the header of a local safetensors file, else from ``read``."""
    file = Path(str(source), subfolder or "", "adapter_model.safetensors")
    if not file.is_file():
        return shapes_of(read())
    from safetensors import safe_open

    with safe_open(file, framework="pt") as saved:
        return {key: tuple(saved.get_slice(key).get_shape()) for key in saved.keys()}  # noqa: SIM118  # not a dict


def shapes_of(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of weights by key."""
    return {key: tuple(getattr(value, "shape", ())) for key, value in weights.items()}


def nothing_matched(source: Any, model: Any, keys: Sequence[str]) -> Gemma4CompatError:
    """The error for an adapter without a single key for this model."""
    name = type(base_of(model)).__name__
    here = next((module for module in modules_of(model) if module.endswith("q_proj")), "")
    return Gemma4CompatError(
        f"the adapter {str(source)!r} has no weights for {name}: none of its {len(keys)} keys belongs to a layer of "
        f"this model. They look like {keys[0]!r}; a layer here is {here!r}. Was it made for another model? The model "
        "was not changed."
    )


def warn_of_unmatched(source: Any, model: Any, unmatched: Sequence[str], total: int) -> None:
    """Warn once about keys that were not loaded."""
    if not unmatched:
        return
    shown = ", ".join(repr(key) for key in unmatched[:_SHOWN])
    notice.warn_user(
        f"{len(unmatched)} of {total} keys of the adapter {str(source)!r} belong to no layer of "
        f"{type(base_of(model)).__name__} and were not loaded: {shown}{', ...' if len(unmatched) > _SHOWN else ''}. "
        "The rest was loaded."
    )


def fit(config: Any, model: Any, keys: Iterable[str]) -> None:
    """Rewrite ``config`` in place to target the layers that the file with these keys has weights for.

    Does nothing if the keys need no translation. An attribute that matches the same layers here is kept.

    Args:
        config: a PEFT config with resolved targets.
        model: the base model the adapter goes into.
        keys: of the adapter's file.
    """
    found = translate(keys, model)
    if found.is_identity or not found.modules:
        return
    modules = modules_of(model)
    written = {here: there for there, here in found.modules.values()}
    tuned = {found.modules[key][1] for key, name in found.names.items() if key in found.modules and _tuned(found, key)}
    copies = {found.modules[key][1] for key in found.modules} - tuned
    _fit_copies(config, modules, copies)
    tuned -= _fit_parameters(config, model, modules, tuned)
    if not tuned or not getattr(config, "target_modules", None):
        return
    if _targeted(config, model, modules) != tuned:
        config.target_modules = set(tuned)
        for attribute in ("layers_to_transform", "layers_pattern"):
            if getattr(config, attribute, None):
                setattr(config, attribute, None)
        if getattr(config, "exclude_modules", None) and _targeted(config, model, modules) != tuned:
            config.exclude_modules = None
    _fit_feedforward(config, tuned, written)
    for attribute in ("rank_pattern", "alpha_pattern"):
        if patterns := getattr(config, attribute, None):
            setattr(config, attribute, _fit_patterns(patterns, tuned, written, modules))


def _tuned(found: Translation, key: str) -> bool:
    """Whether the key belongs to a tuner's layer, not to a trained copy, a bias, or rows of an embedding."""
    rest = found.names[key][len(PREFIX) + len(found.modules[key][1]) + 1 :].split(".")
    own = [part for part in rest if part != "base_layer"]
    return bool(own) and own[0] not in _NOT_TUNED


def _targeted(config: Any, model: Any, modules: Iterable[str]) -> set[str]:
    resolved = copy.deepcopy(config)
    clipped.redirect(resolved, base_of(model))
    return matching.targeted(resolved, filter(None, modules))


def _fit_copies(config: Any, modules: Sequence[str], copies: set[str]) -> None:
    """Fit trained copies of modules (``modules_to_save``) and trained rows of embeddings."""
    names = getattr(config, "modules_to_save", None)
    if names:
        matched = {name for name in modules if any(name.endswith(saved) for saved in names)}
        kept = {name for name in matched if any(f"{saved}.".startswith(f"{name}.") for saved in copies)}
        moved = {translation.module_name(saved, modules) for saved in names} - {None}
        if matched != kept or not moved <= kept:
            # a list stays a list, because it is saved
            config.modules_to_save = sorted(kept | {name for name in moved if name is not None})
    rows = getattr(config, "trainable_token_indices", None)
    if isinstance(rows, dict):
        config.trainable_token_indices = {
            name if any(f".{module}".endswith(f".{name}") for module in modules) else moved_to or name: value
            for name, value in rows.items()
            for moved_to in [translation.module_name(name, modules)]
        }


def _fit_parameters(config: Any, model: Any, modules: Sequence[str], tuned: set[str]) -> set[str]:
    """Fit ``target_parameters``; returns the modules that have one of them."""
    names = getattr(config, "target_parameters", None)
    if not names:
        return set()
    owners: dict[str, str] = {}
    parameters = [name.replace(".base_layer", "") for name, _ in base_of(model).named_parameters()]
    moved = [_moved_parameter(name, modules) for name in names]
    for parameter in parameters:
        owner = parameter.rpartition(".")[0]
        if owner in tuned and any(f".{parameter}".endswith(f".{name}") for name in moved):
            owners[parameter] = owner
    matched = {parameter for parameter in parameters if any(f".{parameter}".endswith(f".{name}") for name in names)}
    if matched != set(owners):
        config.target_parameters = sorted(owners)
    return set(owners.values())


def _moved_parameter(name: str, modules: Sequence[str]) -> str:
    module, _, parameter = name.rpartition(".")
    found = translation.module_name(module, modules) if module else None
    return f"{found}.{parameter}" if found else name


def _fit_feedforward(config: Any, tuned: set[str], written: dict[str, str]) -> None:
    feedforward = getattr(config, "feedforward_modules", None)
    if not feedforward:
        return
    wanted = {name for name in tuned if matching.names_module(feedforward, written[name])}
    if wanted != {name for name in tuned if matching.names_module(feedforward, name)}:
        config.feedforward_modules = wanted


def _fit_patterns(
    patterns: dict[str, Any], tuned: set[str], written: dict[str, str], modules: Sequence[str]
) -> dict[str, Any]:
    """``rank_pattern`` or ``alpha_pattern`` that gives each layer the value of its name in the file."""
    if all(isinstance(value, list) for value in patterns.values()):  # AdaLoRA: the remaining ranks by parameter
        names = translation.translate([PREFIX + name for name in patterns], modules).names
        return {
            names.get(PREFIX + name, PREFIX + name).removeprefix(PREFIX): value for name, value in patterns.items()
        }
    values = {name: matching.value_for(patterns, written[name]) for name in tuned}
    if all(matching.value_for(patterns, name) == value for name, value in values.items()):
        return patterns
    return {re.escape(name): value for name, value in sorted(values.items()) if value is not None}
