"""The head of a language model as it is called for several chunks of tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from gemma4_compat._models import placement


@contextlib.contextmanager
def onloaded(head: Any) -> Iterator[None]:
    """Inside, the offloaded weights of ``head`` and of the modules in it are on the device they compute on.

    A call of an offloaded module brings its weights in and takes them out: with it, a head of several chunks would be
    copied for each of them. Does nothing where nothing is offloaded.
    """
    with contextlib.ExitStack() as stack:
        for module in list(head.modules()):
            hook = placement.offload_hook(module)
            if hook is not None and placement.is_offloaded(module):
                hook.pre_forward(module)
                stack.callback(hook.post_forward, module, None)
                stack.enter_context(placement.hooks_off([module]))
        yield


def device(head: Any) -> Any:
    """Where the head, onloaded, computes; None for one without weights."""
    return next((weight.device for weight in head.parameters()), None)


def trained(head: Any) -> tuple[Any, ...]:
    """The weights of the head that get a gradient."""
    return tuple(weight for weight in head.parameters() if weight.requires_grad)


def is_plain(head: Any) -> bool:
    """Whether the head is one module, such as a linear layer, plain or quantized."""
    return not any(True for _ in head.children())
