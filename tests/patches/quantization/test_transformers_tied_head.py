"""transformers-tied-head: a head that shares the embedding's weight is not quantized, whatever the list names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_adapters, tiny_models
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.quantization.transformers_tied_head import PATCH
from tests.patches.promise import Promise

QUANTIZED = ("4bit", "4bit-double", "8bit")
#: As users write them; on newer releases, "vision_tower" matches the tower and none of its linears.
LISTS = (["model.vision_tower"], ["vision_tower"], ["model.vision_tower", "model.embed_vision"], [])


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"AssertionError|'Parameter' object has no attribute 'CB'"


@pytest.fixture
def reverted() -> Iterator[None]:
    gemma4_compat.revert(PATCH.id)
    yield
    gemma4_compat.install()


def load(checkpoint: Path, quantization: str, skip: list[str] | None, *, cls: str = "", **options: Any) -> Any:
    """The model with just this list."""
    import torch
    import transformers

    settings = tiny.quantization_config(quantization, cpu_offload="device_map" in options)
    settings.llm_int8_skip_modules = skip
    return (
        getattr(transformers, cls or tiny_models.class_name(checkpoint))
        .from_pretrained(
            checkpoint,
            dtype=torch.bfloat16,
            quantization_config=settings,
            **{"device_map": {"": "cpu"}, **options},
        )
        .eval()
    )


def off_by(reference: Any, other: Any) -> float:
    import torch

    batch = tiny.inputs("cpu", text_only=True)
    with torch.no_grad():
        return float((reference(**batch).logits.float() - other(**batch).logits.float()).abs().max())


def is_tied(model: Any) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return type(head).__name__ == "Linear" and head.weight is embedding.weight


def rewrite(checkpoint: Path, folder: Path, *, head: str, torch_format: bool = False) -> Path:
    """The checkpoint with a weight for its head: ``"same"`` as the embedding's, or of its ``"own"``; or ``"untied"``,
    of its own and by the configuration.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    (embedding,) = (value for name, value in weights.items() if name.endswith("language_model.embed_tokens.weight"))
    weights["lm_head.weight"] = embedding.clone() if head == "same" else 0.5 * embedding.flip(0)
    (folder / "model.safetensors").unlink()
    if torch_format:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if head == "untied":
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings["tie_word_embeddings"] = settings["text_config"]["tie_word_embeddings"] = False
        (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.mark.filterwarnings("ignore:llm_int8_skip_modules names modules by the end of their path")
@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("skip", LISTS)
def test_the_list_is_one_that_names_the_head(workspace: Any, skip: list[str], quantization: str) -> None:
    model = load(workspace.checkpoint, quantization, skip)
    assert is_tied(model)
    assert off_by(load(workspace.checkpoint, quantization, ["lm_head", *skip]), model) == 0.0
    assert model.state_dict()


@pytest.mark.parametrize("text_only", [False, True])
@pytest.mark.parametrize("variant", variants.NAMES)
def test_every_variant(tmp_path: Path, variant: str, text_only: bool) -> None:
    transformers = pytest.importorskip("transformers")
    if variant == variants.UNIFIED and not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("this transformers has no Gemma4UnifiedConfig")
    checkpoint = tiny_models.build_checkpoint(tmp_path / "model", variant=variant)
    if text_only:
        checkpoint = tiny_models.build_text_copy(checkpoint, tmp_path / "text")
    cls = tiny_models.class_name(checkpoint, text_only=text_only)
    for quantization in ("4bit", "8bit"):
        model = load(checkpoint, quantization, ["model.vision_tower"], cls=cls)
        assert is_tied(model)
        assert off_by(load(checkpoint, quantization, ["lm_head", "model.vision_tower"], cls=cls), model) == 0.0


def test_the_head_of_an_assistant_model(workspace: Any, tmp_path: Path) -> None:
    try:
        assistant = tiny_models.build_assistant(workspace.checkpoint, tmp_path / "assistant")
    except ImportError as error:
        pytest.skip(str(error))
    model = load(assistant, "4bit", [], cls=tiny_models.assistant_class(workspace.checkpoint))
    assert is_tied(model)


def test_the_configuration_that_was_given_is_not_changed(workspace: Any) -> None:
    import transformers

    settings = tiny.quantization_config("4bit")
    settings.llm_int8_skip_modules = ["model.vision_tower"]
    model = transformers.Gemma4ForConditionalGeneration.from_pretrained(
        workspace.checkpoint, device_map={"": "cpu"}, quantization_config=settings
    )
    assert settings.llm_int8_skip_modules == ["model.vision_tower"]
    assert model.config.quantization_config.llm_int8_skip_modules == ["model.vision_tower", "lm_head"]


@pytest.mark.parametrize("skip", [None, ["lm_head"], ["model.vision_tower", "head"]])
def test_a_list_that_keeps_the_head_stays_as_it_is(workspace: Any, skip: list[str] | None) -> None:
    model = load(workspace.checkpoint, "4bit", skip)
    assert is_tied(model)
    assert model.config.quantization_config.llm_int8_skip_modules == skip


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_saved_and_loaded_again_with_and_without_the_patch(workspace: Any, tmp_path: Path, quantization: str) -> None:
    model = load(workspace.checkpoint, quantization, ["model.vision_tower", "model.audio_tower"])
    model.save_pretrained(tmp_path)
    assert off_by(model, again(tmp_path)) == 0.0
    gemma4_compat.revert(PATCH.id)
    try:
        other = again(tmp_path)
        assert is_tied(other)
        assert off_by(model, other) == 0.0
    finally:
        gemma4_compat.install()


def again(folder: Path) -> Any:
    import transformers

    return transformers.Gemma4ForConditionalGeneration.from_pretrained(folder, device_map={"": "cpu"}).eval()


def test_what_upstream_saved_without_a_head_is_loaded(workspace: Any, tmp_path: Path, reverted: None) -> None:
    """A model that was quantized and saved, and never run: neither its list nor its weights have a head."""
    load(workspace.checkpoint, "4bit", ["model.vision_tower"]).save_pretrained(tmp_path)
    with pytest.raises(AssertionError):
        off_by(again(tmp_path), again(tmp_path))
    gemma4_compat.install()
    model = again(tmp_path)
    assert is_tied(model)
    assert off_by(load(workspace.checkpoint, "4bit", ["model.vision_tower"]), model) == 0.0


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
@pytest.mark.parametrize("head", ["same", "own", "untied"])
def test_a_head_with_a_weight_of_its_own_is_quantized_as_before(
    workspace: Any, tmp_path: Path, head: str, quantization: str
) -> None:
    checkpoint = rewrite(workspace.checkpoint, tmp_path / head, head=head)
    model = load(checkpoint, quantization, ["model.vision_tower"])
    assert type(model.lm_head).__name__ == ("Linear8bitLt" if quantization == "8bit" else "Linear4bit")
    gemma4_compat.revert(PATCH.id)
    try:
        upstream = load(checkpoint, quantization, ["model.vision_tower"])
        assert off_by(upstream, model) == 0.0
        upstream.save_pretrained(tmp_path / "saved")
    finally:
        gemma4_compat.install()
    saved = again(tmp_path / "saved")
    assert type(saved.lm_head) is type(model.lm_head)
    assert off_by(upstream, saved) == 0.0


def test_a_checkpoint_in_the_format_of_torch(workspace: Any, tmp_path: Path) -> None:
    """It holds a weight for the head, as torch saves shared tensors under both names."""
    checkpoint = rewrite(workspace.checkpoint, tmp_path / "torch", head="same", torch_format=True)
    assert type(load(checkpoint, "4bit", ["model.vision_tower"]).lm_head).__name__ == "Linear4bit"


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_an_adapter_on_it(workspace: Any, quantization: str, tmp_path: Path) -> None:
    from peft import PeftModel

    plain = load(workspace.checkpoint, quantization, ["lm_head", "model.vision_tower"])
    tiny_adapters.write_adapter(plain, ["q_proj", "lm_head"], tmp_path)
    models = [
        PeftModel.from_pretrained(load(workspace.checkpoint, quantization, skip), tmp_path).eval()
        for skip in (["lm_head", "model.vision_tower"], ["model.vision_tower"])
    ]
    assert off_by(*models) == 0.0


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("offload", ["layers", "both"])
def test_split(workspace: Any, quantization: str, offload: str, tmp_path: Path) -> None:
    skip = ["model.vision_tower", "model.audio_tower"]
    reference = load(workspace.checkpoint, quantization, ["lm_head", *skip])
    expected = workspace.outputs(reference)
    model = workspace.dispatch(load(workspace.checkpoint, quantization, skip), offload)
    assert difference(expected, workspace.outputs(model)) == 0.0
    placement = tiny.device_map(reference, offload, main=workspace.main, offloaded=workspace.offloaded)
    placement |= {"lm_head": workspace.offloaded, "model.language_model.embed_tokens": workspace.offloaded}
    with gemma4_compat.quantize(offloaded=True):
        model = load(workspace.checkpoint, quantization, skip, device_map=placement, offload_folder=tmp_path)
    assert difference(expected, workspace.outputs(model)) == 0.0


def test_the_modules_worth_keeping_without_the_head(workspace: Any) -> None:
    keep = list(gemma4_compat.quantization_skip_modules(workspace.checkpoint))
    assert keep[0] == "lm_head"
    assert off_by(load(workspace.checkpoint, "4bit", keep), load(workspace.checkpoint, "4bit", keep[1:])) == 0.0


def test_a_model_of_another_family_is_left_alone(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    shape.tie_word_embeddings = True
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(tmp_path)
    model = load(tmp_path, "4bit", ["q_proj"], cls="LlamaForCausalLM")
    assert type(model.lm_head).__name__ == "Linear4bit"
    assert model.config.quantization_config.llm_int8_skip_modules == ["q_proj"]
