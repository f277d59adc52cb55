"""Why a module of a text layer must be computed as a whole, not in chunks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from gemma4_compat._engine import changes

ID = "transformers-chunked-mlp"


def is_on(module: Any, suffix: str) -> bool:
    """Whether the patch is applied to the text model of this module's family. ``suffix``: of the class's name."""
    kind = type(module)
    model = vars(sys.modules[kind.__module__]).get(kind.__name__.removesuffix(suffix) + "TextModel")
    return model is not None and changes.is_on(model.forward, ID)


def is_traced() -> bool:
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
