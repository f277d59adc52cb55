"""What ``doctor --show`` shows: well-known silent defects, each as an answer of the trained model.

A scene computes in a child process (:mod:`show`), once with every patch off and once with the shim. It uses a
model as its users do, on the CPU: what would leave a GPU for host memory goes to the disk.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.trained import Trained

_SEE, _HEAR, _FOX = "What is in the picture?", "What do you hear?", "How many legs has a fox?"
_SKY, _AIR = "Why is the sky blue?", "The air scatters blue light more than red light."


@dataclass(frozen=True)
class Scene:
    """One defect.

    Attributes:
        does: what is done to the model, in the words of its user.
        asked: the question.
        right: the answer of the same weights on one device.
        play: does it, with the trained model and an empty folder, and returns the answer.
        refused: a part of the message with which the shim refuses what cannot work, if it does.
    """

    does: str
    asked: str
    right: str
    play: Callable[[Trained, Path], str]
    refused: str = ""


def _split(model: Any, away: str, folder: Path) -> Any:
    """The model with modules on disk: what :func:`tiny.device_map` calls ``away``."""
    placement = tiny.device_map(model, away, main="cpu", offloaded="disk")
    for parameter in model.parameters():
        vars(parameter).pop("_is_hf_initialized", None)  # on older releases its crash would come first
    return tiny.dispatch(model, placement, folder)


def _quantized_picture(trained: Trained, _: Path) -> str:
    return trained.answer(trained.load("4bit", towers=True), _SEE, picture="red-square")


def _eager_sound(trained: Trained, _: Path) -> str:
    model = trained.load(attn_implementation={"audio_config": "eager"})
    return trained.answer(model, _HEAR, sound="rising-tone")


def _chunked_picture(trained: Trained, _: Path) -> str:
    return trained.answer(trained.load(), _SEE, picture="red-square", prefill_chunk_size=64)


def _text_only(trained: Trained, _: Path) -> str:
    import torch

    torch.manual_seed(0)
    return trained.answer(trained.load(cls="Gemma4ForCausalLM"), _FOX)


def _disk_buffers(trained: Trained, folder: Path) -> str:
    import torch
    from accelerate import load_checkpoint_and_dispatch
    from transformers import GenerationConfig

    model = tiny_models.empty_model(trained.checkpoint, torch.bfloat16)
    model.generation_config = GenerationConfig.from_pretrained(trained.checkpoint)
    placement = tiny.device_map(model, "both", main="cpu", offloaded="disk")
    load_checkpoint_and_dispatch(
        model,
        str(trained.checkpoint),
        device_map=placement,
        offload_folder=str(folder),
        skip_keys=tiny.skip_keys(model),
    )
    return trained.answer(model.eval(), _SKY)


def _loaded_weights(trained: Trained, folder: Path) -> str:
    from peft import PeftModel

    merged = PeftModel.from_pretrained(trained.load(), str(trained.adapter)).merge_and_unload()
    model = _split(trained.load(), "layers", folder)
    model.load_state_dict(merged.state_dict())
    return trained.answer(model, _FOX)


def _used_folder(trained: Trained, folder: Path) -> str:
    import torch

    torch.manual_seed(0)
    other = trained.load()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_(0.0, 0.1)
    _split(other, "towers", folder)
    return trained.answer(_split(trained.load(), "towers", folder), _SEE, picture="red-square")


def _other_class(trained: Trained, folder: Path) -> str:
    from peft import PeftModel

    return trained.answer(PeftModel.from_pretrained(trained.load(), str(_of_text_class(trained, folder))), _FOX)


def _other_class_transformers(trained: Trained, folder: Path) -> str:
    model = trained.load()
    model.load_adapter(str(_of_text_class(trained, folder)))
    return trained.answer(model, _FOX)


def _of_text_class(trained: Trained, folder: Path) -> Path:
    """The adapter, as if it had been trained with ``Gemma4ForCausalLM``."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(trained.adapter, folder, dirs_exist_ok=True)
    file = folder / "adapter_model.safetensors"
    weights = {name.replace(".language_model.", "."): value for name, value in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    config["target_modules"] = config["target_modules"].replace(r"language_model\.", "")
    config["exclude_modules"] = r".*_tower\..*"  # whose linears PEFT refuses, which is another defect
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _adapter_on_split(trained: Trained, folder: Path) -> str:
    model = _split(trained.load(), "both", folder)
    model.load_adapter(str(trained.adapter))
    return trained.answer(model, _FOX)


def _failed_load(trained: Trained, folder: Path) -> str:
    from peft import PeftModel
    from safetensors.torch import load_file, save_file

    shutil.copytree(trained.adapter, folder, dirs_exist_ok=True)
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    last = sorted(weights)[-1]
    save_file({**weights, last: weights[last][:-1].contiguous()}, file, metadata={"format": "pt"})
    model = trained.load()
    with contextlib.suppress(RuntimeError):
        PeftModel.from_pretrained(model, str(folder))
    return trained.answer(model, _FOX)


_SQUARE, _TONE, _LEGS = "a red square", "a rising tone", "A fox has four legs."
_PIRATE = "Arr, a fox has four legs, matey."

#: By the id of the patch that repairs it.
SCENES = {
    "transformers-quantized-vision": Scene(
        "model and towers are loaded in 4-bit; it sees pictures/red-square.png",
        _SEE,
        _SQUARE,
        _quantized_picture,
    ),
    "transformers-chunked-media": Scene(
        "generate(prefill_chunk_size=64), with pictures/red-square.png", _SEE, _SQUARE, _chunked_picture
    ),
    "transformers-audio-mask": Scene(
        'attn_implementation={"audio_config": "eager"}, and it hears sounds/rising-tone.wav',
        _HEAR,
        _TONE,
        _eager_sound,
    ),
    "transformers-text-only-checkpoint": Scene(
        "Gemma4ForCausalLM.from_pretrained of the multimodal checkpoint", _FOX, _LEGS, _text_only
    ),
    "accelerate-disk-buffers": Scene(
        "load_checkpoint_and_dispatch with towers and three layers on disk", _SKY, _AIR, _disk_buffers
    ),
    "accelerate-load-offloaded": Scene(
        "load_state_dict of weights that speak like a pirate, with three layers on disk",
        _FOX,
        _PIRATE,
        _loaded_weights,
    ),
    "accelerate-offload-folder": Scene(
        "dispatch_model with an offload_dir that another model has filled",
        _SEE,
        _SQUARE,
        _used_folder,
        refused="holds another model's weights",
    ),
    "peft-adapter-keys": Scene(
        "PeftModel.from_pretrained with the pirate adapter, as Gemma4ForCausalLM saves it",
        _FOX,
        _PIRATE,
        _other_class,
    ),
    "transformers-adapter-keys": Scene(
        "model.load_adapter with the pirate adapter, as Gemma4ForCausalLM saves it",
        _FOX,
        _PIRATE,
        _other_class_transformers,
    ),
    "transformers-adapter-placement": Scene(
        "model.load_adapter with the pirate adapter, towers and three layers on disk",
        _FOX,
        _PIRATE,
        _adapter_on_split,
    ),
    "peft-failed-load": Scene(
        "a pirate adapter that does not fit fails to load; then the base is asked", _FOX, _LEGS, _failed_load
    ),
}
