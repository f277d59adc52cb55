"""transformers-tied-layers: layers that share their weights with other layers are quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.quantization import config
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


#: One transformer block for all hybrid layers, and two in turn. bitsandbytes packs for a CPU by 32 rows.
_SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
ZAMBAS: dict[str, dict[str, Any]] = {
    "Zamba": {
        **_SHAPE,
        "num_hidden_layers": 5,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "Zamba2": {
        **_SHAPE,
        "num_hidden_layers": 8,
        "layers_block_type": ["mamba", "mamba", "hybrid", "hybrid"] * 2,
        "hybrid_layer_ids": [2, 3, 6, 7],
        "num_mem_blocks": 2,
        "mamba_d_state": 16,
        "n_mamba_heads": 32,
        "mamba_ngroups": 1,
    },
}


def build_zamba(folder: Path, name: str, *, tied: bool = True) -> Path:
    """A tiny model; ``tied=False``: with a copy of each shared weight."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**ZAMBAS[name]))
    model.bfloat16().save_pretrained(folder)
    if not tied:
        from safetensors.torch import save_file

        weights = {key: value.clone() for key, value in model.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}), encoding="utf-8")
    return folder


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.arange(3, 27)[None], use_cache=False).logits


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("name", ZAMBAS)
def test_layers_of_another_family(name: str, quantization: str, tmp_path: Path) -> None:
    """Quantized, as with a copy of each shared weight, and saved; without the patch what is shared stays in bf16."""
    tied, apart = build_zamba(tmp_path / "tied", name), build_zamba(tmp_path / "apart", name, tied=False)
    with without(PATCH.id):
        upstream = relatives.plain_linears(relatives.load_relative(tied, quantization))
    assert [path for path in upstream if ".shared_transf" in path]
    model = relatives.load_relative(tied, quantization)
    assert relatives.plain_linears(model) == ["lm_head"]
    skip = model.config.quantization_config.llm_int8_skip_modules
    reference = relatives.load_relative(apart, quantization, skip_modules=skip)
    assert len({id(weight) for weight in reference.parameters()}) > len({id(weight) for weight in model.parameters()})
    expected = logits(reference)
    assert logits(model).equal(expected)
    model.save_pretrained(tmp_path / "saved")
    assert logits(relatives.load_relative(tmp_path / "saved")).equal(expected)


@pytest.mark.parametrize("name", ZAMBAS)
def test_a_model_that_lost_layers_is_saved_as_before(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def save(folder: Path) -> dict[str, Any]:
        model = relatives.load_relative(build_zamba(tmp_path / "whole", name))
        model.model.layers = model.model.layers[:2]
        model.save_pretrained(folder)
        return load_file(folder / "model.safetensors")

    ours = save(tmp_path / "with")
    with without(PATCH.id):
        upstream = save(tmp_path / "without")
    assert ours.keys() == upstream.keys()
    assert all(ours[key].equal(upstream[key]) for key in upstream)


def test_heads_that_share_weights_are_not_layers() -> None:
    """A detector's: quantized, its boxes would be others. The linears of each head are called ``layers.0``."""
    import torch
    import transformers

    with torch.device("meta"):
        model = transformers.RTDetrV2ForObjectDetection(transformers.RTDetrV2Config(decoder_layers=2))
    heads = {name.rpartition(".")[0] for name in model.all_tied_weights_keys}
    assert {type(model.get_submodule(head)) for head in heads} == {torch.nn.Linear}
    assert "bbox_embed.1.layers.0" in heads
    assert config.tied_layers(model) == {}
