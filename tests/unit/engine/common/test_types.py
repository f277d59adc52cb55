"""A value of another type, anywhere in a configuration, is one error that names it; unknown fields are allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._engine.io import json_files
from gemma4_compat._engine.io.formats import AdapterConfig, ModelConfig
from tests.unit.gemma4.adapters.adapter_files import LORA, lora, write_adapter

TEXT = "model.layers.{}.self_attn.q_proj"

#: Values of types that a setting does not have. On these, scans gave answers or tracebacks.
WRONG_IN_ADAPTERS: list[tuple[str, Any]] = [
    ("r", "4"),
    ("r", 4.5),
    ("r", True),
    ("r", [4]),
    ("r", 10**7),
    ("r", -1),
    ("r", 10**39),
    ("lora_alpha", "8"),
    ("lora_alpha", [8]),
    ("use_rslora", "yes"),
    ("use_dora", 1),
    ("lora_bias", "none"),
    ("fan_in_fan_out", {}),
    ("bias", ["none"]),
    ("rank_pattern", [1]),
    ("rank_pattern", "q_proj"),
    ("alpha_pattern", 3),
    ("target_modules", 1),
    ("target_modules", [1]),
    ("target_modules", [["q_proj"]]),
    ("target_modules", {"q_proj": 1}),
    ("target_modules", ["q" * 2000]),
    ("exclude_modules", [None]),
    ("feedforward_modules", 1),
    ("target_parameters", "experts"),
    ("target_parameters", [1]),
    ("modules_to_save", "lm_head"),
    ("modules_to_save", [1]),
    ("layers_to_transform", "0"),
    ("layers_to_transform", ["0"]),
    ("layers_pattern", 1),
    ("trainable_token_indices", "1"),
    ("trainable_token_indices", {"embed_tokens": "1"}),
    ("layer_replication", [1]),
    ("base_model_name_or_path", 1),
    ("base_model_name_or_path", ["google"]),
    ("peft_version", 0.19),
    ("auto_mapping", "gemma"),
]


@pytest.mark.parametrize("name, value", WRONG_IN_ADAPTERS)
def test_a_setting_of_another_type_is_one_error_that_names_it(tmp_path: Path, name: str, value: Any) -> None:
    write_adapter(tmp_path, lora(TEXT.format(0)), LORA | {name: value})
    with pytest.raises(
        Gemma4CompatError, match=rf"a setting in .*adapter_config.json' cannot be right: {name}"
    ) as caught:
        gemma4_compat.scan_adapter(tmp_path)
    assert len(str(caught.value)) < 400


def test_settings_of_newer_releases_are_allowed(tmp_path: Path) -> None:
    newer = {"of_a_newer_release": {"a": [1, None, {"b": 0.5}]}, "alpha": float("inf"), "eva_config": None}
    write_adapter(tmp_path, lora(TEXT.format(0)), LORA | newer)
    assert gemma4_compat.scan_adapter(tmp_path).ok


def test_a_configuration_at_the_size_of_the_largest_real_ones_is_read(tmp_path: Path) -> None:
    every_token = {"trainable_token_indices": {"embed_tokens": list(range(262_144))}}
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(LORA | every_token, indent=2))
    assert 3 << 20 < file.stat().st_size < json_files.SETTINGS_LIMIT
    assert json_files.settings(file, AdapterConfig)["r"] == 4


def test_a_name_that_no_file_can_have_is_one_error(tmp_path: Path) -> None:
    for name in ("a" * 300, "a/" + "b" * 300, "a\0b", "/".join(["a"] * 3000)):
        with pytest.raises(Gemma4CompatError, match=r"cannot be read|does not exist|is neither a folder") as caught:
            gemma4_compat.scan_adapter(name)
        assert len(str(caught.value)) < 7000


WRONG_IN_MODELS: list[tuple[str, Any]] = [
    ("architectures", "Gemma4ForCausalLM"),
    ("architectures", [1]),
    ("model_type", 1),
    ("text_config", []),
    ("text_config", {"num_hidden_layers": 10**6}),
    ("text_config", {"num_hidden_layers": "2"}),
    ("text_config", {"hidden_size": 0}),
    ("text_config", {"hidden_size": 2**40}),
    ("text_config", {"layer_types": "full_attention"}),
    ("text_config", {"layer_types": ["full_attention"] * 1000}),
    ("text_config", {"num_key_value_heads": 0}),
    ("text_config", {"rope_parameters": 1}),
    ("text_config", {"num_labels": 10**9}),
    ("vision_config", {"num_hidden_layers": 10**6}),
    ("vision_config", {"patch_size": 0}),
    ("audio_config", {"subsampling_conv_channels": 5}),
    ("num_labels", 10**9),
    ("quantization_config", "4bit"),
    ("tie_word_embeddings", "yes"),
    ("id2label", ["a"]),
]


@pytest.mark.parametrize("name, value", WRONG_IN_MODELS)
def test_a_model_of_other_types_or_sizes_is_refused_before_it_is_built(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", name: value}))
    with pytest.raises(Gemma4CompatError, match=rf"a setting in .*config.json' cannot be right: {name}"):
        json_files.settings(tmp_path / "config.json", ModelConfig)


def test_settings_that_say_nothing_are_allowed(tmp_path: Path) -> None:
    for format in (AdapterConfig, ModelConfig):
        (tmp_path / "c.json").write_text(json.dumps(dict.fromkeys(format.__struct_fields__)))
        assert set(json_files.settings(tmp_path / "c.json", format).values()) == {None}
