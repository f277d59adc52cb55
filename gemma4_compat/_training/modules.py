"""What training steps ask of a module: its weights, its forward, and whether it may be computed in chunks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gemma4_compat._engine import changes
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._offload import model_lock

ID = "transformers-chunked-mlp"
_HOOKED = "_old_forward"  # accelerate's name for the forward that its hook calls


def is_on(module: Any, suffix: str) -> bool:
    """Whether the patch is applied to the text model of this module's family. ``suffix``: of the class's name."""
    kind = type(module)
    model = vars(sys.modules[kind.__module__]).get(kind.__name__.removesuffix(suffix) + "TextModel")
    return model is not None and changes.is_on(model.forward, ID)


def trains(module: Any) -> bool:
    """Whether a module runs in a training step that nothing traces."""
    import torch

    records = bool(module.training) and torch.is_grad_enabled()
    return records and not torch.compiler.is_compiling() and not _is_traced()


def _is_traced() -> bool:
    """Whether torch.func or a forward derivative is at work, which a Function without their rules would end."""
    import torch

    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch.jit.is_tracing()
    )


def unsupported_reason(module: Any) -> str | None:
    """Why this module must be computed as a whole; None if nothing is in the way."""
    for part in module.modules():
        if getattr(part, "_is_fsdp_managed_module", False):
            return "FSDP shards them, and gathers their weights for one call"
        if any("ALora" in type(variant).__name__ for variant in getattr(part, "lora_variant", {}).values()):
            return "aLoRA looks for its invocation in whole sequences"
        owner = getattr(vars(part).get("forward"), "__self__", None)
        if type(owner).__module__.startswith("peft.tuners.xlora"):
            return "X-LoRA scales each token of whole sequences"
    for weight in module.parameters():
        if hasattr(weight, "ds_id"):
            return "DeepSpeed ZeRO-3 shards them, and gathers their weights for one call"
        if hasattr(weight, "device_mesh"):
            return "tensor parallelism shards their weights"
    return None


@contextlib.contextmanager
def as_views(module: Any, weights: Sequence[Any]) -> Iterator[list[Any]]:
    """Inside, the module computes with views of these weights: the gradient of a view is that of this one use."""
    import torch

    with torch.enable_grad(), contextlib.ExitStack() as stack:
        views = [weight.view_as(weight) for weight in weights]
        own = {id(weight): view for weight, view in zip(weights, views)}
        for part in module.modules() if own else ():
            for name, weight in part._parameters.items():
                if id(weight) in own:
                    part._parameters[name] = own[id(weight)]
                    stack.callback(part._parameters.__setitem__, name, weight)
        yield views


@contextlib.contextmanager
def onloaded(module: Any) -> Iterator[None]:
    """Inside, the offloaded weights of a module and of those in it are on the device they compute on.

    Each call of an offloaded module onloads its weights and offloads them again, so without this a head would be
    copied once per chunk. Other threads wait: the backward pass of a loss comes here before any layer takes the lock.
    Does nothing if nothing is offloaded.
    """
    with contextlib.ExitStack() as stack:
        for lock in filter(None, map(model_lock.of, module.modules())):
            stack.enter_context(lock.held())
        for part in list(module.modules()):
            hook = module_hooks.offload_hook(part)
            if hook is not None and module_hooks.is_offloaded(part):
                hook.pre_forward(part)
                stack.callback(hook.post_forward, part, None)
                stack.enter_context(module_hooks.hooks_off([part]))
        yield


def trained(module: Any) -> tuple[Any, ...]:
    """The weights of a module that get a gradient."""
    return tuple(weight for weight in module.parameters() if weight.requires_grad)


def replace_forward(module: Any, function: Callable[..., Any]) -> None:
    """Replace a forward inside of accelerate's hook.

    One around the hook's would keep the layer from being streamed (``_offload.transfer.module_groups``), and would get
    weights that are not there yet.
    """
    in_place.replace(module, _HOOKED if _HOOKED in vars(module) else "forward", function)


def restore_forward(module: Any, function: Callable[..., Any]) -> None:
    """Undo a replacement by this function, wherever a hook has put it since."""
    for name in ("forward", _HOOKED):
        in_place.restore(module, name, function)
