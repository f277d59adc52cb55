"""What commands print of files: shown, never obeyed by a terminal, and no secrets."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning, cli
from gemma4_compat._adapter_tools.scan import configuration
from gemma4_compat._engine.io import terminal
from tests.unit.commands.helpers import command
from tests.unit.gemma4.adapters.adapter_files import LORA, PREFIX, lora, write_adapter

#: Colours, a title, a bell, a line of its own, text that runs backwards.
EVIL = "a\x1b[31m\x1b]0;title\x07\nNo problems.\u202etxt\x9b"
MODULE = "model.layers.0.self_attn.q_proj"


def says(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


def assert_shown(text: str, *, also: tuple[str, ...] = ()) -> None:
    """No character of :data:`EVIL` as it is, and none of its lines as a line."""
    lines = text.split("\n")
    assert [line for line in lines if not line.isprintable()] == []
    assert "No problems.\\u202etxt\\x9b" not in lines
    assert any("\\x1b[31m" in line for line in lines), text
    for part in also:
        assert part in text


def evil_adapter(folder: Path, **settings: Any) -> Path:
    shapes = lora(MODULE) | {f"{PREFIX}{EVIL}.lora_A.weight": (4, 64)}
    return write_adapter(folder, shapes, LORA | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"base_model_name_or_path": EVIL},
        {"peft_version": EVIL},
        {"target_modules": [EVIL]},
        {"modules_to_save": [EVIL, "b"]},
    ],
)
def test_a_scan_shows_control_characters_as_escapes(tmp_path: Path, settings: dict[str, Any]) -> None:
    done = says("scan", str(evil_adapter(tmp_path / "adapter", **settings)))
    assert done.exit_code == 1, done.output
    assert_shown(done.stdout)


@pytest.mark.parametrize("settings", [{"peft_type": EVIL}, {"rank_pattern": {EVIL: 0}}])
def test_errors_show_control_characters_as_escapes(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "_installed_types", set)  # without the seconds that PEFT takes to import
    folder = evil_adapter(tmp_path / "adapter", **settings)
    done = says("scan", str(folder))
    assert (done.exit_code, done.stdout) == (2, "")
    assert_shown(done.stderr)
    with pytest.raises(Gemma4CompatError) as caught:
        gemma4_compat.scan_adapter(folder)
    assert str(caught.value).isprintable()


def test_the_json_of_a_scan_is_of_characters_every_parser_takes(tmp_path: Path) -> None:
    done = says("scan", str(evil_adapter(tmp_path, base_model_name_or_path=EVIL)), "--json")
    json.loads(done.stdout)
    assert done.stdout.isascii()
    assert_shown(done.stdout.replace("\\u001b", "\\x1b"))
    # Half a surrogate pair is JSON that some parsers refuse. Names of files can hold it.
    assert json.loads(terminal.json_text({"a\udc80": ["b\ud800"]})) == {"schema": 1, "a\\udc80": ["b\\ud800"]}


@pytest.mark.parametrize(
    "line",
    [
        f"transformers {EVIL}",
        f"transformers @ https://example.org/{EVIL}",
        f"--{EVIL}",
        f"./{EVIL}",
        f"transformers; sys_platform == '{EVIL}'",
    ],
)
def test_needed_shows_control_characters_as_escapes(tmp_path: Path, line: str) -> None:
    file = tmp_path / f"{EVIL[:6]}.txt"
    file.write_text(line.replace("\n", " "), encoding="utf-8")
    done = says("needed", str(file))
    assert_shown(done.stdout + done.stderr)


def test_names_of_folders_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / EVIL, lora(MODULE))
    done = says("scan", str(folder))
    assert done.exit_code == 0, done.output
    assert_shown(done.stdout)
    assert_shown(says("scan", str(folder / "none")).stderr)
    assert_shown(says("scan", str(folder), "one", EVIL).stderr)
    assert_shown(says("scan", f"--{EVIL}").stderr)


def test_an_encoding_that_is_distrusted_shows_control_characters_too(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "häuser\x1b[31m", lora(MODULE))
    code, out, error = command("scan", str(folder), environment={"PYTHONIOENCODING": "ascii"})
    assert (code, error) == (0, "")
    assert "h\\xe4user\\x1b[31m" in out


def test_what_other_libraries_print_in_a_command_is_shown_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path, lora(MODULE))

    def noisy(*_: Any, **__: Any) -> Any:
        print(EVIL)
        print(EVIL, file=sys.stderr)
        sys.stderr.writelines([EVIL])
        print(warnings.formatwarning(UserWarning(EVIL), UserWarning, "file.py", 1), file=sys.stderr)
        return gemma4_compat._adapter_tools.scan.job.scan_adapter(folder)  # type: ignore[attr-defined]

    monkeypatch.setattr(gemma4_compat, "scan_adapter", noisy)
    streams = sys.stdout, sys.stderr
    done = says("scan", str(folder))
    assert [line for line in done.output.split("\n") if not line.isprintable()] == []
    assert done.stderr.count("\\x1b[31m") == 3, done.stderr
    assert (sys.stdout, sys.stderr) == streams


def test_errors_and_warnings_are_one_printable_line() -> None:
    for kind in (Gemma4CompatError, Gemma4CompatWarning):
        assert str(kind(f"{EVIL}\ud800")).isprintable()
        assert str(kind("the façade of “E2B” costs 5 €")) == "the façade of “E2B” costs 5 €"


SECRET = "hunter2-hunter2"


@pytest.mark.parametrize(
    "line",
    [
        f"machine github.com login me password {SECRET}",
        f"API_KEY={SECRET}",
        f"export HF_TOKEN='{SECRET}'",
        f"{SECRET}+abc/def==",
        f"{SECRET}/x.whl",
        f"https://me:{SECRET}@example.org/simple",
        f"git+https://me:{SECRET}@example.org/other.git",
        f"transformers @ git+https://{SECRET}@example.org/transformers.git",
        f"--password {SECRET}",
        f"-----BEGIN {SECRET} PRIVATE KEY-----",
        f"password: {SECRET}",
        f"-r https://me:{SECRET}@example.org/more.txt",
        f"some/path ; password {SECRET}",
        "${SECRET} and more",
    ],
)
@pytest.mark.parametrize("included", [False, True])
def test_secrets_of_a_file_that_is_no_requirements_file_are_not_printed(
    tmp_path: Path, line: str, included: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    (tmp_path / ".env").write_text(line)
    file = tmp_path / "secrets.txt"
    file.write_text("-r .env" if included else line)
    for options in ([], ["--json"]):
        done = says("needed", str(file), *options)
        assert SECRET not in done.output
        assert SECRET not in repr(done.exception)
        if done.exit_code:
            assert f"{'.env' if included else 'secrets.txt'} line 1" in done.stderr


@pytest.mark.parametrize("name", [".netrc", ".env", "id_rsa", "token"])
def test_what_has_no_name_of_a_requirements_file_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(SECRET)
    done = says("needed", str(tmp_path / name))
    assert done.exit_code == 2
    assert "the name must tell what this is" in done.stderr
    assert SECRET not in done.output
