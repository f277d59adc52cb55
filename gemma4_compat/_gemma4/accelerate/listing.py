"""What this package has left on a model. Changes nothing; imports nothing upstream."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gemma4_compat._engine.io import arguments
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.accelerate import attached as table

_PACKAGE = __name__.partition(".")[0]
#: Attributes in which objects with marks hang: on a module, its hook, a parameter, or the state of a quantized weight.
_INSIDE = ("_hf_hook", "hf_quantizer", "quant_state", "state2", "SCB")
_SHOWN = 3  # kinds of places of one attachment


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """One kind of thing that this package has left on a model.

    Attributes:
        kind: ``"mark"`` (an attribute), ``"hooks"`` (torch's, of a module) or ``"method"`` (of the object, in place of
            that of its class).
        name: of the attribute or method; of hooks, what they are called.
        patch: id of the patch that it belongs to; ``""`` for what no patch has put there.
        purpose: what it is for, in one sentence.
        paths: where it is, from the model down, ``""`` for the model itself:
            ``"model.language_model.layers.0.mlp.up_proj.weight.quant_state"``.
    """

    kind: str
    name: str
    patch: str
    purpose: str
    paths: tuple[str, ...]

    def __str__(self) -> str:
        places = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in self.paths))
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        where = ", ".join(place or "the model itself" for place in places[:_SHOWN])
        name = f"method {self.name}" if self.kind == "method" else self.name
        head = f"{len(self.paths)} x {name}" + (f" ({self.patch})" if self.patch else "")
        return f"{head}\n    on {where}{more}\n    {self.purpose}"


class Attached(tuple[Attachment, ...]):
    """What :func:`attached` found. ``str``, and so ``print``, gives it as text."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "gemma4_compat has left nothing on this model"


def attached(model: Any) -> Attached:
    """What this package has left on a model: attributes, hooks, and methods in place of those of a class.

    >>> print(attached(model))
    4 x streaming hooks (accelerate-paged-layers)
        on model.language_model.layers.*
        They bring a layer's weights to the device before its forward, and release them after it.

    Args:
        model: a ``torch.nn.Module``: a transformers model, plain, quantized, dispatched or not, or one that PEFT, DDP
            or another wrapper is around.

    Returns:
        An entry for each kind of thing found, in the order of the documentation.

    Raises:
        Gemma4CompatError: ``model`` is not a module.
    """
    found: dict[table.Declared, list[str]] = {}
    for path, owner in _objects(arguments.model(model, "attached")):
        for declared in dict.fromkeys(_on(owner)):
            found.setdefault(declared, []).append(path)
    order = {declared: index for index, declared in enumerate(table.DECLARED)}
    return Attached(
        Attachment(
            kind=declared.kind, name=declared.name, patch=declared.patch, purpose=declared.purpose, paths=tuple(paths)
        )
        for declared, paths in sorted(found.items(), key=lambda item: order.get(item[0], len(order)))
    )


def _objects(model: Any) -> Iterator[tuple[str, Any]]:
    """What marks may hang on, each once, with its path: modules, their tensors, hooks and states."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        waiting = [(name, module)]
        while waiting:
            path, owner = waiting.pop()
            if id(owner) in seen or not hasattr(owner, "__dict__"):
                continue
            seen.add(id(owner))
            yield path, owner
            waiting += reversed([(f"{path}.{part}" if path else part, inner) for part, inner in _parts(owner)])


def _parts(owner: Any) -> Iterator[tuple[str, Any]]:
    own = vars(owner)
    for tensors in ("_parameters", "_buffers"):
        yield from own[tensors].items() if isinstance(own.get(tensors), dict) else ()
    yield from ((name, own[name]) for name in _INSIDE if own.get(name) is not None)
    if isinstance(own.get("hooks"), tuple):  # accelerate's SequentialHook
        yield from ((f"hooks.{index}", hook) for index, hook in enumerate(own["hooks"]))


def _on(owner: Any) -> Iterator[table.Declared]:
    """What hangs on one object itself."""
    for name, value in list(vars(owner).items()):
        if name.startswith(table.PREFIX):
            yield _declared("mark", name, "")
        for function in in_place.replacements(value):
            yield _declared("method", name, _module(function))
        if name.endswith("_hooks") and isinstance(value, dict):
            yield from (_declared("hooks", "", module) for hook in value.values() if (module := _module(hook)))


def _module(function: Any) -> str:
    """Where in this package a function is defined; "" for any other one."""
    function = getattr(function, "hook", function)  # torch wraps a hook that gets the module
    function = inspect.unwrap(function)  # torch.compiler.disable
    while isinstance(function, functools.partial):
        function = function.func
    package, _, module = str(getattr(function, "__module__", "")).partition(".")
    return module if package == _PACKAGE else ""


@functools.cache
def _declared(kind: str, name: str, module: str) -> table.Declared:
    for declared in table.DECLARED:
        if (declared.kind, declared.module) == (kind, module) and (kind == "hooks" or declared.name == name):
            return declared
    if kind == "mark":  # of another version of this package, in a pickle
        return table.Declared(kind, name, "", "", "This version does not know it.")
    name = name or f"hooks of {_PACKAGE}.{module}"
    return table.Declared(kind, name, "", "", f"It is there while a call of {_PACKAGE}.{module} runs.", module)
