"""[tool.gemma4_compat] of a project: where it is looked for, what it costs, and what is said of a bad value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning
from gemma4_compat._engine import settings
from gemma4_compat._engine.io import project, toml
from tests.helpers import child
from tests.unit.commands.helpers import command

KNOWN = ("a-patch", "another-patch")
VARIABLES = ("DISABLE", "ENABLE", "STRICT")


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "_project", None)
    for name in VARIABLES:
        monkeypatch.delenv(f"GEMMA4_COMPAT_{name}", raising=False)


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "pyproject.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_every_key(tmp_path: Path) -> None:
    file = write(tmp_path, "[tool.gemma4_compat]\ndisable = ['a-patch']\nenable = ['another-patch']\nstrict = true\n")
    found = settings.read(KNOWN)
    assert (found.disabled, found.enabled, found.strict) == ({"a-patch"}, {"another-patch"}, True)
    assert found.disabled_by == f"{file}: tool.gemma4_compat.disable"
    assert settings.project_file() == file
    assert settings.is_enabled("another-patch")
    assert not settings.is_enabled("a-patch")


@pytest.mark.parametrize(
    "text",
    [
        "[tool.gemma4_compat]\ndisable = 'all'",
        "[tool]\ngemma4_compat = {disable = ['ALL']}",
        "[tool]\ngemma4_compat.disable = ['a-patch', 'another-patch']",
        "tool.gemma4_compat.disable = ['all']",
        "tool = {gemma4_compat = {disable = ['all']}}",
        "[ 'tool' . \"gemma4_compat\" ]\ndisable = ['all']",
        "\ufeff[tool.gemma4_compat]\r\ndisable = ['all']\r\n",
    ],
)
def test_however_it_is_written(text: str, tmp_path: Path) -> None:
    write(tmp_path, text)
    assert settings.read(KNOWN).disabled == set(KNOWN)


@pytest.mark.parametrize(
    "variable, value, expected",
    [
        ("DISABLE", "another-patch", (["another-patch"], ["a-patch"], True)),
        ("DISABLE", "", ([], ["a-patch"], True)),
        ("ENABLE", "another-patch", (["a-patch"], ["another-patch"], True)),
        ("ENABLE", "", (["a-patch"], [], True)),
        ("STRICT", "0", (["a-patch"], ["a-patch"], False)),
        ("STRICT", "", (["a-patch"], ["a-patch"], False)),
    ],
)
def test_the_environment_wins(
    variable: str,
    value: str,
    expected: tuple[list[str], list[str], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path, "[tool.gemma4_compat]\ndisable = ['a-patch']\nenable = ['a-patch']\nstrict = true\n")
    monkeypatch.setenv(f"GEMMA4_COMPAT_{variable}", value)
    found = settings.read(KNOWN)
    assert ([*found.disabled], [*found.enabled], found.strict) == expected
    assert settings.is_enabled("a-patch") is ("a-patch" in expected[1])


STRICT = "[tool.gemma4_compat]\nstrict = true\n"


@pytest.mark.parametrize(
    "files, root, found",
    [
        ({"a/b": STRICT}, None, "a/b"),
        ({"a": STRICT}, None, None),  # outside of a repository, what is above is not looked at
        ({"a": STRICT}, "a", "a"),
        ({"a": STRICT}, ".", "a"),
        ({".": STRICT}, "a", None),  # above the repository
        ({".": STRICT, "a": STRICT}, ".", "a"),  # the nearest
        ({".": STRICT, "a/b": "[project]\nname = 'x'\n"}, ".", "."),  # with the table
        ({".": STRICT, "a/b": "[tool.gemma4_compat]\n"}, ".", "a/b"),
        ({}, ".", None),
    ],
)
def test_where_it_is_looked_for(
    files: dict[str, str], root: str | None, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for folder, text in files.items():
        write(tmp_path / folder, text)
    if root is not None:
        (tmp_path / root / ".git").write_text("gitdir: elsewhere\n", encoding="utf-8")  # of a worktree
    monkeypatch.chdir(tmp_path / "a" / "b")
    settings.read(KNOWN)
    assert settings.project_file() == (None if found is None else (tmp_path / found / "pyproject.toml"))


@pytest.mark.parametrize(
    "text, said",
    [
        ("[tool.gemma4_compat]\nstrict = 'maybe'", "tool.gemma4_compat.strict is 'maybe'; write true or false"),
        ("[tool.gemma4_compat]\nstrict = 1", "tool.gemma4_compat.strict is 1; write true or false"),
        ("[tool.gemma4_compat]\ndisable = 5", "tool.gemma4_compat.disable is 5; write a list of ids"),
        ("[tool.gemma4_compat]\nenable = ['a-patch', 1]", r"tool.gemma4_compat.enable is \['a-patch', 1\]"),
        (
            "[tool.gemma4_compat]\ndisabled = []",
            "tool.gemma4_compat.disabled is unknown; it has disable, enable, strict",
        ),
        ("[tool.gemma4-compat.a]\nstrict = true", r"the table is \[tool.gemma4_compat\], not \[tool.gemma4-compat\]"),
        ("[tool]\ngemma4_compat = true", "gemma4_compat is True; it must be a table"),
        ("[tool.gemma4_compat]\nstrict = yes", "is not valid TOML"),
        ("[tool.gemma4_compat]\n# " + "x" * 2**20, "is larger than 1048576 bytes"),
    ],
)
def test_a_bad_value_is_one_error_that_names_file_and_key(text: str, said: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(Gemma4CompatError, match=said) as caught:
        settings.read(KNOWN)
    assert str(caught.value).startswith(str(file))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_bytes(b"[tool.gemma4_compat]\n# \xff\n")
    with pytest.raises(Gemma4CompatError, match="is not UTF-8"):
        settings.read(KNOWN)


def test_a_python_without_a_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.10 has none of its own."""
    file = write(tmp_path, STRICT)

    def parse(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'tomli'", name="tomli")

    monkeypatch.setattr(toml, "parse", parse)
    with pytest.raises(Gemma4CompatError, match=f"{file} has settings of gemma4_compat; pip install tomli to read it"):
        settings.read(KNOWN)


def test_an_unknown_id_is_the_warning_that_it_is_in_the_environment(tmp_path: Path) -> None:
    """A retired patch's id in a file must not break an import."""
    file = write(tmp_path, "[tool.gemma4_compat]\ndisable = ['a-patc']\n")
    with pytest.warns(Gemma4CompatWarning, match="no patch has the id 'a-patc'; did you mean 'a-patch'") as caught:
        assert settings.read(KNOWN).disabled == set()
    assert str(caught[0].message).startswith(f"{file}: tool.gemma4_compat.disable: ")


def test_a_file_that_cannot_be_read_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, STRICT)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(project.Path, "open", refuse)
    with pytest.warns(Gemma4CompatWarning, match=f"{file} cannot be read: Permission denied"):
        assert settings.read(KNOWN).strict is False


@pytest.mark.parametrize("kind", ["folder", "pipe", "none"])
def test_what_is_not_a_file_is_no_project(kind: str, tmp_path: Path) -> None:
    if kind == "folder":
        (tmp_path / "pyproject.toml").mkdir()
    elif kind == "pipe":
        __import__("os").mkfifo(tmp_path / "pyproject.toml")
    settings.read(KNOWN)
    assert settings.project_file() is None


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert settings.read(KNOWN) == settings.Settings()


@pytest.mark.parametrize(
    "text",
    [
        '[project]\nname = "gemma4-compat"\ndependencies = [\n  "gemma4-compat",\n  "gemma4_compat.x",\n]\n',
        '[tool.importlinter]\nroot_package = "gemma4_compat"\n[tool.ruff]\n',
        '[project]\ndependencies = ["gemma4-compat==0.1"]\n[project.scripts]\ngemma4-compat = "a:b"\n',
    ],
)
def test_a_file_without_the_table_is_not_parsed(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, text)
    monkeypatch.setattr(toml, "parse", lambda *_: pytest.fail("parsed"))
    assert settings.read(KNOWN) == settings.Settings()


def test_an_import_with_bad_settings_fails_and_a_command_says_it_in_one_line(tmp_path: Path) -> None:
    file = write(tmp_path, "[tool.gemma4_compat]\nstrict = 'maybe'\n")
    error = f"{file}: tool.gemma4_compat.strict is 'maybe'; write true or false"
    code = f"import os; os.chdir({str(tmp_path)!r}); import gemma4_compat"
    done = child("-c", code)
    assert (done.code, done.stderr.splitlines()[-1]) == (1, f"gemma4_compat._errors.Gemma4CompatError: {error}")
    assert command("status", folder=tmp_path) == (2, "", f"gemma4-compat: {error}\n")


def test_status_says_which_file_counts_and_why_a_patch_is_off(tmp_path: Path) -> None:
    file = write(tmp_path, "[tool.gemma4_compat]\ndisable = 'all'\n")
    code, out, error = command("status", "--json", folder=tmp_path)
    assert (code, error) == (0, "")
    data = json.loads(out)
    assert data["settings"] == {"file": str(file)}
    assert {item["reason"] for item in data["patches"]} == {f"disabled by {file}: tool.gemma4_compat.disable"}
    assert command("status", folder=tmp_path)[1].splitlines()[-1] == f"settings: {file}"
