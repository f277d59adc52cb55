"""Forwards, with every input and output."""

from __future__ import annotations

from typing import Any

from gemma4_compat._lab import tiny, tiny_configs
from tests.generated.search.differential.table import ALL, CLASSES, EVERYWHERE, Area, Expect
from tests.generated.search.differential.world import World

area = Area("forward")
SOME = ("E2B", "E2B-lora", "E2B-4bit", "E2B-8bit", "12B", "26B", "31B")


@area.call(kinds=(*ALL, "31B", "E2B-towers", "12B-4bit", "E2B-4bit-lora"), places=EVERYWHERE)
def plain(world: World) -> Any:
    """Three forwards"""
    return [world.logits(), world.logits(), world.logits(media=False)]


@area.call(
    variants={
        "labels": {"labels": True},
        "logits_to_keep": {"logits_to_keep": 2},
        "hidden_states": {"output_hidden_states": True},
        "return_dict=False": {"return_dict": False},
        "use_cache=False": {"use_cache": False},
        "use_cache": {"use_cache": True},
        "num_items_in_batch": {"labels": True, "num_items_in_batch": 7},
    },
    kinds=("E2B", "E2B-4bit", "E2B-text", "12B"),
)
def options(world: World, labels: bool = False, **given: Any) -> Any:
    """A forward with an option"""
    import torch

    batch = world.inputs()
    if labels:
        given["labels"] = batch["input_ids"]
    with torch.no_grad():
        output = world.model(**batch, **given)
    if isinstance(output, tuple):
        return output[0]
    return [output.loss if labels else None, output.logits, output.hidden_states]


@area.call(kinds=("E2B", "12B"))
def attentions(world: World) -> Any:
    """``output_attentions=True`` with eager attention"""
    import torch

    world.model.set_attn_implementation("eager")
    with torch.no_grad():
        return world.model(**world.inputs(), output_attentions=True).attentions


@area.call(variants=["eager", "sdpa", "flex_attention", "absent"], kinds=("E2B", "E2B-text", "12B"))
def set_attention(world: World, name: str) -> Any:
    """``model.set_attn_implementation(...)``"""
    world.model.set_attn_implementation(name)
    return None if name == "flex_attention" else world.logits(media=False)  # it compiles for minutes


@area.call(
    variants={"padded": {"batch": 2, "padded": True}, "batch": {"batch": 2}, "four": {"batch": 4}},
    kinds=SOME,
)
def batches(world: World, **options: Any) -> Any:
    """A batch of prompts"""
    import torch

    with torch.no_grad():
        return world.model(**world.inputs(**options)).logits


@area.call(variants=["none", "position_ids", "positional", "4d", "bool"], kinds=("E2B", "E2B-text", "12B"))
def masks(world: World, how: str) -> Any:
    """The mask left out, of booleans, of four dimensions; positions given; arguments without names"""
    import torch

    batch = world.inputs(media=False)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        if how == "none":
            return world.model(input_ids=ids).logits
        if how == "positional":
            return world.model(ids).logits
        if how == "position_ids":
            return world.model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(24)[None] + 3).logits
        if how == "bool":
            return world.model(input_ids=ids, attention_mask=mask.bool()).logits
        full = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
        return world.model(input_ids=ids, attention_mask=full).logits


@area.call(variants=["image", "audio"], kinds=("E2B", "E2B-4bit", "12B"))
def one_medium(world: World, medium: str) -> Any:
    """Only an image, or only audio"""
    import torch

    batch = tiny.without(world.inputs(), "image" if medium == "audio" else "input_features")
    with torch.no_grad():
        return world.model(**batch).logits


@area.call(kinds=("E2B", "12B", "26B", "31B"))
def token_types_left_out(world: World) -> Any:
    """Media without ``mm_token_type_ids``"""
    import torch

    batch = world.inputs()
    batch.pop("mm_token_type_ids", None)
    with torch.no_grad():
        return world.model(**batch).logits


@area.call(variants=["text", "media"], kinds=(*CLASSES, "E2B-lora", "26B", "31B"))
def embeddings(world: World, prompt: str) -> Any:
    """``inputs_embeds`` in place of ``input_ids``: the same logits"""
    import torch

    batch = world.inputs(media=prompt == "media")
    with torch.no_grad():
        right = world.model(**batch).logits
        batch["inputs_embeds"] = world.base.get_input_embeddings()(batch.pop("input_ids"))
        return Expect(world.model(**batch).logits, right)


@area.call(kinds=("E2B", "E2B-text"))
def embeddings_float32(world: World) -> Any:
    """``inputs_embeds`` of a float32 model"""
    import torch

    model = world.dispatch(world.fresh().float())
    batch = world.inputs(media=False)
    with torch.no_grad():
        right = model(**batch).logits
        embedded = model.get_input_embeddings()(batch.pop("input_ids"))
        return Expect(model(**batch, inputs_embeds=embedded).logits, right)


@area.call(kinds=("E2B", "E2B-text", "E2B-lora"))
def embeddings_soft(world: World) -> Any:
    """``inputs_embeds`` that are no token's"""
    import torch

    embedded = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.no_grad():
        return world.model(inputs_embeds=embedded).logits.shape


@area.call(kinds=("E2B", "E2B-text"))
def embeddings_and_per_layer(world: World) -> Any:
    """``inputs_embeds`` and ``per_layer_inputs``"""
    import torch

    batch = world.inputs(media=False)
    with torch.no_grad():
        right = world.model(**batch).logits
        ids = batch.pop("input_ids")
        embedded = world.base.get_input_embeddings()(ids)
        per_layer = world.text.get_per_layer_inputs(ids, embedded)
        return Expect(world.model(**batch, inputs_embeds=embedded, per_layer_inputs=per_layer).logits, right)


@area.call(variants=["dynamic", "static", "legacy"], kinds=("E2B", "E2B-text", "12B", "31B"))
def turns(world: World, cache: str) -> Any:
    """Three turns on one cache"""
    import torch
    import transformers

    if cache == "static":
        kept = transformers.StaticCache(config=world.base.config, max_cache_len=64)
    else:
        kept = transformers.DynamicCache(**({"config": world.base.config} if cache == "dynamic" else {}))
    ids = world.inputs(media=False)["input_ids"]
    shown = []
    with torch.no_grad():
        for first, last in ((0, 12), (12, 13), (13, 20)):
            mask = torch.ones(1, last, dtype=torch.long)
            shown.append(
                world.model(
                    input_ids=ids[:, first:last], attention_mask=mask, past_key_values=kept, use_cache=True
                ).logits
            )
    return shown


@area.call(kinds=("E2B", "E2B-lora", "E2B-text", "12B"))
def input_gradients(world: World) -> Any:
    """Gradients of the embeddings that come in"""
    import torch

    embedded = torch.ones(1, 6, 64, dtype=torch.bfloat16) * torch.arange(1, 7)[None, :, None] / 10
    leaf = embedded.to(torch.bfloat16).requires_grad_()
    batch = {"inputs_embeds": leaf, "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    if "12B" not in world.kind:
        inner = world.text.config
        batch["per_layer_inputs"] = torch.ones(
            1, 6, inner.num_hidden_layers, inner.hidden_size_per_layer_input, dtype=torch.bfloat16
        )
    world.model(**batch).logits.float().sum().backward()
    return leaf.grad


@area.call(
    variants=["model", "text", "features", "layer", "mlp", "head", "embedding"],
    kinds=("E2B", "E2B-4bit", "12B"),
    places=EVERYWHERE,
)
def parts(world: World, part: str) -> Any:
    """A part of the model, called by itself"""
    import torch

    batch = world.inputs()
    hidden = torch.ones(1, 3, 64, dtype=torch.bfloat16) / 4
    with torch.no_grad():
        if part == "model":
            return world.base.model(**batch).last_hidden_state
        if part == "text":
            return world.text(input_ids=batch["input_ids"].clamp(max=240)).last_hidden_state
        if part == "features":
            given = {"pixel_values": batch["pixel_values"], "image_position_ids": batch["image_position_ids"]}
            found = world.base.get_image_features(**given)
            return getattr(found, "pooler_output", found)
        if part == "layer":
            world.needs(hasattr(world.text, "get_per_layer_inputs"), "a layer by itself needs more")
            return world.text.layers[0].input_layernorm(hidden)
        if part == "mlp":
            return world.text.layers[0].mlp(hidden)
        if part == "head":
            return world.base.lm_head(hidden)
        return world.base.get_input_embeddings()(batch["input_ids"])


@area.call(kinds=("E2B", "E2B-text"))
def per_layer_inputs(world: World) -> Any:
    """``get_per_layer_inputs`` of the text model"""
    ids = world.inputs(media=False)["input_ids"]
    embedded = world.base.get_input_embeddings()(ids)
    return world.text.get_per_layer_inputs(ids, embedded)


@area.call(
    variants=["both", "neither", "list", "float", "too_large", "short_mask", "too_many_images", "labels_shape"],
    kinds=("E2B", "12B"),
)
def bad_inputs(world: World, how: str) -> Any:
    """Inputs that are wrong: the type of the error"""
    import torch

    batch = world.inputs()
    if how == "both":
        batch["inputs_embeds"] = torch.zeros(1, 24, 64, dtype=torch.bfloat16)
    elif how == "neither":
        del batch["input_ids"]
    elif how == "list":
        batch["input_ids"] = batch["input_ids"].tolist()
    elif how == "float":
        batch["input_ids"] = batch["input_ids"].float()
    elif how == "too_large":
        batch["input_ids"] = batch["input_ids"] + 10_000
    elif how == "short_mask":
        batch["attention_mask"] = batch["attention_mask"][:, :5]
    elif how == "too_many_images":
        batch["input_ids"][0, 4] = tiny_configs.IMAGE_TOKEN - 50
    else:
        batch["labels"] = batch["input_ids"][:, :5]
    with torch.no_grad():
        return world.model(**batch).logits


@area.call(kinds=("E2B", "E2B-text"))
def ignored_labels(world: World) -> Any:
    """Labels that are all -100"""
    import torch

    batch = world.inputs(media=False)
    with torch.no_grad():
        return world.model(**batch, labels=torch.full_like(batch["input_ids"], -100)).loss


@area.call(kinds=SOME)
def long_text(world: World) -> Any:
    """150 tokens, far past the sliding window"""
    import torch

    ids = torch.randint(3, 240, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return world.model(input_ids=ids).logits


@area.call(variants=["raises", "interrupts"], kinds=("E2B", "E2B-4bit"))
def after_an_error(world: World, how: str) -> Any:
    """A forward after one that a hook ended"""
    error = {"raises": ValueError, "interrupts": KeyboardInterrupt}[how]

    def stop(*_: Any) -> None:
        raise error("stop")

    handle = world.text.layers[2].mlp.register_forward_pre_hook(stop)
    try:
        world.logits()
    except (ValueError, KeyboardInterrupt):
        handle.remove()
    return world.logits()
