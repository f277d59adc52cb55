"""Files that cannot be understood."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gemma4_compat import Gemma4CompatError, cli
from tests.unit.needed.helpers import Ask


@pytest.mark.parametrize(
    "name, text, message",
    [
        (
            "requirements.txt",
            "peft\ntransformers=>5",
            r"requirements.txt line 2: 'transformers=>5' is not a requirement",
        ),
        ("requirements.txt", "a \\\n==1\npeft 0.19", r"line 3: 'peft 0.19' is not a requirement; write it as"),
        ("requirements.txt", "-r gone.txt", r"line 1: .*gone.txt' cannot be read \(No such file .*; name an existing"),
        ("requirements.txt", "-r requirements.txt", r"line 1: .*requirements.txt includes itself; remove"),
        (
            "requirements.txt",
            "peft\npeft==0.19\npeft>=0.20",
            r"no release of peft can be ==0.19,>=0.20 \(.*line 1.* 3\)",
        ),
        ("requirements.txt", "./peft ; python < 3", r"line 1: the marker cannot be read; correct it"),
        ("requirements.txt", "peft ; os_name ~= 'a'", r"line 1: the marker .* has no answer: .*; correct it"),
        (
            "environment.yml",
            "",
            r"environment.yml: the name must tell what this is: requirements.txt .* uv.lock",
        ),
        ("pylock.a.b.toml", "", r"pylock.a.b.toml: the name must tell what this is"),
        ("pyproject.toml", "[project\n", r"pyproject.toml is not valid TOML: .*line 1.*; correct it there"),
        ("pyproject.toml", "[tool.poetry]", r"has neither \[project\] nor \[dependency-groups\]; export"),
        ("pyproject.toml", "project = 1", r"project is 1; it must be a table"),
        ("pyproject.toml", "[project]\ndependencies = 'peft'", r"dependencies is 'peft'; it must be a list"),
        ("pyproject.toml", "[project]\ndependencies = [1]", r"1 in dependencies is not text; put it in quotes"),
        (
            "pyproject.toml",
            "[project]\ndependencies = ['peft 1']",
            r"project.dependencies: 'peft 1' is not a requirem",
        ),
        (
            "pyproject.toml",
            "[dependency-groups]\na = [{x = 1}]",
            r"\{'x': 1\} is neither a requirement nor an include",
        ),
        ("pyproject.toml", "[dependency-groups]\na = [{include-group = 'b'}]", r"group 'b' is not defined; correct"),
        ("pyproject.toml", "[dependency-groups]\na = [{include-group = 'A'}]", r"group 'A' includes itself; correct"),
        ("pylock.toml", "", r"pylock.toml has no lock-version; this reads version 1: lock again, or upgrade"),
        ("pylock.toml", "lock-version = '2.0'", r"pylock.toml has lock-version '2.0'; this reads version 1"),
        ("pylock.toml", "lock-version = '1.0'\npackages = [{}]", r"a package without a name in \[\[packages\]\]"),
        ("uv.lock", "version = 2", r"uv.lock has version 2; this reads version 1: lock again, or upgrade"),
        ("uv.lock", "version = 1\npackage = [{name = 'peft', version = 1}]", r"the version 1 is not one; lock again"),
        ("uv.lock", "version = 1\npackage = 3", r"package is 3; it must be a list"),
    ],
)
def test_what_cannot_be_understood_is_one_clear_error(ask: Ask, name: str, text: str, message: str) -> None:
    with pytest.raises(Gemma4CompatError, match=message) as caught:
        ask(text, name=name)
    assert "\n" not in str(caught.value).replace(str(caught.value.__cause__), "")


def test_a_file_that_is_not_there_or_not_text_exits_2_and_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"peft\xff\n")
    for name, said in (("gone.txt", "cannot be read (No such file"), ("binary.txt", "is not UTF-8 text")):
        result = CliRunner().invoke(cli.app, ["needed", str(tmp_path / name), "--json"])
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.replace("'", "").startswith(f"gemma4-compat: {tmp_path / name} {said}")
