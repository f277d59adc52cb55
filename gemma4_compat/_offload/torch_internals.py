"""The private torch interfaces that streaming and the model lock use, checked each time before use.

torch promises none of them. If one is missing, a dispatched model keeps accelerate's own offloading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.io import notice

_GRAPH_TASK = "torch._C._current_graph_task_id"
_QUEUE_CALLBACK = "torch.autograd.Variable._execution_engine.queue_callback"
_RESIZE = "torch.UntypedStorage.resize_"


def graph_task() -> int:
    """The id of the backward pass that is running in this thread; -1 outside a backward pass."""
    import torch

    return int(torch._C._current_graph_task_id())


def queue_callback(callback: Callable[[], None]) -> None:
    """Have this thread's backward pass call ``callback`` at its end, or drop it if the pass fails."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(callback)


def uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` as a hook that torch.compile does not compile, between its graphs, like accelerate's hooks.

    A model with accelerate's hooks cannot be pickled. The name makes this hook raise the same error as theirs.
    """
    import torch

    hook: Any = torch.compiler.disable(method)
    hook.__qualname__ = f"uncompiled.<locals>.{method.__name__}"
    return hook  # type: ignore[no-any-return]


def skipped(function: Callable[..., Any]) -> None:
    """Have torch.compile run this function as Python, and compile what it calls."""
    from torch._dynamo import decorators

    decorators.skip(function)


def resize(tensor: Any, size: int) -> None:
    """Give a byte tensor's memory ``size`` bytes. Views of the tensor stay views of it."""
    tensor.untyped_storage().resize_(size)


def is_graph_kept() -> bool:
    """Whether the running backward pass may run again (``retain_graph``); True if this torch cannot say."""
    import torch

    ask = getattr(getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def missing() -> tuple[str, ...]:
    """What the installed torch lacks of all this; empty if it has everything."""
    import torch

    found = []
    try:
        graph_task()
    except (AttributeError, TypeError, ValueError):
        found.append(_GRAPH_TASK)
    if not callable(getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)):
        found.append(_QUEUE_CALLBACK)
    memory = torch.empty(1, dtype=torch.uint8, device="cpu")
    try:
        resize(memory, 0)
        resize(memory, 2)
        resizes = bool(memory.untyped_storage().nbytes() == 2)
    except (AttributeError, TypeError, RuntimeError):
        resizes = False
    return (*found, *(() if resizes else (_RESIZE,)))


def warn(absent: tuple[str, ...]) -> None:
    """Log once what a model goes without."""
    if absent in _warned:
        return
    _warned.add(absent)
    notice.warn_user(
        f"this torch lacks {' and '.join(absent)}: offloaded layers are left to accelerate's own offloading, which "
        "gives the same outputs and is slower, and only one thread at a time may use such a model. Another release "
        "of torch, or a newer gemma4_compat, brings the speed back."
    )


_warned: set[tuple[str, ...]] = set()


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has a shape and no values, like those of ``FakeTensorMode``."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
