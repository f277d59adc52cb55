"""The hooks of modules: which dictionaries hold them, and how many of them do something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.state import capturing

_FORWARD = {"_forward_pre_hooks": "a forward pre-hook", "_forward_hooks": "a forward hook"}
_BACKWARD = {"_backward_pre_hooks": "a backward pre-hook", "_backward_hooks": "a backward hook"}
_MARKS = "make_inputs_require_grads"


def kinds(*, backward: bool = False) -> dict[str, str]:
    """The attributes of a module that hold its hooks of forwards, and of backward passes; and what such a hook is."""
    return _FORWARD | (_BACKWARD if backward else {})


def on_every_module(*, backward: bool = False) -> Iterator[dict[Any, Any]]:
    """The hooks of all modules, in the order of :func:`kinds`."""
    import torch

    for kind in kinds(backward=backward):
        yield getattr(torch.nn.modules.module, f"_global{kind}")


def counted(hooks: dict[Any, Any]) -> int:
    """How many hooks there are; all that mark inputs count as one, and those that collect outputs as none."""
    found = [function for function in hooks.values() if not collects_outputs(function)]
    others = [function for function in found if not marks_inputs(function)]
    return len(others) + (len(others) != len(found))


def marks_inputs(function: Any) -> bool:
    """Whether it is the hook that has embeddings require a gradient: one more each time checkpointing is turned on."""
    return getattr(function, "__name__", "") == _MARKS and function.__module__ == "transformers.modeling_utils"


def collects_outputs(function: Any) -> bool:
    """Whether it is transformers' hook that collects hidden states: nothing, where they are not asked for."""
    return getattr(function, "__module__", "") == capturing.MODULE
