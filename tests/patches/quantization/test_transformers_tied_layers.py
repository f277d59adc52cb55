"""transformers-tied-layers: layers that share their weights with other layers are quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import relatives
from gemma4_compat._lab.workspace import MissingPartError, Workspace, difference
from gemma4_compat.patches.quantization.transformers_tied_layers import PATCH
from tests.helpers import without
from tests.patches.promise import Promise

QUANTIZED = ("4bit", "4bit-double", "8bit")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"linears of the decoder are in bf16"


@pytest.fixture
def checkpoint(workspace: Workspace) -> Path:
    try:
        return workspace.cached(relatives.build)
    except MissingPartError as error:
        pytest.skip(str(error))


def untied(workspace: Workspace, quantization: str, skip: list[str]) -> Any:
    """The model whose layers have a copy each of what the other one shares."""
    return relatives.load_relative(workspace.cached(relatives.build_untied_diffusion), quantization, skip_modules=skip)


def both(model: Any) -> tuple[Any, Any]:
    return model.model.encoder.language_model.layers[0], model.model.decoder.layers[0]


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_encoder_and_decoder_share_one_quantized_weight(checkpoint: Path, quantization: str) -> None:
    model = relatives.load_relative(checkpoint, quantization)
    assert not relatives.plain_linears(model.model)
    encoder, decoder = both(model)
    for one, other in (
        (encoder.self_attn.k_proj, decoder.self_attn.k_proj),
        (encoder.mlp.up_proj, decoder.mlp.up_proj),
    ):
        assert not one.weight.is_floating_point()
        assert one.weight is other.weight
    assert type(model.lm_head).__name__ == "Linear"
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_list_of_ones_own(workspace: Workspace, checkpoint: Path, quantization: str) -> None:
    """Upstream obeys it; the decoder in 8 bits found no scales."""
    skip = ["lm_head", "router.proj", "self_attn.q_proj"]
    model = relatives.load_relative(checkpoint, quantization, skip_modules=skip)
    assert {name.rpartition(".")[2] for name in relatives.plain_linears(model.model)} == {"q_proj"}
    expected = relatives.outputs(untied(workspace, quantization, skip))
    assert difference(expected, relatives.outputs(model)) == 0.0


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_saved_and_loaded_with_and_without_the_patch(checkpoint: Path, quantization: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    model = relatives.load_relative(checkpoint, quantization)
    expected = relatives.outputs(model)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if name.startswith("model.encoder.language_model.layers.0.mlp")]  # noqa: SIM118
    assert difference(expected, relatives.outputs(relatives.load_relative(tmp_path))) == 0.0
    if quantization != "8bit":  # there the decoder has no scales without it
        with without(PATCH.id):
            assert difference(expected, relatives.outputs(relatives.load_relative(tmp_path))) == 0.0


def test_the_configuration_that_was_given_is_not_changed(checkpoint: Path) -> None:
    import torch
    from transformers import BitsAndBytesConfig, DiffusionGemmaForBlockDiffusion

    given = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        checkpoint, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=given
    )
    assert given.llm_int8_skip_modules is None
    assert "lm_head" in model.config.quantization_config.llm_int8_skip_modules


def test_what_upstream_quantized_loads_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    """Its towers only: the text model's weights are in bf16 in the file."""
    with without(PATCH.id):
        upstream = relatives.load_relative(checkpoint, "4bit")
        upstream.save_pretrained(tmp_path)
        expected = relatives.outputs(upstream)
    model = relatives.load_relative(tmp_path)
    assert relatives.plain_linears(model.model.decoder.layers)
    assert difference(expected, relatives.outputs(model)) == 0.0


def test_a_model_that_is_not_quantized_is_saved_as_before(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    relatives.load_relative(checkpoint).save_pretrained(tmp_path / "with")
    with without(PATCH.id):
        relatives.load_relative(checkpoint).save_pretrained(tmp_path / "without")
    ours, upstream = (load_file(tmp_path / name / "model.safetensors") for name in ("with", "without"))
    assert ours.keys() == upstream.keys()
    assert all(ours[name].equal(upstream[name]) for name in upstream)
