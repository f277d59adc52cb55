"""A merge that is killed in the middle: the same merge goes on where files are whole, and trusts no other file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatWarning
from gemma4_compat._adapter_tools.merge import resume
from tests.unit.adapter_tools.merge.adapters import digests

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills as POSIX does")

KILLED = """
import os, signal, sys
import gemma4_compat
from gemma4_compat._gemma4.checkpoint import shards
as_bytes = shards.as_bytes
folder, quantize, file = sys.argv[3], sys.argv[4] or None, sys.argv[5]
def kill(piece):
    import pathlib
    if any(pathlib.Path(folder).glob(file)):
        os.kill(os.getpid(), signal.SIGKILL)
    return as_bytes(piece)
shards.as_bytes = kill
gemma4_compat.merge_adapter(sys.argv[1], sys.argv[2], folder + "/out", check=0, max_shard_size=sys.argv[6],
                            quantize_result=quantize)
"""


#: For a quantized result in several files.
SMALL = "150KB"


def killed(
    base: Path, adapter: Path, folder: Path, quantize: str = "", file: str = "**/model-00003-of*", size: str = "400KB"
) -> Path:
    """The folder that a merge into ``folder / "out"`` leaves, when it is killed in its third file."""
    folder.mkdir()
    arguments = [str(base), str(adapter), str(folder), quantize, file, size]
    command = [sys.executable, "-W", "ignore", "-c", KILLED, *arguments]
    assert subprocess.run(command, check=False, env=dict(os.environ)).returncode == -signal.SIGKILL
    (left,) = folder.iterdir()
    return left


def merged(base: Path, adapter: Path, out: Path, **options: Any) -> Any:
    return gemma4_compat.merge_adapter(base, adapter, out, **{"check": 0, "max_shard_size": "400KB", **options})


def weights(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in digests(folder).items() if name.startswith("model")}


@pytest.mark.full
def test_the_same_merge_goes_on_and_trusts_nothing_else(workspace: Any, base: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(workspace.adapter("language"), adapter)
    left = killed(base, adapter, tmp_path / "work")
    merged(base, adapter, tmp_path / "whole")
    names = sorted(file.name for file in left.glob("model-*"))
    assert len(names) == 3

    def again(name: str, change: Any = None, **options: Any) -> Any:
        folder = tmp_path / name
        shutil.copytree(tmp_path / "work", folder)
        if change is not None:
            change(folder / left.name)
        with pytest.warns(Gemma4CompatWarning, match="an earlier merge to the same folder was killed"):
            report = merged(base, adapter, folder / "out", **options)
        assert [path.name for path in folder.iterdir()] == ["out"]
        assert not (folder / "out" / resume.JOURNAL).exists()
        return report

    report = again("same")
    assert report.resumed == tuple(names[:2])
    assert weights(tmp_path / "same" / "out") == weights(tmp_path / "whole")
    assert "2 files were kept from a killed merge" in (tmp_path / "same" / "out" / "merge_report.txt").read_text()

    def spoil(folder: Path) -> None:
        file = folder / names[0]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    def cut(folder: Path) -> None:
        with (folder / names[1]).open("r+b") as stream:
            stream.truncate(1000)

    def claim(folder: Path) -> None:
        """The third file, which is not whole, as if it were; and one elsewhere."""
        with (folder / resume.JOURNAL).open("a") as stream:
            stream.write(f'{{"file": "{names[2]}", "digest": "00"}}\n{{"file": "../../x", "digest": "00"}}\n{{"fi')

    for name, change, wanted in (
        ("spoiled", spoil, names[1:2]),
        ("cut", cut, names[:1]),
        ("claimed", claim, names[:2]),
    ):
        assert again(name, change).resumed == tuple(wanted)
        assert weights(tmp_path / name / "out") == weights(tmp_path / "whole")
    assert again("other options", dtype="fp16").resumed == ()
    assert again("no journal", lambda folder: (folder / resume.JOURNAL).unlink()).resumed == ()

    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes())  # the same content; who knows
    assert again("another adapter").resumed == ()
    assert weights(tmp_path / "another adapter" / "out") == weights(tmp_path / "whole")


@pytest.mark.full
def test_a_result_in_4_bits_goes_on_with_what_is_merged(workspace: Any, base: Path, tmp_path: Path) -> None:
    adapter = workspace.adapter("language")
    killed(base, adapter, tmp_path / "work", "4bit")
    with pytest.warns(Gemma4CompatWarning, match="2 complete files are kept"):
        report = merged(base, adapter, tmp_path / "work" / "out", quantize_result="4bit")
    assert [name.rpartition("-of")[0] for name in report.resumed] == ["merged/model-00001", "merged/model-00002"]
    merged(base, adapter, tmp_path / "whole", quantize_result="4bit")
    assert weights(tmp_path / "work" / "out") == weights(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["out"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["4bit-double", "8bit"])
def test_quantized_files_are_kept_too(workspace: Any, base: Path, tmp_path: Path, name: str) -> None:
    adapter = workspace.adapter("language")
    left = killed(base, adapter, tmp_path / "work", name, "*/model-00003-of*", SMALL)
    of_merged, of_result = (sorted(folder.glob("model-*.safetensors")) for folder in (left / ".merged", left))
    assert len(of_merged) > 3
    assert len(of_result) == 3
    whole = merged(base, adapter, tmp_path / "whole", quantize_result=name, max_shard_size=SMALL)
    assert len(whole.files) > 2

    def spoil(folder: Path) -> None:
        """The first quantized file, so that one of the merged model is read for it, which is spoiled, too."""
        for file in (folder / of_result[0].name, folder / ".merged" / of_merged[0].name):
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)

    def lose(folder: Path) -> None:
        shutil.rmtree(folder / ".merged")

    names = [f"merged/{file.name}" for file in of_merged], [file.name for file in of_result[:2]]
    for number, (change, wanted) in enumerate(
        (
            (lambda folder: None, names[0] + names[1]),
            (spoil, names[0][1:] + names[1][1:]),
            (lose, names[1]),
        )
    ):
        again = tmp_path / str(number)
        shutil.copytree(tmp_path / "work", again)
        change(again / left.name)
        with pytest.warns(Gemma4CompatWarning, match=f"{len(wanted)} complete files are kept"):
            report = merged(base, adapter, again / "out", quantize_result=name, max_shard_size=SMALL)
        assert sorted(report.resumed) == sorted(wanted)
        assert weights(again / "out") == weights(tmp_path / "whole")
        assert [path.name for path in again.iterdir()] == ["out"]
        assert not [path for path in (again / "out").iterdir() if path.name.startswith(".")]
    with pytest.warns(Gemma4CompatWarning, match="its folder"):
        report = merged(base, adapter, tmp_path / "work" / "out", quantize_result=name, max_shard_size="151KB")
    assert report.resumed == ()


def test_a_journal_of_another_merge_or_of_nobody_is_nothing(tmp_path: Path) -> None:
    """Also one that is damaged, or names a file outside of its folder."""
    import hashlib

    (tmp_path / "outside").write_bytes(b"mine")
    digest = hashlib.sha256(b"mine").hexdigest()
    head = '{"merge": "this"}\n'
    for number, text in enumerate(
        (
            "",
            "[1]\n",
            "no JSON }\n",
            '{"merge": "other"}\n{"file": "a", "digest": "' + digest + '"}\n',
            head + '{"file": "../outside", "digest": "' + digest + '"}\n',
            head + '{"file": "link", "digest": "' + digest + '"}\n',
            head + '{"file": "..", "digest": "' + digest + '"}\n',
            head + '{"file": "inside/../a", "digest": "' + digest + '"}\n',
            head + '{"file": "inside/a", "digest": "' + digest + '"}\n',
            head + '{"file": 1, "digest": null}\n',
        )
    ):
        left, new = tmp_path / f"left-{number}", tmp_path / f"new-{number}"
        left.mkdir(), new.mkdir()
        (left / "a").write_bytes(b"mine")
        (left / "link").symlink_to(tmp_path / "outside")
        (left / resume.JOURNAL).write_text(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert resume.Journal(new, "this").take([left], new, new / "inside") == {new: set(), new / "inside": set()}
        assert not list(new.iterdir())
        assert not left.exists()
    assert (tmp_path / "outside").read_bytes() == b"mine"
