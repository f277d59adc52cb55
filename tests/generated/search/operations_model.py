"""Operations on the model as a whole: its type, its hooks, its place, the shim under it."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

from tests.generated.search.case import MAIN, Map, owner
from tests.generated.search.sequences_bench import World


def to_dtype(world: World, how: str) -> None:
    import torch

    if how.startswith("to "):
        world.model = world.model.to(getattr(torch, how.removeprefix("to ")))
    else:
        world.model = getattr(world.model, how)()


def prepare_for_training(world: World, checkpointing: bool) -> None:
    from peft import prepare_model_for_kbit_training

    prepare_model_for_kbit_training(world.model, use_gradient_checkpointing=checkpointing)


def resize_token_embeddings(world: World, tokens: int, mean: bool) -> dict[str, Any]:
    embedding = world.model.resize_token_embeddings(tokens, mean_resizing=mean)
    return {"rows": embedding.weight.shape[0], "vocabulary": world.base.config.get_text_config().vocab_size}


def tie_weights(world: World) -> None:
    world.base.tie_weights()


def deepcopy(world: World, keep: str) -> None:
    """Both stay alive; the user goes on with one of them."""
    original, copied = world.model, copy.deepcopy(world.model)
    world.model = {"copy": copied, "original": original}[keep]
    world.kept += [original, copied]


def redispatch(world: World, placement: Map, offloaded_to: str) -> None:
    """The model gets another map, as accelerate's documentation does it.

    The user's own hooks go first: accelerate puts back the ``forward`` that it found, not the one that replaced it.
    """
    from accelerate.hooks import remove_hook_from_module

    remove_user_hooks(world)
    base, world.placement = world.base, placement  # PEFT has none without an active adapter, on one device either
    if world.split:
        remove_hook_from_module(base, recurse=True)
        world.bench.dispatch(base, world.case, offloaded_to, placement, world.new_folder("offload"))


def remove_hooks(world: World) -> None:
    """Everything is brought back to one device."""
    from accelerate.hooks import remove_hook_from_module

    remove_user_hooks(world)
    base, world.placement = world.base, (("", MAIN),)
    if world.split:
        remove_hook_from_module(base, recurse=True)
        if hasattr(base, "hf_device_map"):
            del base.hf_device_map
        base.to(world.main)


def user_hook(world: World, kind: str, layer: int) -> None:
    module = world.text.layers[layer]
    if kind == "replaced_forward":
        forward = module.forward

        @functools.wraps(forward)
        def doubled(*args: Any, **kwargs: Any) -> Any:
            return forward(args[0] * 0.5, *args[1:], **kwargs) if args else forward(**kwargs)

        module.forward = doubled

        def undo() -> None:
            if module.__dict__.get("forward") is doubled:
                module.forward = forward

        world.handles.append(undo)
        return
    hooks: dict[str, Any] = {
        "pre_hook": lambda _module, args: (args[0] * 0.5, *args[1:]) if args else None,
        "hook": lambda _module, _args, output: output if isinstance(output, tuple) else output * 2,
        "full_backward_hook": lambda _module, before, _after: tuple(g if g is None else g * 2 for g in before),
    }
    register = {"pre_hook": "forward_pre_hook", "hook": "forward_hook"}.get(kind, kind)
    world.handles.append(getattr(module, f"register_{register}")(hooks[kind]).remove)


def remove_user_hooks(world: World) -> None:
    while world.handles:
        world.handles.pop()()


def change_weight(world: World, layer: int) -> None:
    """In place, where it is at hand: a norm that the map leaves on the main device."""
    import torch

    names = {id(module): name for name, module in world.base.named_modules()}
    for norm in (world.text.layers[layer].input_layernorm, world.text.norm):
        key = owner(world.placement, names[id(norm)])
        if key is not None and dict(world.placement)[key] == MAIN:
            with torch.no_grad():
                norm.weight.mul_(1.5)
            return


def undo_and_install(world: World) -> None:
    import gemma4_compat

    gemma4_compat.revert()
    gemma4_compat.install()


def collect(world: World) -> dict[str, Any]:
    """Nothing but the user holds the model."""
    for other in world.kept:
        if isinstance(other, World):
            other.close()
    world.kept.clear()
    world.handles.clear()
    dying = weakref.ref(world.base)
    world.model = None
    gc.collect()
    return {"alive": dying() is not None}
