"""What a scan takes as a base, the command with a base, and the files it reads."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

import peft
import transformers

import gemma4_compat
from gemma4_compat import Gemma4CompatError, cli
from gemma4_compat._adapter_tools.scan.result import tower_of
from gemma4_compat._gemma4.adapters.saved import read
from gemma4_compat._gemma4.checkpoint import header
from gemma4_compat._gemma4.models import build
from gemma4_compat._lab import tiny_adapters
from tests.unit.adapter_tools.scan.helpers import NAMES, expected_shapes, hits, ids, json_of, scan
from tests.unit.gemma4.adapters.adapter_files import PREFIX, write_adapter

HAS_UNIFIED = hasattr(transformers, "Gemma4UnifiedConfig")


@pytest.mark.parametrize("quantization, kind", [("4bit", "4-bit"), ("4bit-double", "4-bit"), ("8bit", "8-bit")])
@pytest.mark.parametrize("stored", [False, True], ids=["asked", "stored"])
def test_a_quantized_base(workspace: Any, bare: Path, quantization: str, kind: str, stored: bool) -> None:
    model = workspace.load(quantization)
    if stored:
        model.config.save_pretrained(bare)
    found = scan(workspace.adapter("all"), bare, quantize=None if stored else quantization)
    assert ids(found) == []
    assert found.quantization == quantization
    types = Counter(
        (tower_of(path), type(model.get_submodule(path)).__name__)
        for path in {key.partition(".lora_")[0].removeprefix(PREFIX) for key in read(workspace.adapter("all")).tensors}
    )
    names = {"Linear": "", "Linear4bit": "4-bit ", "Linear8bitLt": "8-bit "}
    expected = {
        (tower, f"{'' if tower == 'text' else 'clipped '}{names[name]}linear"): count
        for (tower, name), count in types.items()
    }
    assert hits(found) == expected
    assert ("text", f"{kind} linear") in expected


def test_a_base_quantized_by_others(workspace: Any, bare: Path) -> None:
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    found = scan(workspace.adapter("language"), bare)
    assert (found.quantization, ids(found)) == ("gptq", [])
    assert "quantized with gptq" in found.notes[0]


def test_a_model_as_base_is_not_changed(workspace: Any) -> None:
    model = workspace.load(None)
    before = list(model.state_dict())
    assert scan(workspace.adapter("all"), model).ok
    assert list(model.state_dict()) == before


@pytest.mark.skipif(not HAS_UNIFIED, reason="this transformers has no gemma4_unified")
def test_the_12b(tmp_path: Path) -> None:
    model, *_ = build.on_meta("12B")
    config = peft.LoraConfig(r=8, target_modules=NAMES)
    data = json_of(config)
    found = scan(write_adapter(tmp_path, expected_shapes(config, model), data), "12B")
    assert ids(found) == []
    assert found.model_class == "Gemma4UnifiedForConditionalGeneration"
    assert set(hits(found)) == {("text", "linear")}


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"model_type": "llama"}', "is a llama model, not a Gemma 4"),
        ("{", "is not JSON"),
        (None, "there is no config.json"),
    ],
)
def test_a_base_that_is_none(workspace: Any, tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    result = CliRunner().invoke(cli.app, ["scan", str(workspace.adapter("language")), str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_unknown_base_and_an_unknown_quantization(workspace: Any, bare: Path) -> None:
    with pytest.raises(Gemma4CompatError, match="'E3B' is not a folder, not a variant"):
        scan(workspace.adapter("language"), "E3B")
    with pytest.raises(Gemma4CompatError, match="quantization '3bit' is unknown"):
        scan(workspace.adapter("language"), bare, quantize="3bit")


def test_the_command_as_json_is_the_scan(workspace: Any, bare: Path) -> None:
    arguments = ["scan", str(workspace.adapter("all")), str(bare), "--quantize", "8bit", "--json"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    expected = scan(workspace.adapter("all"), bare, quantize="8bit").as_data()
    assert json.loads(result.stdout) == {
        "schema": 1,
        "gemma4_compat": gemma4_compat.__version__,
        **json.loads(json.dumps(expected)),
    }


def test_the_command_says_what_is_hit(changed: Any, bare: Path) -> None:
    folder = changed(
        "towers", lambda key: key.replace(".linear.", "."), target_modules=tiny_adapters.TARGETS["towers"]
    )
    result = CliRunner().invoke(cli.app, ["scan", str(folder), str(bare)], terminal_width=100)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for part in (
        "No problems.",
        "keys 40: vision 20, audio 20",
        "on vision: 10 clipped linear audio: 10 clipped linear",
        "redirected 20 targets are clipped wrappers; their inner .linear is adapted",
        "renamed 40 keys, such as",
    ):
        assert part in text


@pytest.mark.parametrize("name", ["language", "towers", "all"])
def test_the_header_is_what_safetensors_reads(workspace: Any, name: str) -> None:
    from safetensors import safe_open

    file = workspace.adapter(name) / "adapter_model.safetensors"
    tensors = header.header(file)
    with safe_open(file, framework="pt") as opened:
        assert set(tensors) == set(opened.keys())
        for key, tensor in tensors.items():
            piece = opened.get_slice(key)
            assert (tensor.dtype, list(tensor.shape)) == (piece.get_dtype(), list(piece.get_shape()))


def test_an_adapter_in_the_cache_of_the_hub(workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--someone--adapter"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123")
    shutil.copytree(workspace.adapter("language"), repository / "snapshots" / "0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = gemma4_compat.scan_adapter("someone/adapter")
    assert found.adapter == str(repository / "snapshots" / "0123")
    assert found.ok
