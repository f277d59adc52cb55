"""The old names of a text model's configuration can be read and set: ``head_dim``, ``global_head_dim`` and so on.

Symptom: ``AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute and may vary across layers``, or
``AmbiguousGlobalPerLayerAttributeError: 'num_key_value_heads' is a per-layer attribute``, from ``config.head_dim``,
and from ``getattr(config, "head_dim", None)`` and ``hasattr`` as well. ``AttributeError: 'Gemma4TextConfig' object has
no attribute 'global_head_dim'``.

Cause: transformers 5.15.0 stores settings that differ between layers per layer. Reading one without a layer raises a
``RuntimeError``, which neither a default nor ``hasattr`` catches. ``global_head_dim`` and
``num_global_key_value_heads`` are gone. Other software reads all four, as in every earlier release.

Fix: The names have the values of ``config.json`` again: ``head_dim`` and ``num_key_value_heads`` are those of sliding
attention, the other two those of full attention. Setting a value sets it for these layers. If full-attention layers
differ from each other, or ``allow_global_per_layer_attribute_access`` was set to False, the error is also an
``AttributeError``.

Remove when: ``getattr(config, "head_dim", None)`` and ``global_head_dim`` of a Gemma 4's text model are numbers in all
supported releases.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from gemma4_compat._gemma4.models import config_names
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F96", severity="crash", affected=">=5.15.0")

_SWITCH = "allow_global_per_layer_attribute_access"
_as_upstream: ContextVar[bool] = ContextVar("gemma4_compat_config_reads", default=False)
_known: dict[type, frozenset[str]] = {}  # by class of a configuration, the names that may be more than missing


def switch(original: Original, self: Any) -> Any:
    """Transformers asks this where a name is read in which layers differ, and for no other name."""
    if (allowed := original(self)) or _as_upstream.get():
        return allowed
    if not self.per_layer_attributes <= _known.get(type(self), frozenset()):
        _know(type(self), {*config_names.NAMES, *self.per_layer_attributes})
    raise AttributeError(_SWITCH)  # Python asks `__getattr__` now, for the name that was read


def missing(original: Original, self: Any, key: str) -> Any:
    """``__getattr__``: what Python asks only after a read has failed. Every forward reads names that are not there."""
    kind = type(self)
    if kind not in _known:
        _know(kind, config_names.NAMES)
    if key in _known[kind]:
        return _found(original, self, self.attribute_map.get(key, key))
    raise AttributeError(f"{kind.__name__!r} object has no attribute {key!r}")


vars(missing)["known"] = _known  # once a class is in it, only its names lead here


def _know(kind: type, names: Iterable[str]) -> None:
    _known[kind] = frozenset({*dir(kind), *names, *_known.get(kind, ())})


def _found(original: Original, self: Any, key: str) -> Any:
    if key == _SWITCH:
        return vars(self).get(_SWITCH, False)
    if key in config_names.NAMES and key in (found := config_names.of(self)):
        return found[key]
    by_layer = vars(self).get("_heterogeneity_spec")
    if by_layer is None or key not in by_layer.per_layer_attributes:
        return original(self, key)
    if _is_said(self):
        return vars(self)[key]
    token = _as_upstream.set(True)
    try:
        return original(self, key)
    except _ambiguous() as error:
        raise _missing()(*error.args) from None
    finally:
        _as_upstream.reset(token)


def write(original: Original, self: Any, key: str, value: Any) -> None:
    if key in config_names.NAMES and key in config_names.of(self):
        config_names.set_on(self, key, value)
        return
    original(self, key, value)


def keys(original: Callable[..., Iterator[str]], self: Any) -> Iterator[str]:
    """Used by ``in``."""
    found = dict.fromkeys(original(self))
    if _is_said(self):
        found |= dict.fromkeys([*self.per_layer_attributes, *config_names.of(self)])
    yield from found


def _is_said(config: Any) -> bool:
    return vars(config).get(_SWITCH) is not False and bool(config_names.of(config))


def _ambiguous() -> Any:
    from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError

    return AmbiguousGlobalPerLayerAttributeError


@functools.cache
def _missing() -> Any:
    return type("AmbiguousGlobalPerLayerAttributeError", (_ambiguous(), AttributeError), {"__module__": __name__})


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._gemma4.models import variants
    from gemma4_compat._lab import tiny_configs

    name = workspace.variant or "31B"
    config = tiny_configs.config(variant=name).get_text_config()
    shape = tiny_configs.scaled_text(variants.shape(name), layers=6)
    names = ("head_dim", "num_key_value_heads", "global_head_dim", "num_global_key_value_heads")
    expected = {key: shape.get(key) for key in names}
    lost = [key for key in expected if not hasattr(config, key)]
    if lost:
        return Outcome(True, f"the configuration of the {name} lacks: {', '.join(lost)}")
    found = {key: getattr(config, key) for key in expected}
    return Outcome(found != expected, f"the configuration of the {name}: {found}")


for _module, _kind, _group in (
    ("transformers.models.gemma4.configuration_gemma4", "Gemma4TextConfig", "gemma4"),
    ("transformers.models.gemma4_unified.configuration_gemma4_unified", "Gemma4UnifiedTextConfig", "gemma4_unified"),
):
    PATCH.replaces(_module, f"{_kind}.{_SWITCH}", group=_group)(switch)
    PATCH.replaces(_module, f"{_kind}.__getattr__", group=_group)(missing)
    PATCH.replaces(_module, f"{_kind}.__setattr__", group=_group)(write)
    PATCH.replaces(_module, f"{_kind}.__iter__", group=_group)(keys)
