"""The command ``merge``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from gemma4_compat import cli


def test_the_command_merges_reports_and_exits(workspace: Any, base: Path, tmp_path: Path) -> None:
    arguments = ["merge", str(base), str(workspace.adapter("language")), str(tmp_path / "out")]
    options = ["--start", "dequantized", "--quantize", "4bit", "--check", "1", "--device-map", '{"": "cpu"}', "--json"]
    done = CliRunner().invoke(cli.app, arguments + options)
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["parity"]["ok"]
    assert data["quantization"] == "4bit"
    done = CliRunner().invoke(cli.app, [*arguments[:3], str(tmp_path / "more"), "--check", "0", "--dtype", "fp32"])
    assert done.exit_code == 0, done.output
    assert "not measured (--check 0)" in done.output
    maps = [[*arguments[:3], str(tmp_path / "x"), "--device-map", text] for text in ("{", '{"a":' * 5000)]
    for wrong in (arguments, *maps, [*arguments, "--start", "x"]):
        done = CliRunner().invoke(cli.app, wrong)
        assert done.exit_code == 2, done.exception


def test_the_help_says_when_each_base_is_right() -> None:
    done = CliRunner().invoke(cli.app, ["merge", "--help"], terminal_width=200)
    text = " ".join(done.output.replace("│", " ").split())
    assert "right if the merged model is used in bf16" in text
    assert "right if the adapter was trained and evaluated on the quantized base" in text
