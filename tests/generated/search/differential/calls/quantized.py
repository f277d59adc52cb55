"""Quantized models."""

from __future__ import annotations

from typing import Any

from tests.generated.search.differential.table import QUANTIZED, Area, Expect
from tests.generated.search.differential.world import World

area = Area("quantized")
ONE = ("one",)

CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "double": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "compute_float32": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"},
    "storage_bf16": {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
    "8bit": {"load_in_8bit": True},
    "threshold_0": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "fp16_weight": {"load_in_8bit": True, "llm_int8_has_fp16_weight": True},
    "skip": {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head", "model.vision_tower", "model.audio_tower"]},
    "both": {"load_in_4bit": True, "load_in_8bit": True},
    "neither": {},
}


@area.call(
    variants={name: {"options": options} for name, options in CONFIGS.items()},
    kinds=("E2B", "E2B-text", "12B"),
)
def config(world: World, options: dict[str, Any]) -> Any:
    """``from_pretrained(quantization_config=BitsAndBytesConfig(...))``, dispatched"""
    import torch
    from transformers import BitsAndBytesConfig

    given = BitsAndBytesConfig(**options)
    if not world.text_class and given.llm_int8_skip_modules is None:
        given.llm_int8_skip_modules = [
            "lm_head",
            "model.vision_tower",
            "model.audio_tower",
            "embed_vision",
            "embed_audio",
        ]
    model = world.cls.from_pretrained(
        world.checkpoint, quantization_config=given, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    return world.logits(world.dispatch(model.eval()))


@area.call(variants=["dequantize", "kbit", "kbit_checkpointed", "train"], kinds=QUANTIZED)
def model(world: World, what: str) -> Any:
    """``dequantize()``, ``prepare_model_for_kbit_training``, a step of a plain quantized model"""
    import peft

    if what == "dequantize":
        return world.logits(world.model.dequantize())
    if what == "train":
        return world.train_step()
    prepared = peft.prepare_model_for_kbit_training(
        world.model, use_gradient_checkpointing=what == "kbit_checkpointed"
    )
    return world.logits(prepared)


@area.call(kinds=("E2B-4bit-lora", "E2B-8bit-lora"))
def kbit_step(world: World) -> Any:
    """``prepare_model_for_kbit_training``, a LoRA, a step"""
    import peft
    import torch

    torch.manual_seed(0)
    prepared = peft.prepare_model_for_kbit_training(world.dispatch(world.fresh()))
    config = peft.LoraConfig(r=4, target_modules=r".*language_model.*q_proj")
    return world.train_step(peft.get_peft_model(prepared, config))


@area.call(kinds=("E2B-4bit-lora",))
def kbit_trainer(world: World) -> Any:
    """``prepare_model_for_kbit_training``, a LoRA, ``Trainer.train()``"""
    import peft
    import torch

    from tests.generated.search.differential.calls import training

    torch.manual_seed(0)
    prepared = peft.prepare_model_for_kbit_training(world.dispatch(world.fresh()))
    config = peft.LoraConfig(r=4, target_modules=r".*language_model.*q_proj")
    world.__dict__["model"] = peft.get_peft_model(prepared, config)
    trainer = training._trainer(world)
    trainer.train()
    return training._losses(trainer)


@area.call(kinds=QUANTIZED)
def used_and_read(world: World) -> Any:
    """``state_dict()`` after a forward is the one before it"""
    before = {name: value.clone() for name, value in world.model.state_dict().items()}
    world.logits()
    return Expect(dict(world.model.state_dict()), before)


@area.call(kinds=QUANTIZED)
def saved_after_use(world: World) -> Any:
    """A forward, ``save_pretrained``, ``from_pretrained``"""
    before = world.logits()
    folder = world.new_folder()
    world.model.save_pretrained(folder)
    return Expect(world.logits(world.cls.from_pretrained(folder).eval()), before)


@area.call(kinds=QUANTIZED)
def lines_said(world: World) -> Any:
    """``generate``: how many warnings it gives, few"""
    import warnings

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        world.tokens(max_new_tokens=8, min_new_tokens=8)
    return Expect(len([item for item in seen if "MatMul8bitLt" in str(item.message)]) <= 2, True)


@area.call(variants=["weight", "class", "repr"], kinds=QUANTIZED)
def looked_at(world: World, what: str) -> Any:
    """A quantized layer's weight, class, text"""
    module = world.text.layers[1].mlp.up_proj
    return {
        "weight": [str(module.weight.dtype), list(module.weight.shape)],
        "class": type(module).__name__,
        "repr": repr(module),
    }[what]


@area.call(kinds=("E2B", "12B"), places=ONE)
def absent_method(world: World) -> Any:
    """``from_pretrained(quantization_config=...)`` of a backend that is not installed: the type of the error"""
    from transformers import GPTQConfig

    world.cls.from_pretrained(world.checkpoint, quantization_config=GPTQConfig(bits=4))
    return None
