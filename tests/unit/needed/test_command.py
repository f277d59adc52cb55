"""The command ``gemma4-compat needed``: text, JSON, exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Patch, cli
from gemma4_compat._engine import versions
from gemma4_compat._needed import judge
from tests.helpers import Library
from tests.unit.engine.test_import_cost import UPSTREAM, imported_by
from tests.unit.needed.helpers import PATCHES, SAMPLES, Ask, only, patch_on, run


def test_without_a_file_it_is_about_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    releases = {"transformers": "5.6.2", "accelerate": "1.14.0+x", "peft": "hand-made"}
    monkeypatch.setattr(versions, "installed", releases.get)
    lines = run("--verbose").splitlines()
    assert lines[0] == (
        "this environment: transformers 5.6.2, accelerate 1.14.0+x, peft from hand-made, bitsandbytes not installed"
    )
    assert lines[1].startswith("note: cannot tell the release of peft: hand-made")
    found = {item["id"]: item for item in json.loads(run("--json"))["patches"]}
    assert found["accelerate-hf-initialized"]["verdict"] == "not_needed"
    assert found["accelerate-nested-map"]["verdict"] == "needed"
    assert found["peft-keep-dispatch"]["verdict"] == "depends"
    assert found["bitsandbytes-cpu-packing"]["because"] == "bitsandbytes not installed"


def test_the_table_has_a_line_for_each_patch_the_needed_ones_first_and_ends_with_the_sum() -> None:
    path = SAMPLES / "ranges" / "pyproject.toml"
    text, assessment = run(str(path), "--verbose"), judge.assess(path, tuple(PATCHES.values()))
    head, table, end = text.strip().split("\n\n")
    assert head.splitlines()[0].startswith(f"{path}: transformers >=5.22.2,<6, accelerate ")
    assert head.splitlines()[1:] == [f"note: {note}" for note in assessment.notes]
    lines = table.splitlines()[2:]
    assert sorted(line.split()[0] for line in lines) == sorted(PATCHES)
    order = ["needed", "needed by some", "depends", "unsupported", "not needed"]
    shown = [next(name for name in reversed(order) if re.search(rf"  {name}\*? ", line)) for line in lines]
    assert shown == sorted(shown, key=order.index)
    for need in assessment.needs:
        (line,) = [line for line in lines if line.split()[0] == need.patch.id]
        assert line.endswith(need.because)
        assert need.verdict == "not_needed" or (" or ".join(need.unnecessary_with) or "no release so far") in line
        assert ("*" in line) is need.unmeasured
    counts = {name: shown.count(name) for name in order}
    assert end.splitlines()[-1] == (
        f"{len(PATCHES)} patches: {counts['needed']} needed, {counts['needed by some']} needed by some of these "
        f"releases, {counts['not needed']} not needed."
    )
    assert end.startswith("* newer than ")
    assert "unmeasured release" in end


def test_without_verbose_it_is_a_screen() -> None:
    path = SAMPLES / "ranges" / "pyproject.toml"
    lines = run(str(path)).splitlines()
    assert len(lines) <= 24
    assert {line.split()[0] for line in lines if line} >= {patch.area for patch in PATCHES.values()}
    assert judge.assess(path, tuple(PATCHES.values())).summary in lines


def test_what_a_verdict_depends_on_is_explained(ask: Ask, tmp_path: Path) -> None:
    ask("transformers==5.6.2")
    explanation, total = run(str(tmp_path / "requirements.txt"), "--verbose").splitlines()[-2:]
    assert explanation.startswith("depends: what is not named may be any release, or absent; a lock file tells")
    assert "depend on what is not stated" in total


def test_as_json_everything_is_on_stdout_and_in_the_registrys_order() -> None:
    data = json.loads(run(str(SAMPLES / "fork" / "uv.lock"), "--json"))
    assert [item["id"] for item in data["patches"]] == list(PATCHES)
    assert data["gemma4_compat"] == gemma4_compat.__version__
    assert data["distributions"]["transformers"] == {
        "text": "transformers 5.6.2 or 5.23.0",
        "specifiers": ["==5.6.2", "==5.23.0"],
        "certain": True,
        "origin": None,
    }
    assert data["droppable"] is False
    for item, need in zip(data["patches"], judge.assess(SAMPLES / "fork" / "uv.lock", tuple(PATCHES.values())).needs):
        assert item == {
            "id": need.patch.id,
            "verdict": need.verdict,
            "because": need.because,
            "unnecessary_with": list(need.unnecessary_with),
            "fixed": need.patch.fixed,
            "measured": need.patch.measured,
            "unmeasured": need.unmeasured,
        }


@pytest.mark.parametrize(
    "text, patch, droppable",
    [
        ("accelerate==1.14.0", patch_on(">=1.12,<1.14.0"), True),
        ("accelerate>=1.14", patch_on(">=1.12,<1.14.0"), True),
        ("accelerate>=1.13", patch_on(">=1.12,<1.14.0"), False),
        ("accelerate==1.13.0", patch_on(">=1.12,<1.14.0"), False),
        ("accelerate==1.11.0", patch_on(">=1.12,<1.14.0"), False),
        ("peft", patch_on(">=1.12,<1.14.0"), False),
        ("torch", patch_on(">=1.12,<1.14.0"), False),
    ],
)
def test_ci_can_be_told_when_the_package_can_be_dropped(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, patch: Patch, droppable: bool
) -> None:
    assert ask(text, patch).droppable is droppable
    monkeypatch.setattr(gemma4_compat, "patches", lambda: (patch,))
    file = str(tmp_path / "requirements.txt")
    assert ("gemma4_compat can be dropped" in run(file)) is droppable
    assert ("gemma4_compat can be dropped" in run(file, "--verbose").splitlines()[-1]) is droppable
    assert json.loads(run(file, "--json"))["droppable"] is droppable
    run(file, "--fail-if-droppable", code=1 if droppable else 0)


@pytest.mark.parametrize(
    "name, text",
    [("requirements.txt", "torch\nnumpy==2"), ("uv.lock", "version = 1"), ("pyproject.toml", "[project]")],
)
def test_a_file_that_names_none_of_the_libraries_is_probably_not_the_right_one(ask: Ask, name: str, text: str) -> None:
    if name == "pyproject.toml":
        text += '\nname = "x"'
    assessment = ask(text, name=name)
    assert assessment.notes[0].endswith(
        f"{name} has none of transformers, accelerate, peft, bitsandbytes: is it the right one?"
    )
    assert not assessment.droppable


def test_a_patch_on_a_library_of_another_name_is_judged_as_well(create: Callable[..., Library]) -> None:
    library = create(version="1.0")
    patch = patch_on(">=1,<2", distribution=library.name, measured="1.0")
    need = only(judge.assess(None, (patch,)))
    assert (need.verdict, need.because) == ("needed", f"{library.name} 1.0")
    assert need.unnecessary_with == (f"{library.name}>=2",)


def test_it_imports_no_library_and_importing_the_package_does_not_import_it() -> None:
    assert not {"gemma4_compat._needed", "tomllib", "tomli"} & imported_by("import gemma4_compat")
    path = SAMPLES / "pins" / "uv.lock"
    loaded = imported_by(
        f"import sys; sys.argv[1:] = ['needed', {str(path)!r}]; from gemma4_compat.cli import main; main()"
    )
    assert "gemma4_compat._needed" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(UPSTREAM)


def test_the_help_names_the_command_and_the_files_it_reads() -> None:
    assert "needed" in CliRunner().invoke(cli.app, ["--help"]).stdout
    text = re.sub(r"[\s│]+", " ", CliRunner().invoke(cli.app, ["needed", "--help"], env={"COLUMNS": "200"}).stdout)
    for name in ("requirements.txt", "pyproject.toml", "pylock.toml", "uv.lock", "--fail-if-droppable"):
        assert name in text
