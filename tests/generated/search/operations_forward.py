"""Operations that run the model."""

from __future__ import annotations

import threading
from typing import Any

from gemma4_compat._graphs.recording import RECORDERS
from gemma4_compat._lab.stand_ins import tape
from tests.generated.search.sequences_bench import World

NEW_TOKENS = 4


def forward(
    world: World,
    prompt: str,
    batch: str | None = None,
    attentions: bool = False,
    autocast: str | None = None,
    gradients: bool = False,
    embeddings: bool = False,
) -> dict[str, Any]:
    """``attentions``: with them and the hidden states; ``embeddings``: those of the tokens come in, not the tokens."""
    import torch

    inputs = world.inputs(prompt, batch)
    with torch.set_grad_enabled(gradients), world.autocast(autocast):
        if embeddings:
            inputs["inputs_embeds"] = world.base.get_input_embeddings()(inputs.pop("input_ids"))
        output = world.model(**inputs, output_attentions=attentions, output_hidden_states=attentions)
    shown = {"logits": output.logits.detach()}
    if attentions:
        shown |= {f"attentions {index}": value.detach() for index, value in enumerate(output.attentions)}
        shown |= {f"hidden {index}": value.detach() for index, value in enumerate(output.hidden_states)}
    return shown


def generate(world: World, prompt: str, mode: str, static: bool = False) -> dict[str, Any]:
    """``static``: with a static cache; steps of the split model are replayed, those on one device run eagerly."""
    import torch

    options: dict[str, Any] = {
        "greedy": {"do_sample": False},
        "sample": {"do_sample": True, "temperature": 1.3, "top_k": 50},
        "beams": {"do_sample": False, "num_beams": 2},
    }[mode]
    if static:
        options |= {"cache_implementation": "static", "disable_compile": not world.split}
    with torch.no_grad(), tape.standing_in(RECORDERS):
        found = world.model.generate(
            **world.inputs(prompt), **options, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    return {"tokens": found.sequences, "logits": torch.cat(found.logits)}


def turns(world: World, prompt: str, turns: int) -> dict[str, Any]:
    """A conversation on one cache: each turn brings its tokens, and the mask of all there are."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=world.base.config.get_text_config())
    batch = world.inputs(prompt)
    shown: dict[str, Any] = {}
    with torch.no_grad():
        for turn in range(turns):
            shown[f"logits {turn}"] = world.model(**batch, past_key_values=cache, use_cache=True).logits
            ids = world.inputs("text")["input_ids"][:, turn : turn + 6]
            mask = torch.cat([batch["attention_mask"], torch.ones_like(ids)], dim=1)
            batch = {"input_ids": ids, "attention_mask": mask}
    return shown


def failing_forward(world: World, where: str, layer: int, gradients: bool) -> dict[str, Any]:
    """A hook of the user's raises in the middle of a forward; then the hook is gone."""
    import torch

    part = world.text.layers[layer]
    module = {"layer": part, "mlp": part.mlp, "head": world.base.get_output_embeddings()}[where]

    def fail(*_: Any) -> None:
        raise _StopHereError("stop")

    handle = module.register_forward_pre_hook(fail)
    raised = False
    try:
        with torch.set_grad_enabled(gradients):
            world.model(**world.inputs("text"))
    except _StopHereError:
        raised = True
    finally:
        handle.remove()
    return {"raised": raised}


def failing_backward(world: World, layer: int) -> dict[str, Any]:
    """A hook of the user's raises in the middle of a backward pass."""
    import torch

    def fail(_gradient: Any) -> None:
        raise _StopHereError("stop")

    def watch(_module: Any, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(fail)

    handle = world.text.layers[layer].register_forward_hook(watch)
    raised = False
    try:
        embeddings = world.base.get_input_embeddings()
        inputs = world.inputs("text")
        leaf = embeddings(inputs.pop("input_ids")).detach().requires_grad_()
        with torch.enable_grad():
            world.model(**inputs, inputs_embeds=leaf).logits.float().sum().backward()
    except _StopHereError:
        raised = True
    finally:
        handle.remove()
        for parameter in world.model.parameters():
            parameter.grad = None
    return {"raised": raised}


class _StopHereError(Exception):
    """What a user's hook raises."""


def to_model_device(world: World) -> dict[str, Any]:
    """As on every model card: inputs go to ``model.device``."""
    import torch

    with torch.no_grad():
        batch = {name: value.to(world.model.device) for name, value in world.inputs("text").items()}
        return {"logits": world.model(**batch).logits}


def threads(world: World, number: int) -> dict[str, Any]:
    """Several forwards at once; each gives what it gives alone.

    So on one device they come one after another: there threads are upstream's business, and bitsandbytes, for one,
    repacks a 4-bit weight for the CPU in its first forward, half of it before another thread's.
    """
    import torch

    if not world.split:
        # On a CPU with AVX512-BF16 bitsandbytes packs 4-bit weights in the first forward; in two threads, it fails.
        with torch.no_grad():
            world.model(**world.inputs("text"))
    found: dict[str, Any] = {}
    errors: list[BaseException] = []

    def run(name: str) -> None:
        try:
            with torch.no_grad():
                for _ in range(2):
                    found[name] = world.model(**world.inputs("text")).logits
        except BaseException as error:  # noqa: BLE001  (raised below, in the thread that asked)
            errors.append(error)

    started = [threading.Thread(target=run, args=(f"logits {index}",)) for index in range(number)]
    for thread in started:
        thread.start()
        if not world.split:
            thread.join()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return dict(sorted(found.items()))


def second_model(world: World) -> dict[str, Any]:
    """Another model of the same checkpoint and map, used in turns with the first one."""
    import torch

    other = World(world.bench, world.case, split=world.split)
    world.kept.append(other)
    shown = {}
    with torch.no_grad():
        for turn in range(2):
            shown[f"first {turn}"] = world.model(**world.inputs("text")).logits
            shown[f"second {turn}"] = other.model(**other.inputs("text")).logits
    return shown
