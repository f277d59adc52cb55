"""The modules of a model, as ``nn.Module.named_modules`` returns them, without its nested generators.

Those pass each module up through all its ancestors; with an adapter a Gemma 4 has thousands of modules, eight deep.
Imports nothing upstream at module level.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from gemma4_compat._engine.runtime import in_place

_WRAPPED = ("base_layer", "original_module", "token_adapter")  # children of PEFT's layers and wrappers


def named_modules(root: Any, *, remove_duplicate: bool = True) -> list[tuple[str, Any]]:
    """Name and module: each module once, before the modules in it; ``root`` comes first and has no name."""
    return list(_one_by_one(root, remove_duplicate))


def modules(root: Any) -> list[Any]:
    """The same without the names."""
    found: list[Any] = []
    seen: set[Any] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            found.append(module)
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return found


@contextlib.contextmanager
def quick(*roots: Any) -> Iterator[None]:
    """Inside, ``named_modules`` of these modules, and everything torch builds on it, is :func:`named_modules`.

    The modules get it as an attribute, so no other module is affected. A module whose class overrides the method keeps
    that.
    """
    import torch

    with contextlib.ExitStack() as stack:
        for root in roots:
            own = in_place.own(root, "named_modules") is not in_place.ABSENT
            if not own and type(root).named_modules is torch.nn.Module.named_modules:
                stack.enter_context(in_place.replaced(root, "named_modules", functools.partial(_quick, root)))
        yield


def _quick(
    root: Any, below: Any, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, Any]]:
    """``root.named_modules``; ``below`` is torch's."""
    if memo is not None or prefix:
        torchs: Iterator[tuple[str, Any]] = below(memo, prefix, remove_duplicate)
        return torchs
    return _one_by_one(root, remove_duplicate)


def _one_by_one(root: Any, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
    """:func:`named_modules`, for callers that may stop at the first one."""
    seen: set[Any] = set()
    waiting = [("", root)]
    while waiting:
        name, module = waiting.pop()
        if module not in seen or not remove_duplicate:
            seen.add(module)
            yield name, module
            if children := module._modules:
                prefix = f"{name}." if name else ""
                waiting += [(prefix + key, child) for key, child in reversed(children.items()) if child is not None]


def unwrapped(model: Any) -> Any:
    """The transformers model in wrappers of PEFT, DDP, FSDP or ``torch.compile``; anything else as it is."""
    while not isinstance(model, type):
        if hasattr(model, "get_base_model"):
            return model.get_base_model()
        inner = next((getattr(model, name) for name in ("_orig_mod", "module") if hasattr(model, name)), None)
        if inner is None:
            break
        model = inner
    return model


def innermost(module: Any) -> Any:
    """The base model's module below a PEFT layer or wrapper (or a stack of them)."""
    while True:
        inner = _below(module)
        if inner is None:
            return module
        module = inner


def in_use(module: Any) -> Any:
    """The same, but the active adapter's copy (``modules_to_save``) if that replaces the module."""
    while children := module._modules:  # an embedding without adapters has none: this runs for every token
        copies = children.get("modules_to_save")
        active = [] if copies is None or module.disable_adapters else module.active_adapters
        inner = copies[active[0]] if active and active[0] in copies else _below(module)
        if inner is None:
            break
        module = inner
    return module


def wrapped(module: Any) -> list[tuple[str, Any]]:
    """Name and module of what a PEFT layer or wrapper wraps; empty for any other module."""
    children = module._modules
    return [(name, children[name]) for name in _WRAPPED if children.get(name) is not None][:1]


def _below(module: Any) -> Any:
    return next((child for _, child in wrapped(module)), None)
