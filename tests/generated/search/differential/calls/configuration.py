"""Configurations, Auto classes, and ways to load."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.models import config_names
from tests.generated.search.differential.table import CLASSES, Area
from tests.generated.search.differential.world import World

area = Area("loading")
ONE = ("one",)


@area.call(
    variants=[
        "head_dim",
        "num_key_value_heads",
        "hidden_size",
        "vocab_size",
        "sliding_window",
        "rope_theta",
        "absent",
    ],
    kinds=("E2B", "12B", "31B", "26B"),
    places=ONE,
)
def config_name(world: World, name: str) -> Any:
    """``getattr(config.get_text_config(), name, None)``, ``hasattr``; not of names that upstream has dropped"""
    text = world.model.config.get_text_config()
    return [getattr(text, name, None), hasattr(text, name)]


@area.call(
    variants=["to_dict", "to_diff_dict", "to_json_string", "copy", "deepcopy", "pickle", "save", "repr", "text"],
    kinds=CLASSES,
    places=ONE,
)
def config(world: World, how: str) -> Any:
    """What is done with a configuration"""
    import transformers

    own = world.model.config
    if how == "copy":
        return _named(copy.copy(own).to_dict())
    if how == "deepcopy":
        return _named(copy.deepcopy(own).to_dict())
    if how == "pickle":
        return _named(pickle.loads(pickle.dumps(own)).to_dict())
    if how == "save":
        folder = world.new_folder()
        own.save_pretrained(folder)
        return _named(transformers.AutoConfig.from_pretrained(folder).to_dict())
    if how == "repr":
        return _named(json.loads(repr(own).partition(" ")[2]))
    if how == "to_json_string":
        return _named(json.loads(own.to_json_string()))
    if how == "text":
        return [own.get_text_config().model_type, own.get_text_config(decoder=True).model_type]
    return _named(getattr(own, how)())


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the names of released files, which the package writes beside those of transformers 5.15 and later."""
    text = {name: value for name, value in settings.get("text_config", {}).items() if name not in config_names.NAMES}
    return {name: value for name, value in settings.items() if name not in config_names.NAMES} | {"text_config": text}


AUTO = (
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSeq2SeqLM",
)


@area.call(variants=AUTO, kinds=CLASSES, places=ONE)
def auto_class(world: World, name: str) -> Any:
    """``AutoModel...from_pretrained``"""
    import torch
    import transformers

    world.needs(hasattr(transformers, name), f"no {name}")
    model = getattr(transformers, name).from_pretrained(world.checkpoint, dtype=torch.bfloat16).eval()
    ids = world.inputs(media=False)["input_ids"]
    with torch.no_grad():
        output = model(input_ids=ids)
    return [type(model).__name__, output[0]]


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "auto_dtype": {"dtype": "auto"},
    "torch_dtype": {"torch_dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "cpu": {"device_map": "cpu"},
    "auto": {"device_map": "auto"},
    "balanced": {"device_map": "balanced"},
    "sequential": {"device_map": "sequential"},
    "max_memory": {"device_map": "auto", "max_memory": {"cpu": "10MB"}},
    "empty": {"device_map": {"": "cpu"}},
    "low_cpu": {"low_cpu_mem_usage": True},
    "eager": {"attn_implementation": "eager"},
    "sdpa": {"attn_implementation": "sdpa"},
    "flex": {"attn_implementation": "flex_attention"},
    "per_part": {"attn_implementation": {"text_config": "sdpa", "vision_config": "eager"}},
    "flash": {"attn_implementation": "flash_attention_2"},
    "absent_attention": {"attn_implementation": "no_such_attention"},
    "mismatched": {"ignore_mismatched_sizes": True},
    "no_safetensors": {"use_safetensors": False},
    "local": {"local_files_only": True},
    "absent_device": {"device_map": {"": "no such device"}},
    "absent_option": {"no_such_option": 1},
    "incomplete_map": {"device_map": {"model.language_model": "cpu"}},
    "config": {"tie_word_embeddings": True},
    "weights_only": {"weights_only": True},
    "trust": {"trust_remote_code": True},
    "info": {"output_loading_info": True},
}


@area.call(
    variants={name: {"options": options} for name, options in OPTIONS.items()},
    kinds=("E2B", "E2B-text", "12B"),
    places=ONE,
)
def from_pretrained(world: World, options: dict[str, Any]) -> Any:
    """``from_pretrained`` with an option"""
    found = world.cls.from_pretrained(world.checkpoint, **options)
    model, info = found if isinstance(found, tuple) else (found, {})
    flex = options.get("attn_implementation") == "flex_attention"  # compiles for minutes
    return [
        str(model.dtype),
        None if flex else world.logits(model.eval()),
        {name: sorted(map(str, value)) for name, value in info.items()} if info else None,
    ]


@area.call(variants=["disk", "cpu", "nested"], kinds=CLASSES, places=ONE)
def with_map(world: World, how: str) -> Any:
    """``from_pretrained(device_map={...})`` with parts on disk"""
    import torch

    placement = world.map(world.fresh(), {"disk": "disk", "cpu": "one", "nested": "disk"}[how])
    if how == "nested":
        placement = {"": "cpu", **{name: place for name, place in placement.items() if place == "disk"}}
    model = world.cls.from_pretrained(
        world.checkpoint, device_map=placement, offload_folder=world.new_folder(), dtype=torch.bfloat16
    )
    return world.logits(model.eval())


@area.call(variants=["folder", "empty", "file", "config", "revision", "name", "truncated"], places=ONE)
def bad_folder(world: World, how: str) -> Any:
    """``from_pretrained`` of what cannot be loaded: the type of the error"""
    import shutil

    folder = Path(world.new_folder())
    given: dict[str, Any] = {}
    if how == "folder":
        folder = folder / "no-such-folder"
    elif how == "file":
        shutil.copy(world.checkpoint / "config.json", folder)
    elif how == "config":
        shutil.copytree(world.checkpoint, folder, dirs_exist_ok=True)
        (folder / "config.json").write_text("{")
    elif how == "truncated":
        shutil.copytree(world.checkpoint, folder, dirs_exist_ok=True)
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(100)
    elif how == "revision":
        given["revision"] = "no-such"
        folder = Path("google/no-such-model")
    elif how == "name":
        folder = Path("no such name!")
    world.cls.from_pretrained(str(folder), **given)
    return None


@area.call(kinds=CLASSES, places=ONE)
def from_config(world: World) -> Any:
    """``cls(config)``: random weights of a seed"""
    import torch

    torch.manual_seed(0)
    model = world.cls(world.cls.config_class.from_pretrained(world.checkpoint)).eval()
    return [sum(parameter.numel() for parameter in model.parameters()), world.logits(model)]


@area.call(kinds=CLASSES, places=ONE)
def from_empty(world: World) -> Any:
    """A model on meta, ``load_state_dict(assign=True)``"""
    import torch

    plain = world.fresh()
    with torch.device("meta"):
        model = world.cls(world.cls.config_class.from_pretrained(world.checkpoint))
    missing = model.load_state_dict(plain.state_dict(), assign=True, strict=False)
    return [len(missing.missing_keys), len(missing.unexpected_keys)]


@area.call(variants=["rope", "size"], kinds=("E2B", "12B"), places=ONE)
def changed_config(world: World, what: str) -> Any:
    """``from_pretrained(config=changed)``"""
    config = world.cls.config_class.from_pretrained(world.checkpoint)
    text = config.get_text_config()
    if what == "rope":
        text.sliding_window = 4
    else:
        text.num_hidden_layers = 3
        text.layer_types = text.layer_types[:3]
        text.num_kv_shared_layers = 0
    return world.logits(world.cls.from_pretrained(world.checkpoint, config=config, dtype="auto").eval(), media=False)
