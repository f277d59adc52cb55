"""The modules of a model, as ``nn.Module.named_modules`` gives them, without its nested generators.

That one hands each module up through all its ancestors; with an adapter a Gemma 4 has thousands, eight deep. Imports
nothing upstream.
"""

from __future__ import annotations

from typing import Any


def named_modules(root: Any) -> list[tuple[str, Any]]:
    """Name and module, each module once, a module before what is in it; ``root`` comes first and has no name."""
    found: list[tuple[str, Any]] = []
    seen: set[Any] = set()
    waiting = [("", root)]
    while waiting:
        name, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        found.append((name, module))
        prefix = f"{name}." if name else ""
        children = module._modules
        waiting += [(prefix + key, children[key]) for key in reversed(children) if children[key] is not None]
    return found


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
