"""F23: text-only classes on a multimodal checkpoint have its language model, not random weights."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import Outputs, difference
from gemma4_compat.patches.checkpoints.transformers_text_only_checkpoint import PATCH
from tests.patches.promise import Promise
from tests.patches.quantization import qat


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"Gemma4ForCausalLM of a multimodal checkpoint: logits differ by"


@pytest.fixture(scope="module")
def reference(workspace: Any) -> Outputs:
    outputs: Outputs = workspace.outputs(workspace.load(), text_only=True)
    return outputs


def load(checkpoint: Path, name: str = "Gemma4ForCausalLM", **kwargs: Any) -> Any:
    import torch
    import transformers

    return getattr(transformers, name).from_pretrained(checkpoint, dtype=torch.bfloat16, **kwargs).eval()


def tied(model: Any) -> bool:
    return bool(model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr())


def test_the_model_is_the_language_model_and_saves_as_itself(
    workspace: Any, reference: Outputs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors import safe_open

    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        model = load(workspace.checkpoint)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not [text for text in caplog.messages if "LOAD REPORT" in text]
    assert difference(reference, workspace.outputs(model, text_only=True)) == 0.0
    assert tied(model)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as saved:
        names = list(saved.keys())
    assert not [name for name in names if "language_model" in name]
    again = load(tmp_path)
    assert tied(again)
    assert difference(reference, workspace.outputs(again, text_only=True)) == 0.0


def test_shards(workspace: Any, reference: Outputs, tmp_path: Path) -> None:
    workspace.load().save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert difference(reference, workspace.outputs(load(tmp_path), text_only=True)) == 0.0


def test_a_device_map_with_disk(workspace: Any, reference: Outputs, tmp_path: Path) -> None:
    placement = {"model.layers.0": "disk", "model.layers.4": "disk", "": workspace.main}
    names = [f"model.layers.{n}" for n in range(6)] + ["model.norm", "model.embed_tokens", "lm_head"]
    names += ["model.embed_tokens_per_layer", "model.per_layer_model_projection", "model.per_layer_projection_norm"]
    names += ["model.rotary_emb"]
    placement = {name: "disk" if name in placement else workspace.main for name in names}
    model = load(workspace.checkpoint, device_map=placement, offload_folder=tmp_path)
    assert model.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert difference(reference, workspace.outputs(model, text_only=True)) == 0.0


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_quantized_as_the_multimodal_class_is(workspace: Any, quantization: str) -> None:
    whole = workspace.outputs(workspace.load(quantization), text_only=True)
    text = load(
        workspace.checkpoint,
        device_map={"": workspace.main},
        quantization_config=tiny.quantization_config(quantization),
    )
    assert difference(whole, workspace.outputs(text, text_only=True)) == 0.0


@pytest.mark.parametrize(("name", "stem"), [("Gemma4TextModel", "model.language_model."), ("Gemma4Model", "model.")])
def test_the_bare_models(workspace: Any, name: str, stem: str) -> None:
    import torch

    whole = workspace.load().state_dict()
    bare = load(workspace.checkpoint, name).state_dict()
    assert [key for key, value in bare.items() if not torch.equal(value, whole[stem + key])] == []
    assert len(bare) == len([key for key in whole if key.startswith(stem)])


def test_the_auto_class(workspace: Any, reference: Outputs) -> None:
    model = load(workspace.checkpoint, "AutoModelForCausalLM")
    assert difference(reference, workspace.outputs(model, text_only=True)) == 0.0
    config = model.config.get_text_config()
    text = load(workspace.checkpoint, "AutoModelForCausalLM", config=config)
    assert type(text).__name__ == "Gemma4ForCausalLM"
    assert difference(reference, workspace.outputs(text, text_only=True)) == 0.0


def test_a_checkpoint_that_was_saved_quantized(workspace: Any, tmp_path: Path) -> None:
    import transformers

    model = workspace.load("4bit")
    model.save_pretrained(tmp_path)
    whole = workspace.outputs(model, text_only=True)
    with pytest.raises(Gemma4CompatError, match=r"was saved quantized.*Gemma4ForConditionalGeneration.*config="):
        load(tmp_path, device_map={"": workspace.main})
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    text = config.get_text_config()
    text.quantization_config = config.quantization_config
    model = load(tmp_path, config=text, device_map={"": workspace.main})
    assert difference(whole, workspace.outputs(model, text_only=True)) == 0.0


@qat.needs_quantizer
@pytest.mark.parametrize("place", ["one device", "disk"])
def test_a_qat_checkpoint(workspace: Any, tmp_path: Path, place: str) -> None:
    """Its patterns are about names in the multimodal model; what the refusal says works, offloaded and saved again."""
    import transformers

    checkpoint = workspace.qat()
    whole = qat.load(checkpoint)
    expected = workspace.outputs(whole, text_only=True)
    with pytest.raises(Gemma4CompatError, match=r"was saved quantized.*Gemma4ForConditionalGeneration.*config="):
        load(checkpoint)
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    text = config.get_text_config()
    text.quantization_config = config.quantization_config
    options = {}
    if place == "disk":
        names = {name: where for name, where in qat.layout(whole, "layers").items() if "tower" not in name}
        names = {name.replace("language_model.", ""): where for name, where in names.items() if "embed_v" not in name}
        options = {"device_map": names, "offload_folder": tmp_path / "offload"}
    model = load(checkpoint, config=text, **options)
    assert {module.num_bits for module in model.modules() if hasattr(module, "num_bits")} == {2, 4, 8}
    assert difference(expected, workspace.outputs(model, text_only=True)) == 0.0
    if place == "one device":
        model.save_pretrained(tmp_path / "saved")
        assert difference(expected, workspace.outputs(load(tmp_path / "saved"), text_only=True)) == 0.0


def test_the_unified_classes(tmp_path: Path) -> None:
    """Its checkpoint is made by renaming: the unified multimodal model has no tiny shape here."""
    pytest.importorskip("transformers.models.gemma4_unified", reason="this transformers has no unified Gemma 4")
    import torch
    from safetensors.torch import load_file, save_file

    tiny_models.unified_text_model().save_pretrained(tmp_path)
    batch = tiny.inputs(text_only=True)
    with torch.no_grad():
        expected = load(tmp_path, "Gemma4UnifiedForCausalLM")(**batch).logits
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    renamed["model.embed_vision.embedding_projection.weight"] = torch.zeros(4, 4)
    save_file(renamed, file, metadata={"format": "pt"})
    with torch.no_grad():
        assert torch.equal(load(tmp_path, "Gemma4UnifiedForCausalLM")(**batch).logits, expected)


def test_a_text_only_checkpoint_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from gemma4_compat.patches.checkpoints import transformers_text_only_checkpoint as module

    tiny_models.build_text_checkpoint(tmp_path)
    asked: list[Any] = []
    rename: Callable[..., Any] = module._rename
    monkeypatch.setattr(module, "_rename", lambda *args: asked.append(rename(*args)) or asked[-1])
    model = load(tmp_path)
    assert asked == [None]
    assert not torch.isnan(model(**tiny.inputs(text_only=True)).logits).any()


def test_what_belongs_to_the_language_model_and_is_not_loaded_is_still_reported(
    workspace: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(workspace.checkpoint, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.language_model.layers.0.mlp.strange.weight"] = weights["model.language_model.norm.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        load(tmp_path)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    (report,) = {text for text in caplog.messages if "LOAD REPORT" in text}  # twice if the logger also propagates
    assert "strange" in report
    assert "vision_tower" not in report
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gemma4"
