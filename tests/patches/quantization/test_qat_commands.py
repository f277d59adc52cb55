"""What the commands say of Google's QAT checkpoints: they know them, or name the way that works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gemma4_compat import cli
from gemma4_compat._lab import tiny_adapters
from tests.patches.quantization import qat

pytestmark = qat.needs_quantizer


def said(*arguments: Any) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def adapter(workspace: Any, tmp_path: Path) -> Path:
    return tiny_adapters.write_adapter(qat.load(workspace.qat()), ["q_proj", "up_proj"], tmp_path / "adapter")


def test_scan_knows_the_bits_of_the_layers(workspace: Any, adapter: Path) -> None:
    code, text = said("scan", adapter, workspace.qat())
    assert code == 0
    assert "-bit linear" in text
    assert "An adapter cannot be merged into them, only into the model that dequantize() gives" in text
    code, text = said("scan", adapter, workspace.qat(), "--json")
    assert json.loads(text)["quantization"] == "gemma"


@pytest.mark.parametrize("command", ["plan", "plan-training"])
def test_plan_says_what_to_use(workspace: Any, command: str) -> None:
    code, text = said(command, workspace.qat(), "--vram", "8GiB")
    assert code == 2
    assert "QAT (quant_method 'gemma')" in text
    assert "device_map='auto'" in text


@pytest.mark.parametrize("start", ["original", "dequantized"])
def test_merge_says_how(workspace: Any, adapter: Path, tmp_path: Path, start: str) -> None:
    code, text = said("merge", workspace.qat(), adapter, tmp_path / "out", "--start", start)
    assert code == 2
    assert "call model.dequantize() and model.save_pretrained(FOLDER)" in text
    assert not (tmp_path / "out").exists()


def test_repair_refuses_what_is_quantized_in_one_line(workspace: Any, tmp_path: Path) -> None:
    code, text = said("repair", workspace.qat(), "--from", workspace.checkpoint, tmp_path / "out")
    assert code == 2
    assert text.startswith("gemma4-compat: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("reader", ["vllm", "peft"])
def test_an_adapter_of_one_is_exported(workspace: Any, adapter: Path, tmp_path: Path, reader: str) -> None:
    code, text = said("export", adapter, tmp_path / "out", "--for", reader, "--base", workspace.qat())
    assert code == 0, text
    assert (tmp_path / "out").is_dir()
