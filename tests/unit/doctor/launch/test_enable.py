"""``enable`` and ``disable``: a file in site-packages, in an environment made for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gemma4_compat import Gemma4CompatError, cli
from gemma4_compat._doctor.launch import environment
from tests.unit.commands.helpers import ROOT
from tests.unit.doctor.launch.conftest import REPORT


def python(program: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """An environment's Python, without anything of the tests' own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GEMMA4_COMPAT_"))}
    done = subprocess.run(
        [program, *arguments], env=kept | variables, cwd="/", capture_output=True, text=True, timeout=240
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def packages(bare: Path, peft: Path) -> Iterator[Path]:
    """The site-packages of an environment that has what this one has, this package, and an empty peft."""
    folder = next((bare.parents[1] / "lib").iterdir()) / "site-packages"
    others = [path for path in sys.path if path.endswith("-packages")]
    (folder / "ours.pth").write_text("\n".join(map(str, [peft, ROOT, *others])) + "\n", encoding="utf-8")
    yield folder
    for file in folder.glob("*.pth*"):
        file.unlink()


def test_it_is_off_then_on_then_off(bare: Path, packages: Path) -> None:
    def says(*arguments: str) -> str:
        code, out, error = python(bare, "-m", "gemma4_compat", *arguments)
        assert (code, error) == (0, "")
        return out

    file = packages / environment.NAME
    assert json.loads(says("status", "--json"))["startup"] == {"enabled": False, "file": None}
    assert python(bare, "-c", REPORT) == (0, "not armed\n", "")
    assert says("enable") == f"start-up hook: on; `gemma4-compat disable` turns it off\n  {file}\n"
    written = file.read_text(encoding="utf-8")
    assert says("enable").startswith("nothing to change\n")
    assert file.read_text(encoding="utf-8") == written
    assert [item.name for item in packages.glob(f"{environment.NAME}*")] == [environment.NAME]
    assert says("status").endswith(f"\nstart-up hook: on; `gemma4-compat disable` turns it off\n  {file}\n")
    for options in ([], ["-I"], ["-E"]):
        assert python(bare, *options, "-c", REPORT) == (0, "armed\n", "")
    assert python(bare, "-I", "-c", "import sys, json; print('gemma4_compat' in sys.modules)")[1:] == ("False\n", "")
    assert python(bare, "-c", "import sys; print([path for path in sys.path if 'hook' in path])")[1:] == ("[]\n", "")
    assert json.loads(says("disable", "--json"))["changed"] is True
    assert not file.exists()
    assert says("disable").startswith("nothing to change\n")
    assert python(bare, "-c", REPORT) == (0, "not armed\n", "")


@pytest.mark.full
def test_both_at_once_are_one(bare: Path, packages: Path) -> None:
    """``run`` in an environment that is enabled, even of a Python that reads no PYTHONPATH."""
    python(bare, "-m", "gemma4_compat", "enable")
    code = REPORT + "print(sum(type(finder).__name__ == 'Finder' for finder in sys.meta_path))"
    assert python(bare, "-m", "gemma4_compat", "run", "-c", code) == (0, "armed\n0\n", "")
    assert python(bare, "-m", "gemma4_compat", "run", "-I", "-c", code) == (0, "armed\n0\n", "")
    assert python(bare, "-m", "gemma4_compat", "run", "-S", "-c", code)[0] == 2


def test_after_the_package_is_gone_python_starts_without_a_word(bare: Path, packages: Path) -> None:
    """What ``pip uninstall`` leaves, for the file is not the installer's; and `status` of another copy says so."""
    file, gone = packages / environment.NAME, "/no/such/folder/_gemma4_compat_hook.py"
    python(bare, "-m", "gemma4_compat", "enable")
    text = file.read_text(encoding="utf-8")
    hook = str(environment.HOOK / "_gemma4_compat_hook.py")
    assert hook in text
    file.write_text(text.replace(hook, gone), encoding="utf-8")
    assert python(bare, "-c", REPORT) == (0, "not armed\n", "")
    status = json.loads(python(bare, "-m", "gemma4_compat", "status", "--json")[1])
    assert status["startup"] == {"enabled": False, "file": str(file)}
    state, where = python(bare, "-m", "gemma4_compat", "status")[1].splitlines()[-2:]
    assert state == "start-up hook: off; `gemma4-compat enable` mends it"
    assert where == f"  {file} names {gone}, which is gone"
    assert python(bare, "-m", "gemma4_compat", "enable")[0] == 0
    assert file.read_text(encoding="utf-8") == text


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(environment, "_folders", lambda: [tmp_path / "site"])
    return tmp_path / "site" / environment.NAME


def test_where_it_cannot_be_written_it_says_so_and_nothing_is_left(elsewhere: Path) -> None:
    elsewhere.parent.write_text("a file, not a folder", encoding="utf-8")  # root may write everywhere else
    done = CliRunner().invoke(cli.app, ["enable"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"gemma4-compat: {elsewhere} cannot be written: Not a directory; nothing was changed."
    )


def test_where_python_does_not_read_it_there_is_none_afterwards(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere.parent.mkdir()
    with pytest.raises(Gemma4CompatError, match=f"does not read {elsewhere}, which was removed again"):
        environment.enable()
    assert list(elsewhere.parent.iterdir()) == []


def test_where_it_cannot_be_removed_it_says_so(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere.parent.mkdir()
    elsewhere.write_text("import os, sys; hook = 'x';\n", encoding="utf-8")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(Gemma4CompatError, match=f"{elsewhere} cannot be removed: Permission denied; delete it as"):
        environment.disable()


@pytest.mark.parametrize("folder", ["it's", 'a "b"', "ä", "back\\slash"])
def test_any_folder_can_be_named(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = tmp_path / folder
    hook.mkdir()
    (hook / "_gemma4_compat_hook.pyc").write_bytes(b"")  # sources left out
    monkeypatch.setattr(environment, "HOOK", hook)
    monkeypatch.setattr(environment, "_folders", lambda: [tmp_path])
    text = environment._text()
    assert text.isascii()
    (tmp_path / environment.NAME).write_text(text, encoding="ascii")
    assert environment.state().hook == hook / "_gemma4_compat_hook.pyc"
    assert environment.state().enabled
