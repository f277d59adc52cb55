"""Call the head of a language model for several chunks of tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._offload import model_lock


@contextlib.contextmanager
def onloaded(head: Any) -> Iterator[None]:
    """Inside, the offloaded weights of ``head`` and of the modules in it are on the device they compute on.

    Each call of an offloaded module onloads its weights and offloads them again, so without this the head would be
    copied once per chunk. Other threads wait: the backward pass of a loss comes here before any layer takes the lock.
    Does nothing if nothing is offloaded.
    """
    with contextlib.ExitStack() as stack:
        for lock in filter(None, map(model_lock.of, head.modules())):
            stack.enter_context(lock.held())
        for module in list(head.modules()):
            hook = module_hooks.offload_hook(module)
            if hook is not None and module_hooks.is_offloaded(module):
                hook.pre_forward(module)
                stack.callback(hook.post_forward, module, None)
                stack.enter_context(module_hooks.hooks_off([module]))
        yield


def device(head: Any) -> Any:
    """The device on which the onloaded head computes; None if it has no weights."""
    return next((weight.device for weight in head.parameters()), None)


def trained(head: Any) -> tuple[Any, ...]:
    """The weights of the head that get a gradient."""
    return tuple(weight for weight in head.parameters() if weight.requires_grad)


def is_plain(head: Any) -> bool:
    """Whether the head is one module, such as a linear layer, plain or quantized."""
    return not any(True for _ in head.children())
