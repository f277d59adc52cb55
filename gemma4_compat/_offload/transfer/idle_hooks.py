"""Idle hooks: bypass accelerate's hooks that have nothing to do while a dispatched model runs.

``dispatch_model`` puts a hook on every module, including those that stay on the accelerator. It moves inputs that are
already there, 18 times per layer, and costs a tenth or more of the decoding speed. When everything computes on one
device, the model's own hook has moved the inputs, and the other hooks find nothing to move. A model that is entirely
on that device has no such hooks.

They are bypassed for the forward of the model and restored after it. A module that is called on its own has its hook.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._offload import torch_internals

_HOOKS = attached.IDLE
#: By the module that calls it, which keeps it alive: it holds that module's parts. Also by the models inside it.
_bypasses: weakref.WeakKeyDictionary[Any, weakref.ref[Bypass]] = weakref.WeakKeyDictionary()


def install(model: Any) -> bool:
    """Bypass the idle hooks of a dispatched model; returns False, and does nothing, if several devices compute."""
    uninstall(model)
    device = module_hooks.hook_device(model)
    hooked = [module for module in model.modules() if "_hf_hook" in vars(module)]
    if device is None or any(module_hooks.hook_device(module) != device for module in hooked):
        return False
    # A tower runs once per prompt, and has a hook that moves its inputs: its modules are not touched for every token.
    towers = [
        module for name, module in model.named_modules() if name.endswith("_tower") and "_hf_hook" in vars(module)
    ]
    inside = {id(part): tower for tower in towers for part in tower.modules() if part is not tower}
    found = False
    for root in (model, *towers):
        own = [part for part in hooked if part is not model and inside.get(id(part), model) is root]
        bypass = Bypass(root, [HookedForward(part) for part in own if _only_moves_inputs(part)])
        if bypass.forwards:
            wrapped = [part for part in root.modules() if hasattr(type(part), "generate")]  # as in a PeftModel
            _bypasses.update(dict.fromkeys([root, *wrapped], weakref.ref(bypass)))
            before, after = bypass.pre_forward, bypass.post_forward
            _HOOKS.add(
                root,
                root.register_forward_pre_hook(torch_internals.uncompiled(before), prepend=True),
                root.register_forward_hook(torch_internals.uncompiled(after), always_call=True),
            )
            found = True
    return found


def uninstall(model: Any) -> None:
    """Leave the hooks where they are."""
    for module in model.modules():
        _HOOKS.remove(module)
        _bypasses.pop(module, None)


def renew(model: Any) -> None:
    """Install again, where it was installed, after a module with a hook was replaced."""
    if any(module in _HOOKS for module in model.modules()):
        install(model)


@contextlib.contextmanager
def put_back(model: Any) -> Iterator[None]:
    """Inside, modules are what they are between two forwards, also if threads are in one. They compute the same."""
    known = _bypasses.get(model)
    bypass = None if known is None else known()
    if bypass is None:
        yield
        return
    bypass.look(1)
    try:
        yield
    finally:
        bypass.look(-1)


def is_own(function: Any) -> bool:
    """Whether a hook on a model is one of these, which look at no tensor."""
    method = getattr(function, "__wrapped__", function)  # of torch.compiler.disable
    return isinstance(getattr(method, "__self__", None), Bypass)


def _only_moves_inputs(module: Any) -> bool:
    hook = vars(module)["_hf_hook"]
    return (
        type(hook).__name__ == "AlignDevicesHook"
        and not hook.offload
        and not hook.io_same_device
        and attached.COPYS_WEIGHT not in vars(module)  # the hook will offload again
        and is_accelerates_forward(module)
    )


def is_accelerates_forward(module: Any) -> bool:
    """Whether the ``forward`` of a module with a hook is the one that accelerate put there."""
    forward = vars(module).get("forward")
    return isinstance(forward, functools.partial) and forward.func.__module__ == "accelerate.hooks"


class Bypass:
    """Bypasses hooks that only move inputs inside a module, its ``root``, during its forward."""

    def __init__(self, root: Any, forwards: list[HookedForward]) -> None:
        self.forwards = forwards
        self._root = weakref.ref(root)
        self._inside: set[int] = set()  # threads; one that was interrupted (Ctrl-C) has not left
        self._looks = 0  # how many look at the hooks
        self._bypassed = False
        self._mutex = threading.Lock()  # nothing is offloaded: several threads may be in the model at once

    def pre_forward(self, module: Any, _inputs: Any) -> None:
        """The hook before the module's forward."""
        if module is not self._root():  # a deep copy
            return
        with self._mutex:
            self._inside.add(threading.get_ident())
            self._switch()

    def post_forward(self, module: Any, _inputs: Any, _output: Any) -> None:
        """The hook after the module's forward, also after a failed one."""
        if module is not self._root():
            return
        with self._mutex:
            self._inside.discard(threading.get_ident())
            self._switch()

    def look(self, change: int) -> None:
        """Count one more or one fewer that looks at the hooks; they stay in place while any does."""
        with self._mutex:
            self._looks += change
            self._switch()

    def _switch(self) -> None:
        bypassed = bool(self._inside) and not self._looks
        if bypassed != self._bypassed:
            for forward in self.forwards:
                forward.unwrap() if bypassed else forward.wrap()
            self._bypassed = bypassed


class HookedForward:
    """The ``forward`` that accelerate put on a module with its hook, and the module's own forward.

    Attributes:
        module: the module with the hook.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._attributes = vars(module)
        self._hook = self._attributes["_hf_hook"]
        self._hooked = self._attributes["forward"] if is_accelerates_forward(module) else None
        self._outer: Any = None
        self._watched: Any = None

    def watch(self, after: Callable[[Any], None]) -> None:
        """Call ``after`` with the module's output in forwards that are ``watched``."""
        attributes = self._attributes

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = attributes["_old_forward"](*args, **kwargs)
            after(output)
            return output

        self._watched = forward

    def unwrap(self, *, watched: bool = False, instead: Callable[..., Any] | None = None) -> None:
        """Let the module run without its hook, with its own forward or with ``instead``. Does nothing if the hook was
        replaced or removed since.

        Also does nothing if the hook's forward has been wrapped, for example by a profiler.
        """
        attributes = self._attributes
        if attributes.get("_hf_hook") is not self._hook or "_old_forward" not in attributes:
            return
        inner, current = attributes["_old_forward"], attributes.get("forward")
        own = instead or (self._watched if watched and self._watched is not None else inner)
        # The inner one, if another HookedForward has unwrapped the module.
        if current is not own and (current is self._hooked or current is inner):
            self._outer, attributes["forward"] = current, own

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside, an unwrapped module runs its own forward, and nobody sees its output."""
        attributes = self._attributes
        if self._watched is None or attributes.get("forward") is not self._watched:
            yield
            return
        attributes["forward"] = attributes["_old_forward"]
        try:
            yield
        finally:
            attributes["forward"] = self._watched

    def wrap(self) -> None:
        """Undo :meth:`unwrap`."""
        outer, self._outer = self._outer, None
        if outer is not None and self._attributes.get("_hf_hook") is self._hook:
            self._attributes["forward"] = outer
