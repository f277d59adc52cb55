"""What happens around a model between two calls of ``generate``: hooks, copies, the shim itself, held caches."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

from tests import torch_state
from tests.generated.search.replay_world import ReplayWorld

GRAPHS = "transformers-graph-decoding"


class _Rolled:
    """As a library's hook: it does the same for every token."""

    __module__ = "peft.hooks"

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __call__(self, _module: Any, _given: Any, output: Any) -> Any:
        return output.roll(self.shift, -1)


def hook(world: ReplayWorld, layer: int, kind: str) -> None:
    """A hook of the user's, or of a library's, on a module or on all."""
    import torch

    norm = world.layer(layer).input_layernorm

    def own(_module: Any, *given: Any) -> Any:
        return None if len(given) < 2 else -given[-1]

    def everywhere(module: Any, _given: Any, output: Any) -> Any:
        return -output if module is norm else None

    if kind == "library":
        handle = world.layer(layer).mlp.register_forward_hook(_Rolled(1 + len(world.handles)))
    elif kind == "before":
        handle = norm.register_forward_pre_hook(lambda _module, given: (-given[0],))
    elif kind == "everywhere":
        handle = torch.nn.modules.module.register_module_forward_hook(everywhere)
        world.undone.callback(handle.remove)
    elif kind == "model":
        handle = world.base.register_forward_hook(lambda *_: None)
    else:
        handle = norm.register_forward_hook(own)
    world.handles.append(handle)


def remove_hooks(world: ReplayWorld) -> None:
    for handle in world.handles:
        handle.remove()
    world.handles.clear()


def copied(world: ReplayWorld, by: str, keep: bool) -> None:
    """A copy goes on; the first model may stay."""
    import torch

    if keep:
        world.kept.append(world.model)
    if by == "deepcopy":
        world.model = copy.deepcopy(world.model)
    else:
        stream = io.BytesIO()
        torch.save(world.model, stream)
        stream.seek(0)
        world.model = torch.load(stream, weights_only=False)


def decode_fast(world: ReplayWorld, enabled: bool) -> None:
    import gemma4_compat

    gemma4_compat.decode_fast(world.model, enabled=enabled)


def undo_and_install(world: ReplayWorld, patch: str | None) -> None:
    import gemma4_compat

    gemma4_compat.revert(patch)
    gemma4_compat.install()


def undo(world: ReplayWorld, patch: str) -> None:
    """Until the next ``install``, which the end of the sequence does."""
    import gemma4_compat

    gemma4_compat.revert(patch)
    world.undone.callback(gemma4_compat.install)


def hold_cache(world: ReplayWorld) -> None:
    """Somebody keeps the cache that a call returns."""
    import torch

    ids = torch.full((1, 4), 9)
    world.kept.append(
        world.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            cache_implementation="static",
            max_new_tokens=3,
            min_new_tokens=3,
            do_sample=False,
            return_dict_in_generate=True,
        )
    )


def edit_cache(world: ReplayWorld, by: str) -> None:
    """Somebody writes into the caches that calls have returned, or cuts them."""
    held = [found.past_key_values for found in world.kept if getattr(found, "past_key_values", None) is not None]
    if not held:
        raise ValueError("no cache is held")
    for cache in held:
        if by == "reset":
            cache.reset()
        for layer in cache.layers if by != "reset" else ():
            if getattr(layer, "keys", None) is not None:
                layer.keys.mul_(-1)


def let_go(world: ReplayWorld) -> None:
    world.kept.clear()
    gc.collect()


def longest_cache(world: ReplayWorld, length: int | None) -> None:
    """Since transformers 5.13."""
    world.base.generation_config.max_cache_len = length


def settings(world: ReplayWorld, what: str) -> None:
    """Of PyTorch, for all that follows in the sequence."""
    import torch

    world.undone.callback(torch_state.put, torch_state.now())
    if what == "precision":
        torch.set_float32_matmul_precision("medium")
    elif what == "type":
        torch.set_default_dtype(torch.float64)
    else:
        torch.use_deterministic_algorithms(True)


def forward(world: ReplayWorld) -> None:
    """A plain forward, between the steps that a graph serves."""
    import torch

    ids = torch.full((1, 4), 7)
    with torch.no_grad():
        world.model(input_ids=ids, attention_mask=torch.ones_like(ids))
