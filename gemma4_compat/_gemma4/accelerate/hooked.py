"""Targets that matter only to models with accelerate's hooks: they are dormant until a module gets its first hook."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine import dormant

#: What a patch replaces to be activated: ``PATCH.replaces(**hooked.ADD_HOOK)(hooked.activator(PATCH.id))``.
ADD_HOOK: dict[str, Any] = {
    "module": "accelerate.hooks",
    "name": "add_hook_to_module",
    "codes": {"9d0155698be1": "accelerate 1.12 to 1.15"},
    "activator": True,
}


def activator(patch_id: str) -> Callable[..., Any]:
    """The replacement that activates a patch."""

    def add_hook_to_module(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        dormant.activate(patch_id)
        return original(*args, **kwargs)

    return add_hook_to_module


def no_hooks(late: bool) -> bool:
    """Whether no module has a hook yet. If accelerate was used before, this looks at all objects."""
    kind = getattr(sys.modules.get("accelerate.hooks"), "ModelHook", None)
    return not late or kind is None or not any(issubclass(type(item), kind) for item in gc.get_objects())
