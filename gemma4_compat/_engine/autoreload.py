"""Jupyter's autoreload, for functions that a patch has replaced.

When a module is reloaded, IPython's ``%autoreload`` puts the code of its new functions into the old ones, for modules
that imported those by name. That code does not fit into a function that a patch installed, and the error ends the
reload half way; or "deduperreload" forces it in through memory, which silently ends the patch.

Here the upstream function below gets the code, and a module with such a function is reloaded as a whole, which
:mod:`gemma4_compat._engine.hooks` notices. Nothing changes for other functions.
"""

from __future__ import annotations

import sys
import weakref
from types import FunctionType, MethodType
from typing import Any

from gemma4_compat._engine import changes, hooks

_followed: weakref.WeakSet[FunctionType] = weakref.WeakSet()  # functions that were replaced by a patch's function


def arm() -> None:
    """Register with IPython now, or when its modules are imported."""
    for name, teach in _LESSONS.items():
        hooks.when_imported(name, _teach)
        if hooks.is_imported(name):
            hooks.seen(name, _teach)
            teach(sys.modules[name])


def _teach(name: str, _own: bool) -> None:
    _LESSONS[name](sys.modules[name])


def _add_rule(autoreload: Any) -> None:
    rules = getattr(autoreload, "UPDATE_RULES", [])
    if any(applies is _applies for applies, _ in rules):
        return

    def update(old: Any, new: Any) -> None:
        old, new = _function(old), _function(new)
        beneath = _upstream(old)
        autoreload.update_function(beneath, _upstream(new))
        if "." not in new.__qualname__:
            # If the patch fails or is applied again, the next reload, or install(), must find all of them.
            _followed.add(new)
            changes.restore([(old, new), (beneath, new)])

    rules.insert(0, (_applies, update))


def _applies(old: Any, new: Any) -> bool:
    functions = [_function(item) for item in (old, new)]
    return all(isinstance(item, FunctionType) for item in functions) and any(map(_concerns, functions))


def _concerns(function: Any) -> bool:
    """Whether a patch has installed this function, or it replaced such a function."""
    known = changes.upstream_of(function) is not None
    return known or (isinstance(function, FunctionType) and function in _followed)


def _upstream(function: FunctionType) -> FunctionType:
    return changes.upstream_of(function) or function


def _function(item: Any) -> Any:
    return item.__func__ if isinstance(item, MethodType) else item


def _keep_out(deduperreload: Any) -> None:
    mixin = getattr(deduperreload, "DeduperReloaderPatchingMixin", None)
    before = getattr(mixin, "patch_function", None)
    if mixin is None or before is None or hasattr(before, "_keeps_out_of_patched_functions"):
        return

    def patch_function(cls: Any, to_patch_to: Any, to_patch_from: Any, is_method: bool) -> None:
        if _concerns(to_patch_to):  # IPython then reloads the module
            raise ValueError(f"{to_patch_to.__qualname__} is replaced by a patch of gemma4_compat")
        before.__func__(cls, to_patch_to, to_patch_from, is_method)

    vars(patch_function)["_keeps_out_of_patched_functions"] = True
    mixin.patch_function = classmethod(patch_function)


_LESSONS = {
    "IPython.extensions.autoreload": _add_rule,
    "IPython.extensions.deduperreload.deduperreload_patching": _keep_out,
}
