"""What a captured step has read that a replay would not notice: weights by address, hooks, adapters, modes.

A graph reads memory, so it sees a weight that was changed in place. It does not see that a module now has another
weight or hook, or that another adapter is active. :meth:`Dependencies.hold` checks that before every replay, mostly in
C: an entry is a dictionary, a key, and the object that was there. :meth:`Dependencies.hold_in_full` checks, once for
each ``generate``, what programs do not change between two of its tokens: the tree of modules and everything their
forwards may read, which is every attribute (including added ones), the contents of their lists and dictionaries, their
classes, and the functions beside these classes.

Nothing here keeps a module or a tensor alive. When a module of the model is deleted, everything is released.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from typing import Any

from gemma4_compat._quantization import quant_states

#: Attributes of PEFT's layers that say which adapters compute, and how strongly. Some layers get such an attribute
#: only when they are switched; until then it is on their class.
_ADAPTER = ("_active_adapter", "_disable_adapters", "merged_adapters")
_ADAPTER_DICTS = ("scaling",)
#: Attributes of configurations, which a logits processor may also change.
_IMPLEMENTATIONS = ("_attn_implementation_internal", "_experts_implementation_internal")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
#: Types whose objects are values and whose classes nobody changes.
_PLAIN = ("builtins", "types", "typing", "collections", "functools", "torch")
#: Attributes of the model itself that its callers set.
_OF_CALLS = ("generation_config", "training", "forward")


class Dependencies:
    """A snapshot of the modules that compute a step.

    Args:
        modules: all of them; the first one is the model.
        configs: dictionaries of its configurations.
        groups: the module groups of streamed layers: their weights are on the host.
        on_gone: called with this snapshot, at least once, when one of the modules is deleted.
    """

    def __init__(
        self,
        modules: list[Any],
        configs: Iterable[dict[str, Any]],
        groups: list[Any],
        on_gone: Callable[[Dependencies], None],
    ) -> None:
        self._gone = False
        self._often, self._seldom = _Entries(), _Entries()
        self._adapters = _Values()
        self._addresses: list[int] = []
        self._tensors: list[weakref.ref[Any]] = []  # on the device
        self._metas: list[weakref.ref[Any]] = []  # offloaded
        self._layouts = _Layouts()
        self._hooks: list[dict[Any, Any]] = []
        self._no_hooks: list[dict[Any, Any]] = []
        self._ignored = {*_of_every_module(), *_ADAPTER}
        self._kinds = list(map(type, modules))
        self._classes: dict[type, tuple[list[str], list[Any]]] = {}
        self._registries: list[tuple[Any, dict[Any, Any]]] = []
        self._modules = [weakref.ref(module, lambda _ref: self._release(on_gone)) for module in modules]
        for kind in dict.fromkeys(self._kinds):
            self._add_class(kind)
        for name in dict.fromkeys(kind.__module__ for kind in self._classes):
            if name in sys.modules:
                self._add_globals(vars(sys.modules[name]))
        for hooks in global_hooks():
            self._add_hooks(hooks)
        for index, module in enumerate(modules):
            self._add(module, first=index == 0)
        for group in groups:
            for where, key in group.host_entries():
                self._often.add(where, key)
            for where, key in group.hook_entries():
                self._seldom.add(where, key)
        self._dtypes = list(map(_dtype, self._metas))
        self._hook_numbers = list(map(len, self._hooks))
        self._configs = _Values()
        for config in configs:
            for key in _IMPLEMENTATIONS:
                self._configs.add(config, key)
            for key in config.keys() - set(_IMPLEMENTATIONS):
                self._add_attribute(config, key)

    def _release(self, on_gone: Callable[[Dependencies], None]) -> None:
        """Release everything: a module is deleted, and its weights with it."""
        self._often, self._seldom = _Entries(), _Entries()
        self._hooks, self._no_hooks = [], []
        self._gone = True
        on_gone(self)

    def _add(self, module: Any, *, first: bool) -> None:
        attributes = vars(module)
        for kind in ("_parameters", "_buffers"):
            for name, tensor in attributes[kind].items():
                self._often.add(attributes[kind], name)
                if tensor is not None:
                    self._add_tensor(tensor)
        for name in attributes["_modules"]:
            self._seldom.add(attributes["_modules"], name)
        for kind in ("_parameters", "_buffers"):
            self._seldom.add_size(attributes[kind])
        self._seldom.add_contents(attributes["_modules"])  # their order matters
        often = self._often if first else self._seldom
        often.add(attributes, "forward")
        often.add(attributes, "training")
        for kind in _HOOKS:
            self._add_hooks(attributes[kind])
        for key in _ADAPTER:
            if hasattr(module, key):
                self._adapters.add(attributes, key, getattr(type(module), key, None))
        for key in _ADAPTER_DICTS:
            if isinstance(attributes.get(key), dict):
                for name in attributes[key]:
                    self._adapters.add(attributes[key], name)
        if not first:
            self._seldom.add_size(attributes)
        for key, value in attributes.items():
            # `generate` keeps things on the model itself, and PEFT replaces methods there with its own.
            kept = first and (key.startswith("_") or key in _OF_CALLS or callable(value))
            if key not in self._ignored and not kept:
                self._add_attribute(attributes, key)

    def _add_attribute(self, where: dict[Any, Any], key: Any) -> None:
        """Note the object under ``key`` and its contents: containers, and the tensors and classes of objects."""
        self._seldom.add(where, key)
        self._add_contents(where[key], {id(where)})

    def _add_contents(self, value: Any, above: set[int]) -> None:
        import torch

        if isinstance(value, torch.Tensor):
            self._layouts.add(value)
        elif not isinstance(value, (dict, list, tuple, set)):
            if type(value).__module__ not in _PLAIN and not isinstance(value, type):
                self._add_class(type(value))
        elif id(value) not in above:
            if isinstance(value, dict):
                self._seldom.add_size(value)
                for name in value:
                    self._seldom.add(value, name)
            else:
                self._seldom.add_contents(value)
            for part in value.values() if isinstance(value, dict) else value:
                self._add_contents(part, {*above, id(value)})

    def _add_hooks(self, hooks: dict[Any, Any]) -> None:
        (self._hooks if hooks else self._no_hooks).append(hooks)
        for key in hooks:
            self._seldom.add(hooks, key)

    def _add_class(self, kind: type) -> None:
        """Note the attributes of a class: somebody may replace its functions."""
        for part in kind.__mro__:
            if part not in self._classes and part.__module__ not in _PLAIN:
                self._classes[part] = list(vars(part)), list(vars(part).values())

    def _add_globals(self, names: dict[str, Any]) -> None:
        """Note the functions that forwards call by name, and the registries in which they look functions up."""
        for name, value in names.items():
            if isinstance(value, MutableMapping) and not isinstance(value, dict):  # ALL_ATTENTION_FUNCTIONS
                self._registries.append((value, dict(value)))
            elif callable(value) and not isinstance(value, type):
                self._seldom.add(names, name)

    def _add_tensor(self, tensor: Any) -> None:
        state = vars(tensor).get("quant_state")
        if state is not None:
            self._often.add(vars(tensor), "quant_state")
            for holder in (state, vars(state).get("state2")):
                if holder is not None:
                    for key in ("absmax", "code", "offset", "state2"):
                        self._often.add(vars(holder), key)
                    for key in vars(holder).keys() - {"absmax", "code", "offset", "state2"}:
                        self._seldom.add(vars(holder), key)
        for part in (tensor, *(() if state is None else quant_states.tensors(state))):
            if part.device.type == "meta":
                self._metas.append(weakref.ref(part))
            else:
                self._tensors.append(weakref.ref(part))
                self._addresses.append(part.data_ptr())
                self._layouts.add(part)

    def hold(self) -> bool:
        """Whether a replay would compute what the model computes now. Checked for every token."""
        return self.weights_hold() and self._adapters.hold() and self._configs.hold()

    def weights_hold(self) -> bool:
        """The same, regardless of which adapters are active."""
        import torch

        if self._gone or any(self._no_hooks) or list(map(len, self._hooks)) != self._hook_numbers:
            return False
        if not self._often.hold():
            return False
        with torch._C.DisableTorchFunctionSubclass():  # bitsandbytes' parameters take a detour through Python
            try:
                found = list(map(torch.Tensor.data_ptr, [reference() for reference in self._tensors]))
            except TypeError:  # one of them is gone
                return False
        return found == self._addresses

    def hold_in_full(self) -> bool:
        """Whether everything else about the modules is unchanged as well. Checked for every ``generate``."""
        if self._gone or [type(reference()) for reference in self._modules] != self._kinds:
            return False
        if not all(map(_is_as_it_was, self._classes.items())):
            return False
        if any(dict(registry) != functions for registry, functions in self._registries):
            return False
        if list(map(_dtype, self._metas)) != self._dtypes:
            return False
        return self._seldom.hold() and self._layouts.hold()


def _is_as_it_was(item: tuple[type, tuple[list[str], list[Any]]]) -> bool:
    """Whether a class still has the same attributes. The old ones are kept alive, so their ids stay unique."""
    kind, (names, values) = item
    now = vars(kind)
    return list(now) == names and all(map(operator.is_, now.values(), values))


_NOTHING = object()  # stands for a key that is absent


class _Entries:
    """Which object is under a key of a dictionary, and what is in a container.

    Objects are compared by their ids, in two passes over lists. A new object may get the id of a deleted one, so
    deletions are detected by weak references; numbers, strings and the like are kept alive instead. Containers are
    neither watched nor kept, since they may hold modules; a new one at the address of a deleted one goes unnoticed.
    """

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._ids: list[int] = []
        self._constants: list[Any] = []
        self._references: list[weakref.ref[Any]] = []
        self._gone: list[weakref.ref[Any]] = []  # of those, the ones whose object was deleted
        self._containers: list[Collection[Any]] = []
        self._contents: list[list[int]] = []
        self._sized: list[dict[Any, Any]] = []
        self._sizes: list[int] = []

    def add(self, where: dict[Any, Any], key: Any) -> None:
        """Note what is under ``key`` now."""
        self._dicts.append(where)
        self._keys.append(key)
        self._ids.append(self._noted(where.get(key, _NOTHING)))

    def add_size(self, where: dict[Any, Any]) -> None:
        """Note the number of keys of a dictionary whose keys are all noted: a new key changes it."""
        self._sized.append(where)
        self._sizes.append(len(where))

    def add_contents(self, container: Collection[Any]) -> None:
        """Note the items of a list, a set or a tuple, or the keys of a dictionary in order."""
        self._containers.append(container)
        self._contents.append(list(map(self._noted, container)))

    def _noted(self, value: Any) -> int:
        if not isinstance(value, (dict, list, tuple, set)):
            try:
                self._references.append(weakref.ref(value, self._gone.append))
            except TypeError:  # a number, a name, a dtype: nothing that holds a module
                self._constants.append(value)
        return id(value)

    def hold(self) -> bool:
        """Whether the same objects are still there."""
        if self._gone or list(map(len, self._sized)) != self._sizes:
            return False
        if list(map(id, map(dict.get, self._dicts, self._keys, itertools.repeat(_NOTHING)))) != self._ids:
            return False
        return [list(map(id, container)) for container in self._containers] == self._contents


class _Values:
    """Which value is under a key of a dictionary; an equal value counts as the same."""

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._defaults: list[Any] = []

    def add(self, where: dict[Any, Any], key: Any, default: Any = None) -> None:
        """Note the value under ``key``: a number, a name, or a list of names, which is copied."""
        self._dicts.append(where)
        self._keys.append(key)
        self._defaults.append(default)
        value = where.get(key, default)
        self._values.append(list(value) if isinstance(value, list) else value)

    def hold(self) -> bool:
        """Whether equal values are still there."""
        return list(map(dict.get, self._dicts, self._keys, self._defaults)) == self._values


class _Layouts:
    """Where tensors are in memory, and their layout."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        self._layouts: list[Any] = []

    def add(self, tensor: Any) -> None:
        import torch

        if tensor.layout is torch.strided:
            self._references.append(weakref.ref(tensor))
            self._layouts += _layouts([tensor])

    def hold(self) -> bool:
        """Whether all are still there, at the same address and with the same layout."""
        found = [reference() for reference in self._references]
        return not any(tensor is None for tensor in found) and _layouts(found) == self._layouts


def _layouts(found: list[Any]) -> list[Any]:
    import torch

    kind = torch.Tensor
    with torch._C.DisableTorchFunctionSubclass():
        places, strides = map(kind.data_ptr, found), map(kind.stride, found)
        return list(zip(places, strides, map(operator.attrgetter("dtype", "shape"), found)))


def _dtype(reference: weakref.ref[Any]) -> Any:
    return getattr(reference(), "dtype", None)


def global_hooks() -> Iterator[dict[Any, Any]]:
    """The hooks of all modules, in the order of :data:`_HOOKS`."""
    import torch

    for kind in _HOOKS:
        yield getattr(torch.nn.modules.module, f"_global{kind}")


def _of_every_module() -> frozenset[str]:
    import torch

    return frozenset(vars(torch.nn.Module()))
