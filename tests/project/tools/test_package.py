"""What is built: the same bytes twice, complete, with metadata that is true and a description without dead links."""

from __future__ import annotations

import email
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import gemma4_compat
from gemma4_compat._common import address
from tests.helpers import ROOT

pytest.importorskip("hatchling", reason="needs hatchling: pip install 'gemma4-compat[dev]'")

import hatch_build

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("package")]


def build(folder: Path, *targets: str, source: Path = ROOT) -> dict[str, Path]:
    """Build into ``folder``; the files by their suffix."""
    settings = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), *(f"-t{target}" for target in targets)]
    done = subprocess.run(command, cwd=source, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {"".join(path.suffixes[-2:] if path.suffix == ".gz" else [path.suffix]): path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(tmp_path_factory.mktemp("first"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(archive.read(name).decode())


def test_a_second_build_has_the_same_bytes(built: dict[str, Path], tmp_path: Path) -> None:
    again = build(tmp_path)
    assert {suffix: digest(path) for suffix, path in again.items()} == {
        suffix: digest(path) for suffix, path in built.items()
    }


#: What was measured, and the trained model: in the repository, and in nothing that is installed.
EVIDENCE = re.compile(r"benchmarks/results/|docs/evidence/|docs/\w+\.json$|tests/data/")


def test_the_sdist_has_every_file_of_the_repository_except_what_was_measured(built: dict[str, Path]) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout: git ls-files failed")
    with tarfile.open(built[".tar.gz"]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    measured = {name for name in tracked if EVIDENCE.match(name)}
    assert measured
    assert tracked - held == measured
    assert built[".tar.gz"].stat().st_size < 4_000_000
    assert {"noxfile.py", "gpu/run.sh", "constraints/newest.txt", ".ci/run", "hatch_build.py"} <= held


def test_the_sdist_builds_the_wheel_that_the_checkout_builds(built: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(built[".tar.gz"]) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = tmp_path.iterdir()
    assert digest(build(tmp_path / "out", "wheel", source=source)[".whl"]) == digest(built[".whl"])


def test_the_wheel_has_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {
        "gemma4_compat",
        f"gemma4_compat-{gemma4_compat.__version__}.dist-info",
    }
    assert "gemma4_compat/py.typed" in names
    kernels = (ROOT / "gemma4_compat" / "_kernels" / "cuda").glob("*.cuh")
    assert {file.relative_to(ROOT).as_posix() for file in kernels} <= set(names)
    others = [name for name in names if name.endswith((".json", ".md", ".svg")) and "dist-info" not in name]
    cards = (ROOT / "gemma4_compat" / "_planner" / "measured_cards").iterdir()
    assert others == sorted(file.relative_to(ROOT).as_posix() for file in cards)


def test_the_version_is_that_of_the_package(built: dict[str, Path]) -> None:
    assert metadata(built[".whl"])["Version"] == gemma4_compat.__version__


def test_an_index_accepts_it(built: dict[str, Path]) -> None:
    pytest.importorskip("twine", reason="needs twine: pip install 'gemma4-compat[dev]'")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.values())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_description_has_no_link_that_an_index_cannot_follow(built: dict[str, Path]) -> None:
    text = metadata(built[".whl"]).get_payload()
    assert isinstance(text, str)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "generated by" not in text


def test_no_address_is_named_until_there_is_one(built: dict[str, Path]) -> None:
    assert address.REPOSITORY is None, "there is one now: this test goes"
    assert metadata(built[".whl"]).get_all("Project-URL") is None
    for path in (ROOT / "gemma4_compat").rglob("*.py"):
        assert "github.com/gemma4-compat" not in path.read_text(encoding="utf-8"), path
    assert "http" not in address.report_request()


def test_with_an_address_everything_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "https://example.org/someone/gemma4-compat"
    monkeypatch.setattr(address, "REPOSITORY", here)
    assert address.report_request() == f"report it at {here}/issues"
    assert all(url.startswith(here) for url in hatch_build.urls(here).values())
    text = "[a `b`](docs/A.md#b) [c](https://example.org) [d](#d) <!-- x -->"
    assert (
        hatch_build.for_an_index(text, here)
        == f"[a `b`]({here}/blob/main/docs/A.md#b) [c](https://example.org) [d](#d) "
    )
    assert hatch_build.for_an_index(text, None) == "a `b` [c](https://example.org) [d](#d) "


def test_release_notes_are_the_changelogs() -> None:
    from tools.release_notes import notes

    changelog = (
        "# C\n\n## [Unreleased]\n\n- new\n\n## [0.2.0] - 2027-01-01\n\n- two\n\n## [0.1.0] - 2026-11-20\n\n- one\n"
    )
    assert notes(changelog, "0.2.0") == "- two"
    assert notes(changelog, "0.1.0") == "- one"
    with pytest.raises(SystemExit, match=r"nothing for 0\.3\.0"):
        notes(changelog, "0.3.0")
    assert "Command line" in notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), "0.1.0")
