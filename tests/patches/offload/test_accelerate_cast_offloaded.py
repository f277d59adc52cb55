"""A split model that is cast gives the bits of one on one device: in any order, wherever the weights are kept."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.accelerate import module_hooks as _placement
from gemma4_compat._lab import tiny
from gemma4_compat._offload import host_memory
from gemma4_compat.patches.offload.accelerate_cast_offloaded import PATCH
from tests.patches.offload.looked_up_embeddings import EMBEDDING, PER_LAYER
from tests.patches.promise import Promise

LAYERS = tuple(f"model.language_model.layers.{index}" for index in range(6))
TOWERS = ("model.vision_tower", "model.audio_tower")
#: What is off the device. Embedding and head are tied.
PLACES = {
    "layers": LAYERS,
    "embedding": (EMBEDDING,),
    "head": ("lm_head",),
    "tied": (EMBEDDING, "lm_head"),
    "per layer": (PER_LAYER,),
    "towers": TOWERS,
    "all": (*LAYERS, *TOWERS, EMBEDDING, PER_LAYER, "lm_head"),
}
#: Steps of a model's life: a forward, one under autocast, and casts.
ORDERS = (
    "float forward",
    "forward float forward bfloat16 forward",
    "forward float autocast",
    "half float forward",
    "forward half forward float forward",
    "half bfloat16 float forward",
    "forward to forward",
    "forward assign forward",
    "assign half forward assign forward",
    "forward prepare forward",
    "forward language_model forward",
)


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a split model after half\(\) and float\(\): logits differ"


@pytest.fixture(scope="module")
def checkpoint(workspace: Any) -> Path:
    """With weights that bfloat16 has and float16 has not, in every matrix."""
    return Path(workspace.cached(_fine_weights, source=workspace.checkpoint.name))


def _fine_weights(folder: Path, *, source: str) -> None:
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder.parent / source, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if weight.dtype == torch.bfloat16 and weight.dim() > 1:
            weights[name] = torch.where(torch.rand(weight.shape, generator=generator) < 0.5, weight * 2**-14, weight)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def split(workspace: Any, checkpoint: Path, place: str, store: str) -> Any:
    import torch
    from accelerate import dispatch_model

    model = tiny.load(checkpoint, device=workspace.main)
    placement = tiny.device_map(model, "none", main=workspace.main, offloaded="disk")
    if store == "memory":
        main = torch.device("cuda", 0) if workspace.offloaded == "cpu" else torch.device("cpu")
        placement = dict.fromkeys(placement, main) | dict.fromkeys(PLACES[place], "cpu")
        skip = tiny.skip_keys(model)
        return dispatch_model(model, placement, main_device=main, skip_keys=skip)
    placement |= dict.fromkeys(PLACES[place], "disk")
    folder = Path(tempfile.mkdtemp(dir=workspace.folder))
    if store == "disk":
        return tiny.dispatch(model, placement, folder)
    return tiny.load(checkpoint, device_map=placement, offload_folder=folder)


def lived(workspace: Any, model: Any, order: str) -> list[Any]:
    """The logits of the forwards in a model's life."""
    import torch

    logits = []
    for step in order.split():
        if step in ("forward", "autocast"):
            device = torch.device(workspace.main).type
            context: Any = torch.autocast(device, torch.bfloat16) if step == "autocast" else contextlib.nullcontext()
            dtype = next(weight.dtype for name, weight in model.named_parameters() if "vision_tower" in name)
            batch = {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in workspace.inputs().items()
            }
            with torch.no_grad(), context:
                logits.append(model(**batch).logits.float().cpu())
        elif step == "to":
            model.to(torch.float32)
        elif step == "assign":
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.float32)
        elif step == "prepare":
            from peft import prepare_model_for_kbit_training

            prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        elif step == "language_model":
            model.model.language_model.half().float()
            model.bfloat16()
        else:
            getattr(model, step)()
    return logits


@pytest.fixture(scope="module")
def on_one_device(workspace: Any, checkpoint: Path) -> dict[str, list[Any]]:
    return {order: lived(workspace, tiny.load(checkpoint, device=workspace.main), order) for order in ORDERS}


@pytest.mark.parametrize("store", ["disk", "memory", "checkpoint"])
@pytest.mark.parametrize("place", PLACES)
def test_a_split_model_is_cast_as_one_on_one_device(
    workspace: Any, checkpoint: Path, on_one_device: dict[str, list[Any]], place: str, store: str
) -> None:
    import torch

    for order, expected in on_one_device.items():
        found = lived(workspace, split(workspace, checkpoint, place, store), order)
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(one, other), (order, number)


@pytest.mark.parametrize("adapter", ["language", "all"])
def test_with_an_adapter_too(workspace: Any, checkpoint: Path, adapter: str) -> None:
    import torch
    from peft import PeftModel

    for order in ("forward float forward half forward", "half float forward"):
        models = (tiny.load(checkpoint, device=workspace.main), split(workspace, checkpoint, "all", "disk"))
        expected, found = (
            lived(workspace, PeftModel.from_pretrained(model, workspace.adapter(adapter)), order) for model in models
        )
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)), order


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_what_a_quantized_model_has_in_high_precision_is_cast(workspace: Any, quantization: str) -> None:
    import torch
    from peft import PeftModel

    found = []
    for model in (workspace.load(quantization), workspace.split(quantization)):
        adapted = PeftModel.from_pretrained(model, workspace.adapter("language"))
        with torch.no_grad():
            adapted(**workspace.inputs(text_only=True))
            adapted.float()
            found.append(adapted(**workspace.inputs(text_only=True)).logits)
    assert torch.equal(*found)


def test_a_quantized_model_refuses_it_as_on_one_device(workspace: Any) -> None:
    import torch

    for model in (workspace.load("4bit"), workspace.split("4bit")):
        with pytest.raises(ValueError, match="You cannot cast a bitsandbytes model"):
            model.to(torch.float32)


def test_moves_are_refused_still(workspace: Any) -> None:
    import torch

    model = workspace.split()
    with pytest.raises(RuntimeError, match="You can't move a model"):
        model.to(workspace.main, torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_copy_has_its_own_casts(workspace: Any, checkpoint: Path) -> None:
    import torch

    model = split(workspace, checkpoint, "layers", "disk")
    before = lived(workspace, model, "forward")
    copied = copy.deepcopy(model)
    copied.to(torch.float16)
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.float16}
    assert torch.equal(lived(workspace, model, "forward")[0], before[0])


def test_a_cast_that_loses_nothing_is_not_noted(workspace: Any) -> None:
    model = workspace.split()
    for _ in range(3):
        model.float().bfloat16()
    hooks = [_placement.offload_hook(module) for module in model.modules()]
    assert not [hook for hook in hooks if isinstance(getattr(hook, "weights_map", None), host_memory.CastWeights)]


def test_the_guards_go_with_the_hooks(workspace: Any) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    model = workspace.split()
    remove_hook_from_submodules(model)
    model.float()
    left = {item.patch for item in gemma4_compat.statistics(model).attached if item.name == "_apply"}
    assert left == {"transformers-rotary-cast"}  # which needs no offload
