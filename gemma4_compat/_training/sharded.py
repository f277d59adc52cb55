"""A head that FSDP shards as its own unit: its weights are gathered once per forward, however many chunks there are.

A call of a sharded module gathers its weights, and a backward pass through that call reduces their gradients. One call
per chunk would gather once per chunk, and processes may have different numbers of chunks. The gradients of the head
would belong to weights that are gone by the time they are needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

_WRAPPED = "_fsdp_wrapped_module"  # the child of FSDP1's wrapper that it wraps


def call(head: Any, states: Any, function: Callable[[Any], Any]) -> Any:
    """``function(states)`` within one call of each module in ``head`` that is such a unit.

    Inside, their weights are whole, and calling them neither gathers nor reduces. ``function`` returns a scalar that
    depends on ``states`` and the head's weights.
    """
    for module in reversed(list(head.modules())):
        if _WRAPPED in module._modules:
            function = functools.partial(_in_wrapper, module, function)
        elif any(map(_is_fsdps, module._forward_pre_hooks.values())):
            function = functools.partial(_between_hooks, module, function)
    return function(states)


def _is_fsdps(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _between_hooks(module: Any, function: Callable[[Any], Any], states: Any) -> Any:
    """FSDP2, which uses hooks before and after a call."""
    policy = module._get_fsdp_state()._mp_policy
    inputs_as = policy.param_dtype if policy.cast_forward_inputs else None

    def cast_inputs(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tuple(_cast(value, inputs_as) for value in args), kwargs

    def cast_output(module: Any, args: Any, output: Any) -> Any:
        return _cast(output, policy.output_dtype)

    with _exchanged(module._forward_pre_hooks, cast_inputs) as before:
        with _exchanged(module._forward_hooks, cast_output) as after:
            for hook in before:
                (given,), _ = hook(module, (states,), {})
                states = given if given.dtype == states.dtype else states  # otherwise it would be cast in each chunk
            total = function(states)
        for hook in after:
            hook(module, (states,), total)  # its result may be cast and is otherwise the same
    return total


def _cast(value: Any, dtype: Any) -> Any:
    import torch

    wanted = dtype is not None and torch.is_tensor(value) and value.is_floating_point()
    return value.to(dtype) if wanted else value


@contextlib.contextmanager
def _exchanged(hooks: dict[int, Any], other: Callable[..., Any]) -> Iterator[list[Any]]:
    """Inside, ``other`` takes the places of FSDP's hooks among the user's; yields FSDP's hooks."""
    own = {key: hook for key, hook in hooks.items() if _is_fsdps(hook)}
    hooks.update(dict.fromkeys(own, other))
    try:
        yield list(own.values())
    finally:
        hooks.update(own)


def _in_wrapper(module: Any, function: Callable[[Any], Any], states: Any) -> Any:
    """FSDP1, whose wrapper has a forward around that of the wrapped module."""
    import torch

    wrapped = module._modules[_WRAPPED]

    class Once(torch.nn.Module):  # type: ignore[misc] # torch is not typed here
        def forward(self, given: Any) -> Any:
            cast_to = None if given.dtype == states.dtype else given.dtype
            module._modules[_WRAPPED] = wrapped
            vars(module)["forward"] = lambda *args, **kwargs: wrapped(*(_cast(arg, cast_to) for arg in args), **kwargs)
            try:
                return function(given)
            finally:
                vars(module).pop("forward")

    module._modules[_WRAPPED] = Once()
    try:
        return module.forward(states)
    finally:
        module._modules[_WRAPPED] = wrapped
