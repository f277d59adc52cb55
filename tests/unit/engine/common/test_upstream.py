"""What the libraries would build of hostile settings is refused before; what they write themselves is read."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._engine.io import json_files, patterns
from gemma4_compat._engine.io.formats import AdapterConfig, ModelConfig
from gemma4_compat._gemma4.models import variants
from tests.unit.gemma4.adapters.adapter_files import LORA, lora, write_adapter

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs the upstream libraries: pip install 'gemma4-compat[test]'"
)
MODULE = "model.language_model.layers.0.self_attn.q_proj"


@pytest.fixture
def hostile(tmp_path: Path) -> Any:
    def write(**settings: Any) -> Path:
        return write_adapter(tmp_path / "adapter", lora(MODULE), LORA | settings)

    return write


@pytest.fixture
def base(workspace: Any, tmp_path: Path) -> Any:
    """``base(text=..., **settings)``: the checkpoint's configuration with other settings."""

    def write(text: dict[str, Any] | None = None, **settings: Any) -> Path:
        folder = tmp_path / "base"
        folder.mkdir()
        config = json.loads((workspace.checkpoint / "config.json").read_text()) | settings
        config["text_config"] |= text or {}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def test_a_rank_far_above_the_weights_is_refused_before_peft_makes_the_matrices(
    hostile: Any, workspace: Any, tmp_path: Path
) -> None:
    for settings in ({"r": 10**6}, {"rank_pattern": {"q_proj": 10**6}}):
        with pytest.raises(Gemma4CompatError, match="is 1000000, and the longest side of a weight beside it is 64"):
            gemma4_compat.merge_adapter(workspace.checkpoint, hostile(**settings), tmp_path / "out", check=0)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "(.+)+x"},
        {"exclude_modules": "(.*)*x"},
        {"modules_to_save": ["(.+)+x"]},
        {"alpha_pattern": {"(.+)+x": 8}},
        {"layers_pattern": "(.+)+x", "layers_to_transform": [0]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_pattern_that_backtracks_is_refused_before_peft_matches_it(
    hostile: Any, workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.1)  # of a computation that does not end
    adapter = hostile(**settings)
    with pytest.raises(Gemma4CompatError, match=r"takes more than 0\.1 s to match"):
        gemma4_compat.scan_adapter(adapter, workspace.checkpoint)
    with pytest.raises(Gemma4CompatError, match=r"takes more than 0\.1 s to match"):
        gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "out", check=0)


def test_the_patterns_people_write_are_matched(hostile: Any, workspace: Any) -> None:
    of_unsloth = (
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
        r"(?:k_proj|v_proj|q_proj|o_proj|gate_proj|up_proj|down_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp)\.(?:(?:q_proj|k_proj|v_proj)))"
    )
    for pattern in (of_unsloth, r"^(?!.*(vision|audio)).*\.q_proj$", r".*layers\.0\.self_attn\.q_proj"):
        found = gemma4_compat.scan_adapter(hostile(target_modules=pattern), workspace.checkpoint)
        assert "untargeted" not in [problem.id for problem in found.problems]


@pytest.mark.parametrize(
    "text, settings, message",
    [
        ({"num_hidden_layers": 10**6}, {}, r"text_config.num_hidden_layers: expected int <= 200"),
        ({"head_dim": "64"}, {}, r"text_config.head_dim: expected int"),
        ({"layer_types": ["none"] * 3}, {}, "cannot be read|no model can be built"),
        ({"num_attention_heads": 7}, {}, ""),
        ({}, {"architectures": ["Gemma4Processor"]}, "no model can be built from config.json"),
        ({}, {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}, "cannot be read"),
    ],
)
def test_a_base_of_odd_settings_is_answered_or_one_error(
    base: Any, monkeypatch: pytest.MonkeyPatch, text: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks whether to run code of the folder"))
    folder, began = base(text, **settings), time.process_time()
    if not message:
        gemma4_compat.plan_device_map(folder, "8GiB")
        return
    with pytest.raises(Gemma4CompatError, match=message):
        gemma4_compat.plan_device_map(folder, "8GiB")
    assert time.process_time() - began < 10


def test_every_configuration_that_peft_writes_is_read(tmp_path: Path) -> None:
    import peft

    needs: dict[str, dict[str, Any]] = {"ADALORA": {"total_step": 10}, "CPT": {"task_type": "CAUSAL_LM"}}
    for name, kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items():
        try:
            config = kind(**needs.get(name.value, {}))
        except ImportError:  # ADAMSS needs scikit-learn
            continue
        config.save_pretrained(tmp_path)
        assert json_files.settings(tmp_path / "adapter_config.json", AdapterConfig)["peft_type"] == name.value


def test_every_configuration_that_transformers_writes_is_read(tmp_path: Path) -> None:
    for name in variants.NAMES:
        try:
            config = variants.config(name)
        except Gemma4CompatError:  # the 12B, before transformers 5.10
            continue
        config.save_pretrained(tmp_path)
        assert json_files.settings(tmp_path / "config.json", ModelConfig)["model_type"] == config.model_type
