"""``doctor --show``: what it says of two answers, and that each scene shows its defect on this stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Gemma4CompatError, cli
from gemma4_compat._doctor.reproductions import child, children, scenes, show
from gemma4_compat._lab.trained import PLACE, Trained
from tests.helpers import ROOT

PATCHES = {patch.id: patch for patch in gemma4_compat.patches()}
SHOWN = "peft-adapter-keys"
RIGHT = scenes.SCENES[SHOWN].right


def result(answer: str | None = None, error: str | None = None, state: str = "applied") -> dict[str, Any]:
    return {"answer": answer, "error": error, "state": state, "reason": "because"}


@pytest.mark.parametrize(
    "without, with_shim, good, said",
    [
        (result("A fox"), result(RIGHT), True, "only the shim differs"),
        (result(RIGHT), result(RIGHT, state="not_needed"), True, "does not show here. because"),
        (result("A fox"), result("A fox", state="skipped"), False, "the patch is skipped. because"),
        (result("A fox"), children.crashed("no result after 600 s"), False, "no result after 600 s"),
        (result(error="ValueError: no"), result(RIGHT), True, "ValueError: no"),
    ],
)
def test_what_it_says(without: dict[str, Any], with_shim: dict[str, Any], good: bool, said: str) -> None:
    shown = show.Shown(PATCHES[SHOWN], without, with_shim)
    assert shown.good is good
    assert said in shown.text()


def test_a_refusal_is_right_where_the_patch_refuses() -> None:
    patch = PATCHES["accelerate-offload-folder"]
    refused = result(error="Gemma4CompatError: the offload folder '/tmp/x' holds another model's weights: 'a'")
    assert show.Shown(patch, result("a grey cross"), refused).good
    assert not show.Shown(patch, result("a grey cross"), result(error="OSError: no")).good


def test_there_are_ten_silent_defects() -> None:
    assert len(scenes.SCENES) >= 10
    for patch_id in scenes.SCENES:
        assert PATCHES[patch_id].symptom.startswith("silent"), patch_id


def test_a_patch_without_a_scene_is_told_which_have_one() -> None:
    with pytest.raises(Gemma4CompatError, match="has nothing for 'accelerate-skip-keys'; it has accelerate-disk-buf"):
        show.show(PATCHES["accelerate-skip-keys"], Trained(Path()))


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--show", "nothing"], "nothing"),
        (["--model", "folder"], "--model is for --show ID"),
        (["--show", SHOWN, "--json"], "--show takes one ID and prints text"),
        (["--show", SHOWN, SHOWN], "--show takes one ID and prints text"),
    ],
)
def test_bad_usage(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(cli.app, ["doctor", *arguments])
    assert done.exit_code == 2
    assert said in done.output


def test_where_the_model_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Gemma4CompatError, match=r"has no model/config\.json"):
        Trained.find(tmp_path)
    monkeypatch.setattr("gemma4_compat._lab.trained.PLACE", "nowhere")
    with pytest.raises(Gemma4CompatError, match="in the repository, not in the installed package: run this in a"):
        Trained.find()


def test_an_installed_package_finds_the_model_of_the_checkout_it_is_called_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemma4_compat._lab.trained.__file__", str(tmp_path / "gemma4_compat" / "a" / "b.py"))
    monkeypatch.chdir(ROOT)
    assert Trained.find().folder == ROOT / PLACE


def test_the_readme_quotes_what_the_model_said() -> None:
    run = json.loads((ROOT / "docs" / "evidence" / "show" / "newest.json").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for side in ("without", "with"):
        assert run["answers"][SHOWN][side].strip("'") in readme


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Any, Any]]:
    """A process without the shim that forks, and one with it."""
    if not children.can_fork():
        pytest.skip("forks need Linux without a GPU")
    with children.Forks(ROOT / PLACE, "all") as off, children.Forks(ROOT / PLACE) as on:
        yield off, on


@pytest.mark.parametrize(
    "patch_id", [pytest.param(name, marks=[] if name == SHOWN else pytest.mark.full) for name in scenes.SCENES]
)
def test_a_scene(patch_id: str, sides: tuple[Any, Any]) -> None:
    shown = show.Shown(PATCHES[patch_id], *(side(f"show {patch_id}") for side in sides))
    assert shown.good, shown.text()
    if gemma4_compat.status()[patch_id].state == "applied":
        assert "only the shim differs" in shown.text()


def test_a_scene_that_raises_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setitem(scenes.SCENES, SHOWN, scenes.Scene("", "", "", fail))
    found = child.show(SHOWN, Path())
    assert found["answer"] is None
    assert found["error"] == "RuntimeError: first line"
