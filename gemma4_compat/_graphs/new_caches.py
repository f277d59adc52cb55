"""A new static cache as a copy of an unused one, while its configuration stays as it was.

From 5.19 on, ``StaticCache(config)`` copies the configuration once for each layer to ask it for one number: 3,500
calls of functions for the 35 layers of an E2B, before each prompt.
"""

from __future__ import annotations

import collections
import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.models import family

_KEPT = 8
_CONSTANTS = (bool, int, float, str, type(None))
_LENGTH = "cumulative_length"  # a tensor of each layer


class _Known:
    """An unused cache.

    Args:
        cache: that was just made.
        config: its configuration.
        values: of the configuration, copied before.
    """

    def __init__(self, cache: Any, config: Any, values: dict[str, Any]) -> None:
        self._config, self._values = weakref.ref(config), values
        self._attributes = {name: value for name, value in vars(cache).items() if name != "layers"}
        self._layers = [(type(layer), _attributes(vars(layer))) for layer in cache.layers]
        self._code = self._functions(cache)

    def _functions(self, cache: Any) -> tuple[Any, ...]:
        """What makes layers: classes by the names of their kinds, and their functions."""
        module = sys.modules[type(cache).__module__]
        return vars(module).get("STATIC_LAYER_TYPE_MAPPING", {}).copy(), [kind.__init__ for kind, _ in self._layers]

    def is_plain(self) -> bool:
        """Whether copies share nothing that changes."""
        values = [*self._attributes.values()]
        for _, attributes in self._layers:
            values += [value for name, value in attributes.items() if name != _LENGTH]
        return all(isinstance(value, _CONSTANTS) for value in values)

    def holds(self, cache: Any, config: Any) -> bool:
        """Whether a cache that is made now, for this configuration, would be the same."""
        return self._config() is config and vars(config) == self._values and self._functions(cache) == self._code

    def copy_to(self, cache: Any) -> None:
        """Give a cache what its constructor would."""
        vars(cache).update(self._attributes)
        cache.layers = list(map(_copied, self._layers))


def _copied(layer: tuple[type, dict[str, Any]]) -> Any:
    kind, attributes = layer
    made: Any = object.__new__(kind)
    vars(made).update(_attributes(attributes))
    return made


def _attributes(found: dict[str, Any]) -> dict[str, Any]:
    """A copy with a tensor of its own."""
    return found | {_LENGTH: found[_LENGTH].clone()} if _LENGTH in found else dict(found)


_known: collections.OrderedDict[Any, _Known] = collections.OrderedDict()


def construct(original: Callable[..., None], cache: Any, *args: Any, **kwargs: Any) -> None:
    """``StaticCache.__init__``, or what it did for the same arguments before.

    Args:
        original: the constructor of the class.
        cache: a new object of it.
        args: of the constructor.
        kwargs: the same.
    """
    config = kwargs.get("config")
    others = tuple(sorted((name, value) for name, value in kwargs.items() if name != "config"))
    if args or config is None or kwargs.get("offloading") or not _may_be_copied(cache, config, others):
        original(cache, *args, **kwargs)
        return
    key = original, id(config), others  # another patch of the constructor may have work to do
    known = _known.get(key)
    if known is not None and known.holds(cache, config):
        _known.move_to_end(key)
        known.copy_to(cache)
        return
    values = copy.deepcopy(vars(config))
    original(cache, **kwargs)
    made = _Known(cache, config, values)
    if made.is_plain():
        _known[key] = made
        if len(_known) > _KEPT:
            _known.popitem(last=False)


def _may_be_copied(cache: Any, config: Any, others: tuple[Any, ...]) -> bool:
    """Whether a copy has the tensors that the constructor would make, and the arguments are those of ``generate``."""
    import torch

    if type(cache).__name__ != "StaticCache" or not family.is_gemma4_config(config):
        return False
    if torch._C._len_torch_function_stack() or torch.is_inference_mode_enabled():
        return False  # such as `with torch.device(...)`
    return all(isinstance(value, _CONSTANTS) for _, value in others)
