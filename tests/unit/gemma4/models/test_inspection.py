"""``input_device`` and ``find_meta_tensors``: what they say of a model is what the model does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import MetaTensor, find_meta_tensors, input_device
from gemma4_compat._lab import tiny, tiny_configs
from tests.helpers import Finished

QUANTIZATIONS = [None, "4bit", "4bit-double"]
EMBEDDING = "model.language_model.embed_tokens"


def main_device(workspace: Any) -> Any:
    import torch

    return torch.device("cpu") if workspace.main == "cpu" else torch.device("cuda", workspace.main)


def dispatched_with_embeddings_offloaded(workspace: Any, tmp_path: Path, quantization: str | None = None) -> Any:
    model = workspace.load(quantization)
    placement = tiny.device_map(model, "layers", main=workspace.main, offloaded=workspace.offloaded)
    for name in (EMBEDDING, f"{EMBEDDING}_per_layer", "lm_head"):
        assert name in placement
        placement[name] = workspace.offloaded
    return tiny.dispatch(model, placement, tmp_path)


# ---------------------------------------------------------------------------------------------------- input_device


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_inputs_go_where_the_embedding_computes(workspace: Any, tmp_path: Path, quantization: str | None) -> None:
    from peft import PeftModel

    expected = main_device(workspace)
    assert input_device(workspace.load(quantization)) == expected
    split = workspace.split(quantization)
    assert input_device(split) == expected
    assert input_device(PeftModel.from_pretrained(split, workspace.adapter("all"))) == expected
    offloaded = dispatched_with_embeddings_offloaded(workspace, tmp_path, quantization)
    assert offloaded.get_input_embeddings().weight.device.type == "meta"
    assert input_device(offloaded) == expected
    assert input_device(offloaded.model.language_model) == expected


@pytest.mark.parametrize("kind", ["LoRA", "trainable copy", "trainable tokens", "trainable tokens beside LoRA"])
@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
def test_the_embedding_is_found_below_a_peft_layer(workspace: Any, split: bool, kind: str) -> None:
    import peft

    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"]}
    if kind == "LoRA":
        options["target_modules"] = ["embed_tokens"]
    elif kind == "trainable copy":
        options["modules_to_save"] = ["embed_tokens"]
    else:
        options["trainable_token_indices"] = [1, 2]
    options["exclude_modules"] = r".*(vision_tower|audio_tower).*"
    config: Any = peft.LoraConfig(**options)
    if kind == "trainable tokens":
        config = peft.TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"])
    base = workspace.split() if split else workspace.load()
    model = peft.get_peft_model(base, config)
    found = [type(module).__name__ for name, module in model.named_modules() if name.endswith("embed_tokens")]
    assert found[0] != "Gemma4TextScaledWordEmbedding", "PEFT has put nothing around the embedding"
    assert input_device(model) == main_device(workspace)


def test_a_quantized_embedding(workspace: Any) -> None:
    import bitsandbytes as bnb

    model = workspace.load()
    model.set_input_embeddings(bnb.nn.Embedding4bit(tiny_configs.VOCABULARY, 64).to(workspace.main))
    assert input_device(model) == main_device(workspace)


def test_a_hook_that_moves_the_whole_model_decides(workspace: Any) -> None:
    import torch
    from accelerate import cpu_offload_with_hook
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = tiny.load(workspace.checkpoint)
    model, _hook = cpu_offload_with_hook(model, execution_device="meta")  # "meta" stands in for a second device
    assert model.get_input_embeddings().weight.device.type == "cpu"
    assert input_device(model) == torch.device("meta")
    model = tiny.load(workspace.checkpoint)
    add_hook_to_module(model, AlignDevicesHook(execution_device="meta", place_submodules=False))
    assert input_device(model) == torch.device("cpu")


def test_inputs_may_come_from_there_and_a_compiled_model_is_seen_through(workspace: Any) -> None:
    import torch

    model = workspace.split()
    with torch.no_grad():
        model(**tiny.inputs(input_device(model)))
    assert input_device(torch.compile(model)) == main_device(workspace)


def test_an_embedding_on_meta_without_a_hook_is_named(workspace: Any) -> None:
    import torch

    model = workspace.load()
    model.get_input_embeddings().to("meta")
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=rf"{EMBEDDING}' is on meta.*device_map"):
        input_device(model)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"Linear has no input embedding"):
        input_device(torch.nn.Linear(2, 2))
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"no input embedding"):
        input_device(workspace.load().model.vision_tower)


# ----------------------------------------------------------------------------------------------- find_meta_tensors


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_model_on_one_device_has_none(workspace: Any, quantization: str | None) -> None:
    model = workspace.load(quantization)
    assert find_meta_tensors(model) == ()
    workspace.outputs(model)
    assert find_meta_tensors(model) == ()


@pytest.mark.parametrize("offload", ["towers", "layers", "embeddings"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_on_a_dispatched_model_exactly_the_parameters_on_meta_are_found_and_none_is_lost(
    workspace: Any, tmp_path: Path, quantization: str | None, offload: str
) -> None:
    from peft import PeftModel

    if offload == "embeddings":
        model = dispatched_with_embeddings_offloaded(workspace, tmp_path, quantization)
    else:
        model = workspace.split(quantization, offload)
    expected = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.device.type == "meta"
    }
    found = {tensor.path: tensor for tensor in find_meta_tensors(model)}
    assert found.keys() == expected.keys()
    assert found
    for name, tensor in found.items():
        shape, dtype = tuple(expected[name].shape), expected[name].dtype
        assert tensor == MetaTensor(path=name, kind="parameter", offloaded=True, shape=shape, dtype=dtype)
    if offload != "embeddings":  # their forward is another patch's
        wrapped = PeftModel.from_pretrained(model, workspace.adapter("all"))
        workspace.outputs(wrapped)
        again = {tensor.path.replace(".base_layer", ""): tensor for tensor in find_meta_tensors(wrapped)}
        assert again.keys() == {f"base_model.model.{name}" for name in expected}
        assert all(tensor.offloaded for tensor in again.values())


def test_nothing_is_read_from_disk(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils.offload import OffloadedWeightsLoader

    model = workspace.split()

    def refuse(self: Any, key: str) -> Any:
        raise AssertionError(f"{key} was read")

    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", refuse)
    assert all(tensor.offloaded for tensor in find_meta_tensors(model))


def test_offloaded_buffers(workspace: Any, tmp_path: Path) -> None:
    from accelerate import dispatch_model

    model = workspace.load()
    placement = tiny.device_map(model, "both", main=workspace.main, offloaded=workspace.offloaded)
    skip = tiny.skip_keys(model)
    model = dispatch_model(model, placement, offload_dir=tmp_path, offload_buffers=True, skip_keys=skip)
    buffers = {name for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.device.type == "meta"}
    assert buffers, "no buffer is offloaded: the test would show nothing"
    found = [tensor for tensor in find_meta_tensors(model) if tensor.kind == "buffer"]
    assert {tensor.path for tensor in found} == buffers
    assert all(tensor.offloaded for tensor in found)


def test_a_hook_that_brings_its_submodules_in(workspace: Any, tmp_path: Path) -> None:
    from accelerate import cpu_offload

    model = workspace.load()
    cpu_offload(model, execution_device=main_device(workspace), preload_module_classes=["Gemma4TextMLP"])
    layer = model.model.language_model.layers[0].mlp
    assert not hasattr(layer.up_proj, "_hf_hook")
    assert layer.up_proj.weight.device.type == "meta"
    assert [tensor.path for tensor in find_meta_tensors(model) if not tensor.offloaded] == []
    assert "model.language_model.layers.0.mlp.up_proj.weight" in {tensor.path for tensor in find_meta_tensors(model)}


def test_what_no_hook_brings_in_is_lost(workspace: Any) -> None:
    import torch

    model = workspace.split()
    tower = model.model.vision_tower.encoder.layers[0]
    model.model.language_model.layers[1].to("meta")  # no hook with weights there
    tower.register_buffer("ghost", torch.empty(3, device="meta"))
    linear = next(module for module in tower.modules() if isinstance(module, torch.nn.Linear))
    linear._hf_hook.weights_map = {}  # a hook that has nothing to bring in
    lost = {tensor.path: tensor for tensor in find_meta_tensors(model) if not tensor.offloaded}
    layer = "model.language_model.layers.1"
    expected = {f"{layer}.{name}" for name, _ in model.model.language_model.layers[1].named_parameters()}
    expected |= {f"{layer}.{name}" for name, _ in model.model.language_model.layers[1].named_buffers()}
    path = next(name for name, module in model.named_modules() if module is linear)
    assert set(lost) == expected | {f"{path}.weight", "model.vision_tower.encoder.layers.0.ghost"}
    ghost = lost["model.vision_tower.encoder.layers.0.ghost"]
    assert (ghost.kind, ghost.shape, ghost.dtype) == ("buffer", (3,), torch.float32)


def test_int8_statistics_on_meta(workspace: Any) -> None:
    import torch

    model = workspace.load("8bit")
    layer = model.model.language_model.layers[0].mlp.up_proj
    layer.weight.SCB = torch.empty(128, device="meta")
    layer.state.CB = torch.empty(128, 64, dtype=torch.int8, device="meta")
    path = "model.language_model.layers.0.mlp.up_proj"
    assert {(tensor.path, tensor.kind, tensor.offloaded) for tensor in find_meta_tensors(model)} == {
        (f"{path}.weight.SCB", "quantization", False),
        (f"{path}.state.CB", "quantization", False),
    }


DESTROY = """
import json, sys
from pathlib import Path
import gemma4_compat
from gemma4_compat._lab import tiny

model = tiny.load(Path(sys.argv[1]), sys.argv[2])
linear = model.model.language_model.layers[0].mlp.up_proj
for parameter in model.parameters():
    vars(parameter).pop("_is_hf_initialized", None)
placement = tiny.device_map(model, "layers", main="cpu", offloaded="disk")
error = ""
try:
    tiny.dispatch(model, placement, Path(sys.argv[3]))
except RuntimeError as raised:
    error = str(raised)
found = gemma4_compat.find_meta_tensors(model)
lost = [tensor.path for tensor in found if not tensor.offloaded and tensor.kind == "quantization"]
print(json.dumps({"error": error, "lost": lost}))
"""


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double"])
def test_states_destroyed_without_the_shim_are_reported_as_lost(
    workspace: Any, warm_child: Callable[..., Finished], tmp_path: Path, quantization: str
) -> None:
    arguments = (str(workspace.checkpoint), quantization, str(tmp_path))
    done = warm_child("-c", DESTROY, *arguments, environment={"GEMMA4_COMPAT_DISABLE": "all"})
    result = done.data
    state = "model.language_model.layers.0.mlp.up_proj.weight.quant_state"
    expected = {f"{state}.absmax", f"{state}.code"}
    if quantization == "4bit-double":
        expected |= {f"{state}.offset", f"{state}.state2.absmax", f"{state}.state2.code"}
    assert expected <= set(result["lost"])
