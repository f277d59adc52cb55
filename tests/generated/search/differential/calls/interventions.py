"""Hooks of the user's, replaced modules and forwards, threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.generated.search.differential.table import Area
from tests.generated.search.differential.world import World

area = Area("hooks")
USED = ("E2B", "E2B-lora", "E2B-4bit", "12B")


@area.call(variants=["forward", "pre", "kwargs", "always", "backward", "pre_backward", "global"], kinds=USED)
def hook(world: World, kind: str) -> Any:
    """A hook on an offloaded layer's MLP"""
    import torch

    module = world.text.layers[2].mlp
    seen: list[Any] = []
    if kind == "forward":
        handle = module.register_forward_hook(lambda _m, _a, output: output * 2)
    elif kind == "pre":
        handle = module.register_forward_pre_hook(lambda _m, args: (args[0] * 0.5,))
    elif kind == "kwargs":
        handle = module.register_forward_hook(lambda _m, _a, _k, output: output * 2, with_kwargs=True)
    elif kind == "always":
        handle = module.register_forward_hook(lambda _m, _a, output: seen.append(output.mean()), always_call=True)
    elif kind == "global":
        handle = torch.nn.modules.module.register_module_forward_hook(lambda m, _a, _o: seen.append(type(m).__name__))
    else:
        register = "full_backward_hook" if kind == "backward" else "full_backward_pre_hook"
        handle = getattr(module, f"register_{register}")(lambda *_: seen.append("called"))
        batch = world.inputs()
        embedded = world.base.get_input_embeddings()
        embedded.register_forward_hook(lambda _m, _a, output: output.requires_grad_())
        world.model(**batch, labels=batch["input_ids"]).loss.backward()
        handle.remove()
        return seen
    with_hook = world.logits()
    handle.remove()
    return [with_hook, world.logits(), sorted(map(str, seen)) if kind == "global" else seen]


@area.call(kinds=USED)
def activations(world: World) -> Any:
    """Hooks on each layer that keep what comes out"""
    kept: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            kept[name] = output[0] if isinstance(output, tuple) else output

        return hook

    for index, layer in enumerate(world.text.layers):
        layer.register_forward_hook(keep(str(index)))
    world.logits()
    return kept


@area.call(variants=["layer", "mlp", "projection"], kinds=USED)
def replaced_forward(world: World, what: str) -> Any:
    """``module.forward`` replaced by a function that calls it"""
    layer = world.text.layers[2]
    module = {"layer": layer, "mlp": layer.mlp, "projection": layer.mlp.up_proj}[what]
    forward = module.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return output if isinstance(output, tuple) else output * 2

    module.forward = doubled
    shown = world.logits()
    module.forward = forward
    return [shown, world.logits()]


@area.call(variants=["identity", "copy"], kinds=USED)
def replaced_module(world: World, how: str) -> Any:
    """A module put in another's place"""
    import copy

    import torch

    layer = world.text.layers[2]
    layer.mlp = torch.nn.Identity() if how == "identity" else copy.deepcopy(layer.mlp)
    return world.logits()


@area.call(kinds=("E2B", "E2B-text", "12B"))
def fewer_layers(world: World) -> Any:
    """A layer taken out"""
    import torch

    world.needs(getattr(world.text.config, "num_kv_shared_layers", 0) == 0 or True, "")
    world.text.layers = torch.nn.ModuleList(list(world.text.layers)[:-1])
    world.text.config.num_hidden_layers -= 1
    return world.logits(media=False)


@area.call(kinds=("E2B", "E2B-lora"))
def parametrized(world: World) -> Any:
    """``torch.nn.utils.parametrize`` on a layer that is at hand"""
    import torch

    class Double(torch.nn.Module):
        def forward(self, value: Any) -> Any:
            return value * 2

    module = world.text.layers[1].mlp.up_proj
    module = getattr(module, "base_layer", module)
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Double())
    return world.logits()


@area.call(variants=["forward", "generate", "train"], kinds=("E2B", "E2B-lora", "12B"))
def threads(world: World, what: str) -> Any:
    """Three threads at once"""
    if what == "train":
        world.needs(world.adapter_kind, "nothing to train")
        for name, parameter in world.model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        batch = world.inputs()

        def run(_index: int) -> Any:
            return world.model(**batch, labels=batch["input_ids"]).loss.detach()

    else:

        def run(_index: int) -> Any:
            return world.logits() if what == "forward" else world.tokens()

    world.logits()
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(run, range(3)))


@area.call(kinds=("E2B", "E2B-4bit"))
def streamed_in_a_thread(world: World) -> Any:
    """``generate`` in a thread, a streamer read in another"""
    import queue

    import transformers

    found: queue.Queue[Any] = queue.Queue()

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def put(self, value: Any) -> None:
            found.put(value.flatten().tolist())

        def end(self) -> None:
            found.put(None)

    model = world.model
    thread = threading.Thread(target=lambda: world.tokens(model, streamer=Streamer()))
    thread.start()
    shown = []
    while (item := found.get(timeout=40)) is not None:
        shown.append(item)
    thread.join()
    return shown


@area.call(kinds=("E2B", "E2B-4bit"))
def forked(world: World) -> Any:
    """A forward in a forked process"""
    import multiprocessing

    model = world.model
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send(world.logits(model).float().numpy().tolist()))
    process.start()
    theirs.close()
    found = mine.recv()  # an EOFError where it died
    process.join()
    import torch

    return torch.tensor(found)
