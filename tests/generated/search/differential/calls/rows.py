"""Rows and texts that must not see one another: packed texts, an adapter for each row, pictures without types."""

from __future__ import annotations

from typing import Any

from tests.generated.search.differential.calls import adapters, forwards, generation
from tests.generated.search.differential.table import Expect
from tests.generated.search.differential.world import World


@forwards.area.call(
    variants=["mask", "no_mask", "no_cache", "no_mask_no_cache"],
    kinds=("E2B-text", "E2B", "12B", "26B", "31B"),
    tolerance=0.02,
)
def packed(world: World, how: str) -> Any:
    """Two texts in one row, with ``position_ids`` that begin again: each as alone"""
    import torch

    ids = world.inputs(media=False)["input_ids"]
    one, other = ids[:, :14], ids[:, 10:].flip(1)
    positions = torch.cat([torch.arange(one.shape[1]), torch.arange(other.shape[1])])[None]
    given: dict[str, Any] = {"input_ids": torch.cat([one, other], 1), "position_ids": positions}
    if how in ("mask", "no_cache"):
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    if "no_cache" in how:
        given["use_cache"] = False
    with torch.no_grad():
        alone = [world.model(input_ids=text).logits for text in (one, other)]
        return Expect(world.model(**given).logits, torch.cat(alone, 1))


@forwards.area.call(variants=["forward", "generate"], kinds=("12B", "26B", "31B", "E2B"))
def picture_without_types(world: World, what: str) -> Any:
    """An image without ``mm_token_type_ids``, which say of each token what it is: the same answer"""
    import torch

    batch = world.inputs()
    untyped = {name: value for name, value in batch.items() if name != "mm_token_type_ids"}
    given = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    with torch.no_grad():
        if what == "generate":
            return Expect(world.model.generate(**untyped, **given), world.model.generate(**batch, **given))
        return Expect(world.model(**untyped).logits, world.model(**batch).logits)


@adapters.area.call(
    variants=["forward", "media", "generate", "beams", "several"],
    kinds=("E2B-lora", "E2B-4bit-lora", "26B-lora", "12B-lora", "31B-lora"),
    tolerance=0.05,
)
def adapter_of_each_row(world: World, what: str) -> Any:
    """``adapter_names=``: each row as in a batch that has its adapter throughout"""
    import torch

    names = ["default", "second", "__base__"]
    world.model.load_adapter(str(adapters.second(world)), adapter_name="second")
    batch = world.inputs(media=what == "media", batch=3)
    given = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    if what == "beams":
        given["num_beams"] = 2
    elif what == "several":
        given |= {"num_beams": 2, "num_return_sequences": 2}

    def asked(rows: list[str]) -> Any:
        with torch.no_grad():
            if what in ("forward", "media"):
                return world.model(**batch, adapter_names=rows).logits
            found = world.model.generate(**batch, adapter_names=rows, **given)
            return found.view(3, -1, found.shape[-1])

    right = [asked([name] * 3)[row] for row, name in enumerate(names)]
    return Expect(asked(names), torch.stack(right))


@adapters.area.call(variants=["raises", "interrupts", "unknown"], kinds=("E2B-lora", "E2B-4bit-lora", "26B-lora"))
def after_adapter_names_failed(world: World, how: str) -> Any:
    """A call with ``adapter_names=`` that fails: the model answers as before it"""
    import torch

    error: type[BaseException] = {"interrupts": KeyboardInterrupt}.get(how, ValueError)

    def stop(*_: Any) -> None:
        raise error("stop")

    before = world.logits()
    handle = world.text.layers[1].register_forward_pre_hook(stop) if how != "unknown" else None
    names = ["absent" if how == "unknown" else "default", "__base__"]
    try:
        with torch.no_grad():
            world.model(**world.inputs(media=False, batch=2), adapter_names=names)
    except (ValueError, KeyboardInterrupt):
        pass
    finally:
        if handle is not None:
            handle.remove()
    return Expect(world.logits(), before)


@adapters.area.call(kinds=("E2B-lora", "E2B-4bit-lora"))
def trained_after_disable(world: World) -> Any:
    """``with model.disable_adapter():``: what is trained afterwards is what was trained before"""
    world.model.requires_grad_(False)
    with world.model.disable_adapter():
        world.logits(media=False)
    return Expect([name for name, value in world.model.named_parameters() if value.requires_grad], [])


@generation.area.call(
    variants={
        "dynamic": {"cache": None},
        "static": {"cache": "static"},
        "edited": {"cache": None, "edited": True},
        "edited_static": {"cache": "static", "edited": True},
    },
    kinds=("E2B", "E2B-text", "12B", "26B", "31B"),
)
def on_the_returned_cache(world: World, cache: str | None, edited: bool = False) -> Any:
    """A second turn on the cache that ``generate`` returns; or a call after that cache was written"""
    import torch

    given: dict[str, Any] = {"min_new_tokens": 3, "max_new_tokens": 3, "do_sample": False}
    given |= {} if cache is None else {"cache_implementation": cache}
    batch = world.inputs(media=False)
    with torch.no_grad():
        first = world.model.generate(**batch, **given, return_dict_in_generate=True)
        if edited:
            for layer in first.past_key_values.layers:
                if getattr(layer, "keys", None) is not None:
                    layer.keys.mul_(-1)
            return Expect(world.model.generate(**batch, **given), first.sequences)
        longer = torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], dim=1)
        given.pop("cache_implementation", None)
        return world.model.generate(longer, past_key_values=first.past_key_values, **given)


@generation.area.call(
    variants={
        "layer": {"part": "layers.1"},
        "attention": {"part": "layers.2.self_attn"},
        "embedding": {"part": "embed_tokens"},
        "norm": {"part": "norm"},
        "memory": {"part": "layers.1", "memory": True},
    },
    kinds=("E2B", "E2B-4bit", "E2B-lora", "12B", "26B"),
)
def after_a_token_failed(world: World, part: str, memory: bool = False) -> Any:
    """A ``generate`` that ends in the middle of its second token: the next one is as before"""
    import torch

    calls: list[int] = []

    def stop(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("stop") if memory else KeyboardInterrupt("stop")

    before = [world.tokens(media=False), world.logits()]
    handle = world.text.get_submodule(part).register_forward_pre_hook(stop)
    try:
        world.tokens(media=False)
    except (torch.OutOfMemoryError, KeyboardInterrupt):
        pass
    finally:
        handle.remove()
    return Expect([world.tokens(media=False), world.logits()], before)
