"""Commands whose output nobody takes, and commands that are started beside files with names of modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from tests.unit.commands.helpers import command, finished, started
from tests.unit.gemma4.adapters.adapter_files import lora, write_adapter

pytestmark = [
    pytest.mark.full,  # a process each
    pytest.mark.skipif(sys.platform == "win32", reason="shells and devices of POSIX"),
]

ADAPTER = lora("model.layers.0.self_attn.q_proj")


def assert_one_line(text: str) -> None:
    assert text.startswith("gemma4-compat: ")
    assert text.count("\n") == 1, text


@pytest.mark.parametrize(
    "arguments", [["status"], ["list", "--json"], ["explain", "offload"], ["--help"], ["--version"], ["scan", "."]]
)
def test_a_full_disk_behind_standard_output_is_one_error(tmp_path: Path, arguments: list[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    write_adapter(tmp_path, ADAPTER)
    with full.open("w") as stream:
        code, _, error = command(*arguments, folder=tmp_path, stdout=stream)
    assert code == 2, error
    assert_one_line(error)
    assert "standard output cannot be used: No space left on device" in error


@pytest.mark.parametrize("arguments", [["list"], ["status", "--json"], ["explain", "offload"]])
def test_a_reader_that_goes_is_told_nothing(arguments: list[str]) -> None:
    process = started("-m", "gemma4_compat", *arguments, bufsize=1)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    code, _, error = finished(process)
    assert (code, error) == (141, "")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&-"])
def test_streams_that_are_closed_are_no_error(tmp_path: Path, closed: str) -> None:
    write_adapter(tmp_path, ADAPTER)
    for arguments in ("status", "scan ."):
        line = f"{sys.executable} -m gemma4_compat {arguments} {closed}"
        process = started(
            "-c", f"import subprocess, sys; sys.exit(subprocess.call({line!r}, shell=True))", folder=tmp_path
        )
        code, _, error = finished(process)
        assert (code, error) == (0, "")


def test_an_encoding_without_the_characters_is_no_error(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "日本", ADAPTER)
    code, out, error = command("scan", str(folder), environment={"PYTHONIOENCODING": "cp1252"})
    assert (code, error) == (0, "")
    assert "\\u65e5\\u672c" in out


@pytest.mark.parametrize("name", ["typing", "json", "packaging", "typer"])
def test_a_file_in_the_working_folder_is_not_imported(tmp_path: Path, name: str) -> None:
    write_adapter(tmp_path, ADAPTER)
    (tmp_path / f"{name}.py").write_text("raise SystemExit('it ran')")
    code, out, error = command("scan", ".", "--json", folder=tmp_path)
    assert (code, error) == (0, "")
    assert '"text": 2' in out


def test_a_working_folder_that_is_gone_is_no_error(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    script = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    gone.mkdir()
    code, out, error = finished(started("-c", script, "-m", "gemma4_compat", "--version", folder=gone))
    assert (code, out, error) == (0, f"{gemma4_compat.__version__}\n", "")


def test_scripts_of_a_folder_still_find_their_own_modules(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import gemma4_compat, other")
    (tmp_path / "other.py").write_text("print('found')")
    for arguments in (["-m", "mine"], ["mine.py", "-m", "gemma4_compat"], ["-c", "import gemma4_compat, other"]):
        assert finished(started(*arguments, folder=tmp_path)) == (0, "found\n", "")


@pytest.mark.parametrize("line", ["plan E2B --vram 8GiB", "scan A E2B", "merge A A B"])
def test_a_file_in_the_place_of_torch_is_one_error(tmp_path: Path, line: str) -> None:
    write_adapter(tmp_path / "A", ADAPTER)
    library = tmp_path / "own"
    library.mkdir()
    (library / "torch.py").write_text("raise SystemExit('it ran')")
    script = f"import sys; sys.path.insert(0, {str(library)!r}); from gemma4_compat.cli import main; main()"
    code, out, error = finished(started("-c", script, *line.split(), folder=tmp_path))
    assert (code, out) == (2, "")
    assert_one_line(error)
    assert f"torch would be imported from {str(library / 'torch.py')!r}" in error


def test_a_file_in_the_place_of_torch_is_one_error_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(Gemma4CompatError, match=r"torch would be imported from .*torch\.py'.* rename this file"):
        gemma4_compat.plan_device_map("E2B", "8GiB")


def test_the_output_of_a_shell_pipeline_is_what_was_asked_for() -> None:
    line = f"{sys.executable} -m gemma4_compat list | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
