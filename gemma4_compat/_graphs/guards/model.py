"""Whether a model is still what it was: weights by address, hooks, adapters, modes, attributes, code.

A graph reads memory, so it sees a weight that was changed in place. It does not see that a module now has another
weight or hook, or that another adapter is active. :meth:`ModelGuards.check_step` checks that before every replay,
mostly in C: an entry is a dictionary, a key, and the object that was there. :meth:`ModelGuards.check_all` checks, once
for each ``generate`` and each training step, what programs do not change between two tokens: the tree of modules and
everything their forwards may read, which is every attribute (including added ones), the contents of their lists and
dictionaries, their classes, and the functions beside these classes. :meth:`ModelGuards.contents` stands for the values
of weights, which keys and values in a cache were computed from.

Every guard has a :data:`snapshots.Source`: :meth:`ModelGuards.reason` says in words which ones failed. Nothing here
keeps a module or a tensor alive. When a module of the model is deleted, everything is released.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

from gemma4_compat._gemma4.quantization import quant_states
from gemma4_compat._gemma4.state.snapshots import COLLECTED, Entries, Layouts, Source, Values, changed, under
from gemma4_compat._graphs.guards import stored, torch_hooks
from gemma4_compat._graphs.guards.digests import Digest
from gemma4_compat._graphs.statistics import Cause, Recapture

#: Attributes of PEFT's layers that say which adapters compute, and how strongly. Some layers get such an attribute
#: only when they are switched; until then it is on their class.
_ADAPTER = ("_active_adapter", "_disable_adapters", "merged_adapters")
_ADAPTER_DICTS = ("scaling",)
#: Attributes of configurations, which a logits processor may also change.
_IMPLEMENTATIONS = ("_attn_implementation_internal", "_experts_implementation_internal")
#: Modules of types whose objects are plain values, and whose classes nobody changes.
_PLAIN = ("builtins", "types", "typing", "collections", "functools", "torch")
#: Attributes of the model itself that its callers set.
_OF_CALLS = ("generation_config", "training", "forward")
#: Another object whenever checkpointing is turned on. No step calls it: there are no gradients.
_CHECKPOINTING = "_gradient_checkpointing_func"
#: Tokens in which everything is looked at once, while nobody else's code runs.
_TURNS = 32


def _stored(tensors: Any) -> dict[str, Any]:
    """A module's own tensors by name. A cache of compressed-tensors holds them; with others nothing is captured."""
    if isinstance(tensors, dict):
        return tensors
    return tensors.offloaded_values if hasattr(tensors, "offloaded_values") else dict(tensors)


class ModelGuards:
    """A snapshot of the modules that compute a step, a prompt, a draft, or decoder layers in training.

    Args:
        modules: all of them; the first one is the model.
        on_gone: called with these guards and a module's name, at least once, when one of the modules is deleted.
        groups: what has weights on the host: module groups of streamed layers, and places of those read in place.
        swapped: dictionaries and keys that are not looked at: the groups of streamed layers swap what is there.
        trained: whether backward passes are replayed: their hooks matter then, and which weights are trained.
        offloaded: look at offloaded weights; accelerate's hooks make them anew in each forward.
    """

    def __init__(
        self,
        modules: list[Any],
        on_gone: Callable[[ModelGuards, str], None] | None = None,
        *,
        groups: Iterable[Any] = (),
        swapped: Iterable[tuple[dict[Any, Any], str]] = (),
        trained: bool = False,
        offloaded: bool = True,
    ) -> None:
        self._gone, self._with_offloaded = False, offloaded
        self._hook_kinds = torch_hooks.kinds(backward=trained)
        self._often, self._seldom, self._hook_functions = Entries(), Entries(), Entries()
        self._turn = 0
        self._swapped = {(id(where), key) for where, key in swapped}
        self._shares: dict[int, list[Any]] = {}  # of what is below, by turn
        self._adapters = Values()
        self._addresses: list[int] = []
        self._tensors: list[weakref.ref[Any]] = []  # on the device
        self._metas: list[weakref.ref[Any]] = []  # offloaded
        self._tensor_sources: list[Source] = []
        self._meta_sources: list[Source] = []
        self._layouts, self._other_layouts = Layouts(trained=trained), Layouts()
        self._digest = Digest()
        self._hooks: list[dict[Any, Any]] = []
        self._no_hooks: list[dict[Any, Any]] = []
        self._hooked: list[str] = []  # "a forward hook of MODULE", one for each of `_hooks`
        self._not_hooked: list[str] = []
        self._ignored = {*_of_every_module(), *_ADAPTER, _CHECKPOINTING, COLLECTED}
        self._kinds = list(map(type, modules))
        self._classes: dict[type, tuple[list[str], list[Any]]] = {}
        self._registries: list[tuple[Any, dict[Any, Any]]] = []
        self._names = _names(modules)
        self._offload_hooks = [id(_offload_hook(module)) for module in modules]
        self._modules = [
            weakref.ref(module, functools.partial(self._release, on_gone, name))
            for module, name in zip(modules, self._names)
        ]
        for kind in dict.fromkeys(self._kinds):
            self._add_class(kind)
        for name in dict.fromkeys(kind.__module__ for kind in self._classes):
            if name in sys.modules:
                self._add_globals(name, vars(sys.modules[name]))
        for hooks, hook in zip(torch_hooks.on_every_module(backward=trained), self._hook_kinds.values()):
            self._add_hooks(hooks, f"{hook} of every module")
        for index, module in enumerate(modules):
            self._add(module, self._names[index], first=index == 0)
        for group in groups:
            for where, key in group.host_entries():
                self._often.add(where, key, (Cause.WEIGHT, "in host memory"))
            for where, key in group.hook_entries():
                self._seldom.add(where, key, (Cause.OFFLOADING, "AlignDevicesHook"))
        self._dtypes = list(map(_dtype, self._metas))
        self._hook_numbers = list(map(len, self._hooks))
        self._hook_counts = list(map(torch_hooks.counted, self._hooks))
        self._configs = Values()
        for name, config in _configs(modules):
            for key in _IMPLEMENTATIONS:
                self._configs.add(config, key, (Cause.CONFIGURATION, name))
            for key in config:
                if key not in _IMPLEMENTATIONS:
                    self._add_attribute(config, key, (Cause.CONFIGURATION, name))

    def _release(self, on_gone: Callable[[ModelGuards, str], None] | None, name: str, _reference: object) -> None:
        """Release everything: a module is deleted, and its weights with it."""
        self._often, self._seldom, self._hook_functions = Entries(), Entries(), Entries()
        self._hooks, self._no_hooks, self._shares = [], [], {}
        self._gone = True
        if on_gone is not None:
            on_gone(self, name)

    def _add(self, module: Any, path: str, *, first: bool) -> None:
        attributes = vars(module)
        weight, child, adapter = (Cause.WEIGHT, path), (Cause.MODULE, path), (Cause.ADAPTER, path)
        own = [_stored(attributes[kind]) for kind in ("_parameters", "_buffers")]
        for tensors in own:
            for name, tensor in tensors.items():
                if not self._with_offloaded and tensor is not None and tensor.device.type == "meta":
                    continue
                if (id(tensors), name) in self._swapped:
                    continue
                self._often.add(tensors, name, weight)
                if tensor is not None:
                    self._add_tensor(tensor, (Cause.WEIGHT, f"{path}.{name}"))
        for name in attributes["_modules"]:
            self._seldom.add(attributes["_modules"], name, child)
        for tensors in own:
            self._seldom.add_size(tensors, weight)
        self._seldom.add_contents(attributes["_modules"], child)  # their order matters
        often = self._often if first else self._seldom
        if (id(attributes), "forward") not in self._swapped:
            often.add(attributes, "forward", (Cause.CODE, path))
        often.add(attributes, "training", (Cause.TRAINING, path))
        for kind, hook in self._hook_kinds.items():
            self._add_hooks(attributes[kind], f"{hook} of {path}")
        for key in _ADAPTER:
            if hasattr(module, key):
                self._adapters.add(attributes, key, adapter, getattr(type(module), key, None))
        for key in _ADAPTER_DICTS:
            if isinstance(attributes.get(key), dict):
                for name in attributes[key]:
                    self._adapters.add(attributes[key], name, (Cause.ADAPTER, f"{path}.{key}"))
        source = (Cause.ATTRIBUTE, path)
        if not first:
            self._seldom.add_size(attributes, source)
        for key, value in attributes.items():
            # `generate` keeps things on the model itself, and PEFT replaces methods there with its own.
            kept = first and (key.startswith("_") or key in _OF_CALLS or callable(value))
            if key not in self._ignored and not kept and (id(attributes), key) not in self._swapped:
                self._add_attribute(attributes, key, source)

    def _add_attribute(self, where: dict[Any, Any], key: Any, source: Source) -> None:
        """Note the object under ``key`` and its contents: containers, and the tensors and classes of objects."""
        self._seldom.add(where, key, source)
        self._add_contents(where[key], {id(where)}, under(key, source))

    def _add_contents(self, value: Any, above: set[int], source: Source) -> None:
        import torch

        if isinstance(value, torch.Tensor):
            self._other_layouts.add(value, source)
        elif not isinstance(value, (dict, list, tuple, set)):
            if type(value).__module__ not in _PLAIN and not isinstance(value, type):
                self._add_class(type(value))
        elif id(value) not in above:
            if isinstance(value, dict):
                self._seldom.add_size(value, source)
                for name in value:
                    self._seldom.add(value, name, source)
            else:
                self._seldom.add_contents(value, source)
            for name, part in value.items() if isinstance(value, dict) else enumerate(value):
                self._add_contents(part, {*above, id(value)}, under(name, source))

    def _add_hooks(self, hooks: dict[Any, Any], what: str) -> None:
        (self._hooks if hooks else self._no_hooks).append(hooks)
        (self._hooked if hooks else self._not_hooked).append(what)
        for key, function in hooks.items():
            if not (torch_hooks.marks_inputs(function) or torch_hooks.collects_outputs(function)):
                self._hook_functions.add(hooks, key, (Cause.HOOK_ADDED, f"{what}, in place of another"))

    def _add_class(self, kind: type) -> None:
        """Note the attributes of a class: somebody may replace its functions."""
        for part in kind.__mro__:
            if part not in self._classes and part.__module__ not in _PLAIN:
                own = _attributes(part)
                self._classes[part] = list(own), list(own.values())

    def _add_globals(self, module: str, names: dict[str, Any]) -> None:
        """Functions that forwards call by their names, and registries in which they look functions up."""
        for name, value in names.items():
            if isinstance(value, MutableMapping) and not isinstance(value, dict):  # ALL_ATTENTION_FUNCTIONS
                self._registries.append((value, dict(value)))
            elif callable(value) and not isinstance(value, type):
                self._seldom.add(names, name, (Cause.CODE, module))

    def _add_tensor(self, tensor: Any, source: Source) -> None:
        state = vars(tensor).get("quant_state")
        if state is not None:
            self._often.add(vars(tensor), "quant_state", source)
            for holder in (state, vars(state).get("state2")):
                if holder is not None:
                    for key in ("absmax", "code", "offset", "state2"):
                        self._often.add(vars(holder), key, source)
                    for key in vars(holder).keys() - {"absmax", "code", "offset", "state2"}:
                        self._seldom.add(vars(holder), key, source)
        for part in (tensor, *(() if state is None else quant_states.tensors(state))):
            if part.device.type == "meta":
                self._metas.append(weakref.ref(part))
                self._meta_sources.append(source)
            else:
                self._tensors.append(weakref.ref(part))
                self._addresses.append(part.data_ptr())
                self._tensor_sources.append(source)
                self._layouts.add(part, source)

    def check_step(self) -> bool:
        """Whether a replay would compute what the model computes now. Checked for every token."""
        return self.check_weights() and self._adapters.check() and self._configs.check()

    def _check_hooks(self) -> bool:
        if self._gone:
            return False
        same = not any(self._no_hooks) and list(map(len, self._hooks)) == self._hook_numbers
        return same or self._marked_again()

    def _marked_again(self) -> bool:
        """Whether only hooks are new that do what those before them do, or nothing; if so, their numbers are noted."""
        if (
            any(map(torch_hooks.counted, self._no_hooks))
            or list(map(torch_hooks.counted, self._hooks)) != self._hook_counts
        ):
            return False
        both = list(zip(self._no_hooks, self._not_hooked))
        for hooks, what in filter(operator.itemgetter(0), both):
            self._hooks.append(hooks)
            self._hooked.append(what)
            self._hook_counts.append(0)
        self._no_hooks = [hooks for hooks, _ in both if not hooks]
        self._not_hooked = [what for hooks, what in both if not hooks]
        self._hook_numbers, self._shares = list(map(len, self._hooks)), {}
        return True

    def check_rotating(self) -> bool:
        """:meth:`check_step` of one of 32 shares of the guards, in turns.

        To look at everything takes as long as a step of a small model. This is enough where no code but libraries' has
        run in this thread since the last look.
        """
        self._turn = turn = (self._turn + 1) % _TURNS
        if turn not in self._shares:
            noted = self._tensors, self._addresses, self._no_hooks, self._hooks, self._hook_numbers
            self._shares[turn] = [of_all[turn::_TURNS] for of_all in noted]
        tensors, addresses, no_hooks, hooks, numbers = self._shares[turn]
        differ = any(no_hooks) or list(map(len, hooks)) != numbers
        if self._gone or (differ and not self._marked_again()):
            return False
        if not (self._often.check_rotating(turn, _TURNS) and self._adapters.check_rotating(turn, _TURNS)):
            return False
        return self._configs.check() and self._are_there(tensors, addresses)

    def check_under_any_adapter(self) -> bool:
        """Whether everything is unchanged except which adapters are active, and how strongly."""
        return self.check_weights() and self._configs.check() and self.check_all()

    def active_adapters(self) -> list[Any]:
        """Which adapters are active now, and how strongly, of each module."""
        return self._adapters.now()

    def check_weights(self) -> bool:
        """Whether hooks, weights and modes are unchanged, regardless of which adapters are active."""
        return self._check_hooks() and self._often.check() and self._are_there(self._tensors, self._addresses)

    @staticmethod
    def _are_there(tensors: list[weakref.ref[Any]], addresses: list[int]) -> bool:
        """Whether these tensors have these addresses."""
        import torch

        with torch._C.DisableTorchFunctionSubclass():  # bitsandbytes' parameters take a detour through Python
            try:
                found = list(map(torch.Tensor.data_ptr, [reference() for reference in tensors]))
            except TypeError:  # one of them is gone
                return False
        return found == addresses

    def check_all(self) -> bool:
        """Whether everything else about the modules is unchanged as well. Checked for every ``generate``."""
        if self._gone or [type(reference()) for reference in self._modules] != self._kinds:
            return False
        if not all(map(_is_as_it_was, self._classes.items())):
            return False
        if any(dict(registry) != functions for registry, functions in self._registries):
            return False
        if list(map(_dtype, self._metas)) != self._dtypes:
            return False
        if not (self._seldom.check() and self._hook_functions.check()):
            return False
        return self._layouts.check() and self._other_layouts.check()

    def check_rest(self) -> bool:
        """What :meth:`check_step` checks beside :meth:`check_memory`, which has just held."""
        return not self._gone and self._often.check()

    def check_memory(self) -> bool:
        """Whether all memory that a replay reads is what it was, and the same adapters are active.

        A replay does no harm then, even if it computes what the model no longer does. False if anything is read from
        the host: that is not looked at.
        """
        if self._metas or not (self._check_hooks() and self._adapters.check() and self._configs.check()):
            return False
        return self._are_there(self._tensors, self._addresses) and self._other_layouts.check()

    def reason(self) -> Recapture:
        """Which guards failed, after one of the checks did."""
        return Recapture.of(self._differences())

    def _differences(self) -> Iterator[Source]:
        """What has changed, by cause and name; nothing of a snapshot that was released."""
        dispatched = list(self._dispatched())
        yield from dispatched
        yield from self._adapters.differences()
        yield from self._configs.differences()
        if dispatched:
            return  # that changes weights, hooks, attributes and forwards
        yield from self._differing_hooks()
        yield from self._often.differences()
        yield from self._moved()
        yield from self._of_other_types()
        yield from self._seldom.differences()
        yield from self._layouts.differences()
        yield from self._other_layouts.differences()
        yield from self._differing_code()

    def _dispatched(self) -> Iterator[Source]:
        """Modules with another hook of accelerate, or without theirs."""
        for reference, noted, path in zip(self._modules, self._offload_hooks, self._names):
            if id(_offload_hook(reference())) != noted:
                yield Cause.OFFLOADING, path

    def _differing_hooks(self) -> Iterator[Source]:
        found: list[Source] = []
        noted = (*zip(self._no_hooks, itertools.repeat(0), self._not_hooked),)
        for hooks, number, what in (*noted, *zip(self._hooks, self._hook_counts, self._hooked)):
            if torch_hooks.counted(hooks) > number:
                found.append((Cause.HOOK_ADDED, f"{what}: {_name(next(reversed(hooks.values())))}"))
            elif torch_hooks.counted(hooks) < number:
                found.append((Cause.HOOK_REMOVED, what))
        yield from found or self._hook_functions.differences()

    def _moved(self) -> Iterator[Source]:
        for reference, address, source in zip(self._tensors, self._addresses, self._tensor_sources):
            tensor = reference()
            if tensor is None or tensor.data_ptr() != address:
                yield source

    def _of_other_types(self) -> Iterator[Source]:
        for reference, kind, path in zip(self._modules, self._kinds, self._names):
            if type(reference()) is not kind:
                yield Cause.MODULE, f"{path}: {changed(_name(kind), _name(type(reference())))}"
        for reference, dtype, source in zip(self._metas, self._dtypes, self._meta_sources):
            if _dtype(reference) != dtype:
                yield source

    def _differing_code(self) -> Iterator[Source]:
        for kind, (names, values) in self._classes.items():
            before, now = dict(zip(names, values)), _attributes(kind)
            for name in before | now:
                if name not in before or now.get(name) is not before[name]:
                    yield Cause.CODE, f"{kind.__module__}.{_name(kind)}.{name}"
        for registry, functions in self._registries:
            if dict(registry) != functions:
                yield Cause.CODE, _name(type(registry))

    def contents(self) -> tuple[Any, ...]:
        """What is equal as long as the weights have the same values.

        That is a number for all values on each device, and a sample of each weight that is in host memory. Weights on
        disk are compared by their files.
        """
        modules = [module for module in (reference() for reference in self._modules) if module is not None]
        return (*stored.contents(modules), *self._digest(self._on_devices))

    def _on_devices(self) -> list[Any]:
        """Every tensor that is not offloaded, once."""
        found = (*self._layouts.tensors(), *self._other_layouts.tensors())
        return [tensor for tensor in {id(one): one for one in found}.values() if tensor.device.type != "meta"]

    def adapters(self) -> int:
        """Stands for the adapters that were active; equal ones have equal numbers."""
        return hash(repr(self._adapters.values))


def _attributes(kind: type) -> dict[str, Any]:
    """Those of a class, without what ``copy.deepcopy`` and pickle keep there."""
    return {name: value for name, value in vars(kind).items() if name != "__slotnames__"}


def _is_as_it_was(item: tuple[type, tuple[list[str], list[Any]]]) -> bool:
    """Whether a class still has the same attributes. The old ones are kept alive, so their ids stay unique."""
    kind, (names, values) = item
    now = _attributes(kind)
    return list(now) == names and all(map(operator.is_, now.values(), values))


def _names(modules: list[Any]) -> list[str]:
    """What the first one, the model, calls them; itself, by its class."""
    known = {id(module): name for name, module in modules[0].named_modules()}
    return [known.get(id(module)) or _name(type(module)) for module in modules]


def _configs(modules: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """The attributes of the modules' configurations, each once, and what that of the model calls the others."""
    configs = [getattr(module, "config", None) for module in modules]
    found = {id(config): vars(config) for config in configs if hasattr(config, "__dict__")}
    names = {id(value): f"config.{name}" for name, value in next(iter(found.values()), {}).items()}
    return [(names.get(identity, "config"), config) for identity, config in found.items()]


def _offload_hook(module: Any) -> Any:
    return getattr(module, "__dict__", {}).get("_hf_hook")


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _dtype(reference: weakref.ref[Any]) -> Any:
    return getattr(reference(), "dtype", None)


def _of_every_module() -> frozenset[str]:
    import torch

    return frozenset(vars(torch.nn.Module()))
