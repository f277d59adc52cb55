"""transformers-quantized-router: routers of a quantized mixture of experts stay in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.quantization.transformers_quantized_router import PATCH
from tests.patches.promise import Promise

ROUTER = "model.language_model.layers.{}.router.proj"


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"router\.proj is a Linear4bit; [1-9]\d*% of the tokens are sent to other experts"


@pytest.fixture(scope="module")
def checkpoint(workspace: Any) -> Path:
    return workspace.cached(tiny_models.build_moe_checkpoint)


def kinds(model: Any) -> set[str]:
    return {type(model.get_submodule(ROUTER.format(index))).__name__ for index in range(3)}


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_its_weights_are_those_of_the_checkpoint(workspace: Any, checkpoint: Path, quantization: str) -> None:
    import torch

    model = tiny.load(checkpoint, quantization, device=workspace.main)
    assert kinds(model) == {"Linear"}
    weight = model.get_submodule(ROUTER.format(0)).weight
    plain = tiny.load(checkpoint, device=workspace.main)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, plain.get_submodule(ROUTER.format(0)).weight)


def test_the_configuration_that_was_given_is_not_changed(workspace: Any, checkpoint: Path) -> None:
    import transformers

    config = tiny.quantization_config("4bit")
    before = list(config.llm_int8_skip_modules)
    model = transformers.Gemma4ForConditionalGeneration.from_pretrained(
        checkpoint, device_map={"": workspace.main}, quantization_config=config
    )
    assert config.llm_int8_skip_modules == before
    assert model.config.quantization_config.llm_int8_skip_modules == [*before, "router.proj"]


@pytest.mark.parametrize("skip", [None, ["lm_head"], ["router.proj"], ["model.language_model.layers.1"]])
def test_what_else_is_quantized_stays_the_same(workspace: Any, checkpoint: Path, skip: list[str] | None) -> None:
    from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

    def names() -> set[str]:
        # A tower of clipped linears cannot be quantized alone on every release: here nothing is computed.
        model = Gemma4ForConditionalGeneration.from_pretrained(
            checkpoint,
            device_map={"": workspace.main},
            quantization_config=BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skip),
        )
        return {name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}

    found = names()
    gemma4_compat.revert(PATCH.id)
    try:
        upstream = names()
    finally:
        gemma4_compat.install()
    assert found == {name for name in upstream if not name.endswith("router.proj")}
    assert any(name.endswith("layers.0.router.proj") for name in upstream) == (skip != ["router.proj"])


def test_saved_and_loaded_again_with_and_without_the_patch(workspace: Any, checkpoint: Path, tmp_path: Path) -> None:

    import transformers

    model = tiny.load(checkpoint, "4bit", device=workspace.main)
    outputs = workspace.outputs(model, text_only=True)
    model.save_pretrained(tmp_path)

    def again() -> Any:
        return transformers.Gemma4ForConditionalGeneration.from_pretrained(
            tmp_path, device_map={"": workspace.main}
        ).eval()

    assert kinds(again()) == {"Linear"}
    gemma4_compat.revert(PATCH.id)
    try:
        assert difference(outputs, workspace.outputs(again(), text_only=True)) == 0.0
    finally:
        gemma4_compat.install()
    assert difference(outputs, workspace.outputs(again(), text_only=True)) == 0.0


def test_a_checkpoint_with_quantized_routers_is_loaded_as_it_is(
    workspace: Any, checkpoint: Path, tmp_path: Path
) -> None:
    import transformers

    gemma4_compat.revert(PATCH.id)
    try:
        model = tiny.load(checkpoint, "4bit", device=workspace.main)
        assert kinds(model) == {"Linear4bit"}
        outputs = workspace.outputs(model, text_only=True)
        model.save_pretrained(tmp_path)
    finally:
        gemma4_compat.install()
    again = transformers.Gemma4ForConditionalGeneration.from_pretrained(tmp_path, device_map={"": workspace.main})
    assert kinds(again) == {"Linear4bit"}
    assert difference(outputs, workspace.outputs(again.eval(), text_only=True)) == 0.0


def test_a_model_without_experts_is_left_alone(workspace: Any) -> None:
    model = workspace.load("4bit")
    assert "router.proj" not in model.config.quantization_config.llm_int8_skip_modules
