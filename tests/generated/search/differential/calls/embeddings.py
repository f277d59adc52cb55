"""Embedding and head: resize, tie, replace, new tokens."""

from __future__ import annotations

from typing import Any

from tests.generated.search.differential.table import CLASSES, EVERYWHERE, Area, Expect
from tests.generated.search.differential.world import World

area = Area("embedding")
USED = ("E2B", "E2B-text", "12B", "E2B-4bit")
SIZES = {
    "more": {"new_num_tokens": 300},
    "fewer": {"new_num_tokens": 253},
    "same": {"new_num_tokens": None},
    "multiple": {"new_num_tokens": 260, "pad_to_multiple_of": 64},
    "no_mean": {"new_num_tokens": 300, "mean_resizing": False},
}


@area.call(variants=SIZES, kinds=USED, places=EVERYWHERE)
def resize(world: World, **options: Any) -> Any:
    """``resize_token_embeddings``"""
    import torch

    embedding = world.model.resize_token_embeddings(**options)
    ids = world.inputs(media=False)["input_ids"]
    with torch.no_grad():
        logits = world.model(input_ids=ids).logits[..., :253]
    return [list(embedding.weight.shape), world.base.config.get_text_config().vocab_size, logits]


@area.call(kinds=("E2B", "E2B-text", "12B"), places=EVERYWHERE)
def resize_and_save(world: World) -> Any:
    """``resize_token_embeddings``, ``save_pretrained``, ``from_pretrained``"""
    import torch

    world.model.resize_token_embeddings(256 + 64, mean_resizing=False)
    folder = world.new_folder()
    world.model.save_pretrained(folder)
    ids = world.inputs(media=False)["input_ids"]
    with torch.no_grad():
        return world.cls.from_pretrained(folder, dtype="auto").eval()(input_ids=ids).logits[..., :256]


@area.call(kinds=USED, places=EVERYWHERE)
def tie(world: World) -> Any:
    """``tie_weights()``"""
    world.model.tie_weights()
    return world.logits()


@area.call(kinds=(*CLASSES, "E2B-lora"), places=EVERYWHERE)
def is_tied(world: World) -> Any:
    """Head and embedding are one tensor, or say so"""
    base = world.base
    return [base.config.tie_word_embeddings, type(base.get_output_embeddings()).__name__, world.logits()]


@area.call(variants=["input", "output"], kinds=CLASSES)
def replaced(world: World, which: str) -> Any:
    """``set_input_embeddings``, ``set_output_embeddings``"""
    import torch

    ids = world.inputs(media=False)["input_ids"]
    torch.manual_seed(0)
    if which == "input":
        own = torch.nn.Embedding(256, 64, dtype=torch.bfloat16)
        world.model.set_input_embeddings(own)
    else:
        own = torch.nn.Linear(64, 256, bias=False, dtype=torch.bfloat16)
        world.model.set_output_embeddings(own)
    with torch.no_grad():
        return world.model(input_ids=ids).logits


@area.call(kinds=CLASSES, places=EVERYWHERE)
def weights_read(world: World) -> Any:
    """``get_input_embeddings().weight``, as vocabularies are read"""
    return [world.base.get_input_embeddings().weight[3], world.base.get_output_embeddings().weight[3]]


@area.call(variants=["auto", "True"], kinds=("E2B", "31B", "E2B-text"))
def new_tokens_lora(world: World, save: str) -> Any:
    """New tokens and a LoRA, saved, and loaded onto a base resized again"""
    import peft
    import torch

    def resized() -> Any:
        torch.manual_seed(3)
        model = world.cls.from_pretrained(world.checkpoint, dtype=torch.bfloat16)
        model.resize_token_embeddings(260, mean_resizing=False)
        return model

    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], exclude_modules=r".*(vision|audio)_tower.*", init_lora_weights=False
    )
    model = resized()
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        rows[256:] = torch.arange(64).to(rows.dtype) / 64
    model = peft.get_peft_model(world.dispatch(model), config).eval()
    ids = torch.tensor([[5, 256, 258, 7, 259]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        folder = world.new_folder()
        model.save_pretrained(folder, save_embedding_layers=True if save == "True" else "auto")
        again = peft.PeftModel.from_pretrained(world.dispatch(resized()), folder).eval()
        return Expect(again(input_ids=ids).logits, before)


@area.call(kinds=("E2B", "E2B-text", "12B"), places=EVERYWHERE)
def trainable_tokens(world: World) -> Any:
    """``trainable_token_indices``: a step, saved, loaded"""
    import peft
    import torch

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj"],
        exclude_modules=r".*(vision|audio)_tower.*",
        trainable_token_indices={"embed_tokens": [3, 7]},
    )
    model = peft.get_peft_model(world.dispatch(world.fresh()), config)
    shown = world.train_step(model, media=False)
    folder = world.new_folder()
    model.eval().save_pretrained(folder)
    before = world.logits(model, media=False)
    again = peft.PeftModel.from_pretrained(
        world.dispatch(world.workspace.load() if not world.text_class else world.workspace.load_text()), folder
    )
    return [shown, before, world.logits(again.eval(), media=False)]
