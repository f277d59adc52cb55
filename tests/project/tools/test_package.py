"""What is built: the same bytes twice, complete, with metadata that is true and a description without dead links, and
installed by name from an index.
"""

from __future__ import annotations

import ast
import email
import functools
import hashlib
import http.server
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import threading
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import gemma4_compat
from gemma4_compat._engine.io import address
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


@pytest.fixture(scope="module")
def index(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a package index (PEP 503) on this machine, with what was built and nothing else."""
    folder = tmp_path_factory.mktemp("index")
    (folder / "simple" / "gemma4-compat").mkdir(parents=True)
    links = []
    for path in built.values():
        shutil.copy(path, folder / "simple" / "gemma4-compat")
        link = f'{path.name}#sha256={digest(path)}" data-requires-python="&gt;=3.10'
        links.append(f'<a href="{link}">{path.name}</a>')
    (folder / "simple" / "gemma4-compat" / "index.html").write_text("\n".join(links))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def environment(folder: Path) -> Path:
    """The Python of a new environment that sees this one's packages after its own: nothing else is fetched."""
    venv.create(folder, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip())
    (site / "zz_here.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return python


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


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_is_installed_by_name_from_an_index(index: str, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("pip", reason="needs pip")
    python = environment(tmp_path / "environment")
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "GEMMA4"))}
    choice = ["--only-binary", ":all:"] if kind == "wheel" else ["--no-binary", ":all:", "--no-build-isolation"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "--disable-pip-version-check",
        "--python",
        str(python),
        "install",
        "--no-cache-dir",
    ]
    command += ["--ignore-installed", "--no-deps", "--index-url", index, *choice, "gemma4-compat"]
    done = subprocess.run(command, cwd=tmp_path, env=settings | {"PIP_CONFIG_FILE": os.devnull}, capture_output=True)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()

    def says(*words: str) -> str:
        asked = subprocess.run(words, cwd=tmp_path, env=settings, capture_output=True, text=True)
        assert asked.returncode == 0, asked.stderr
        return asked.stdout

    where = says(str(python), "-c", "import gemma4_compat; print(gemma4_compat.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "environment")
    script = str(python.with_name("gemma4-compat"))
    assert says(script, "--version").strip() == gemma4_compat.__version__
    assert says(script, "list").splitlines()[0].split() == ["area", "patches", "for"]
    assert says(str(python), "-m", "gemma4_compat", "explain", "F14")
    question = "from importlib.metadata import metadata; print(metadata('gemma4-compat').get_all('Provides-Extra'))"
    assert {"stack", "images", "serve"} <= set(ast.literal_eval(says(str(python), "-c", question)))


def test_a_wheel_of_a_project_with_an_address_has_its_addresses(built: dict[str, Path], tmp_path: Path) -> None:
    here = "https://example.org/someone/gemma4-compat"
    with tarfile.open(built[".tar.gz"]) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = tmp_path.iterdir()
    file = source / "gemma4_compat" / "_engine" / "io" / "address.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(r"^REPOSITORY: .*$", f'REPOSITORY = "{here}"', text, flags=re.MULTILINE), encoding="utf-8")
    found = metadata(build(tmp_path / "out", "wheel", source=source)[".whl"])
    assert found.get_all("Project-URL") == [f"{name}, {url}" for name, url in hatch_build.urls(here).items()]
    assert f"]({here}/blob/main/docs/" in str(found.get_payload())


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
    assert others == sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "gemma4_compat").rglob("*.json"))


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
    text = "[a `b`](docs/A.md#b) [c](https://example.org) [d](#d) ![e](docs/e.svg)<!-- x -->"
    assert (
        hatch_build.for_an_index(text, here)
        == f"[a `b`]({here}/blob/main/docs/A.md#b) [c](https://example.org) [d](#d) ![e]({here}/raw/main/docs/e.svg)"
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
