"""Cached folders of a workspace: built once, complete, and not mixed up."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import Workspace


def checkpoint(folder: Path, layers: int = 6) -> None:
    (folder / "first").write_text(str(layers))
    time.sleep(0.05)
    (folder / "last").write_text(str(layers))


def text_checkpoint(folder: Path) -> None:
    (folder / "first").write_text("text")


def broken(folder: Path) -> None:
    (folder / "first").write_text("half")
    raise OSError("disk full")


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    folder = workspace.cached(checkpoint, layers=12)
    (folder / "last").write_text("used")
    assert workspace.cached(checkpoint, layers=12) == folder
    assert (folder / "last").read_text() == "used"


def test_another_builder_or_option_builds_another_folder(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    folders = [
        workspace.cached(checkpoint),
        workspace.cached(checkpoint, layers=12),
        workspace.cached(text_checkpoint),
    ]
    assert [(folder / "first").read_text() for folder in folders] == ["6", "12", "text"]


def test_a_simultaneous_request_gets_the_complete_folder(tmp_path: Path) -> None:
    def request(_: int) -> list[str]:
        folder = Workspace(tmp_path).cached(checkpoint)
        return sorted(entry.name for entry in folder.iterdir())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(request, range(8))) == [["first", "last"]] * 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_a_failed_build_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"):
        Workspace(tmp_path).cached(broken)
    assert not (tmp_path / "broken").exists()
    assert (Workspace(tmp_path).cached(text_checkpoint) / "first").is_file()


def test_a_copy_names_itself_and_nothing_in_it_is_the_original(tmp_path: Path) -> None:
    # The copy's path contains the original's: what is replaced must be replaced once.
    workspace = Workspace(tmp_path / "w")
    for folder in (workspace.checkpoint, workspace.adapter("all")):
        folder.mkdir(parents=True)
    (workspace.checkpoint / "weights").write_text("seed")
    base = str(workspace.checkpoint)
    (workspace.adapter("all") / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (workspace.adapter("all") / "README.md").write_text(f"base_model: {base}\n")
    copy = workspace.copied(tmp_path.joinpath("copy", *tmp_path.parts[1:], "w"))
    named = json.loads((copy.adapter("all") / "adapter_config.json").read_text())
    assert named == {"base_model_name_or_path": str(copy.checkpoint)}
    assert (copy.adapter("all") / "README.md").read_text() == f"base_model: {copy.checkpoint}\n"
    (copy.checkpoint / "weights").write_text("changed")
    assert (workspace.checkpoint / "weights").read_text() == "seed"


def test_a_preloaded_model_is_for_one_load_of_its_quantization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    loads: list[str | None] = []

    def load(checkpoint: Path, quantization: str | None = None, **_: object) -> int:
        torch.rand(1)
        loads.append(quantization)
        return len(loads)

    monkeypatch.setattr(tiny, "load", load)
    workspace = Workspace(tmp_path)
    workspace.preload()
    assert loads == []  # no checkpoint yet
    workspace.checkpoint.mkdir()
    dice = torch.get_rng_state()
    workspace.preload()
    workspace.preload("8bit", 2)
    assert torch.equal(torch.get_rng_state(), dice)
    found = [workspace.load(name) for name in ("4bit", None, None, "8bit", "8bit", "8bit")]
    assert loads == [None, "8bit", "8bit", "4bit", None, "8bit"]
    assert found == [4, 1, 5, 3, 2, 6]
    workspace.preload()
    workspace.preload("8bit")
    workspace.forget()
    assert [workspace.load(), workspace.load("8bit")] == [9, 10]


@pytest.mark.parametrize(
    ("transformers", "kind", "own"),
    [("5.12.1", "gemma4", True), ("5.13.0", "gemma4", False), ("5.13.0", "gemma4_unified", True)],
)
def test_a_model_with_quantized_towers_is_a_preloaded_one_where_all_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transformers: str, kind: str, own: bool
) -> None:
    monkeypatch.setattr(pytest.importorskip("transformers"), "__version__", transformers)
    monkeypatch.setattr(tiny, "load", lambda *_, towers=False, **__: f"{towers=}")
    workspace = Workspace(tmp_path)
    workspace.checkpoint.mkdir()
    (workspace.checkpoint / "config.json").write_text(json.dumps({"model_type": kind}))
    workspace.preload("8bit")
    assert workspace.load("8bit", towers=True) == f"towers={own}"


def test_a_prepared_reference_is_that_of_a_model_as_it_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    models: list[str] = []

    def load(checkpoint: Path, quantization: str | None = None, **_: object) -> str:
        torch.rand(1)
        models.append(f"{quantization} {len(models)}")
        return models[-1]

    monkeypatch.setattr(tiny, "load", load)
    monkeypatch.setattr(Workspace, "outputs", lambda _, model: f"outputs of {model}")
    workspace = Workspace(tmp_path)
    workspace.prepare()
    assert models == []  # no checkpoint yet
    workspace.checkpoint.mkdir()
    assert [workspace.reference("8bit"), workspace.reference("8bit")] == ["outputs of 8bit 0", "outputs of 8bit 1"]
    dice = torch.get_rng_state()
    workspace.preload()
    workspace.prepare()
    assert torch.equal(torch.get_rng_state(), dice)
    assert [workspace.reference(), workspace.reference()] == ["outputs of None 3"] * 2
    assert workspace.load() == "None 2", "the reference's model is not one that nobody has used yet"
    workspace.forget()
    assert workspace.reference() == "outputs of None 4"


def test_outputs_that_cannot_be_prepared_are_left_to_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")

    def outputs(workspace: Workspace, model: object) -> None:
        raise ValueError(f"{model} does not run")

    monkeypatch.setattr(tiny, "load", lambda _, quantization, **__: quantization)
    monkeypatch.setattr(Workspace, "outputs", outputs)
    workspace = Workspace(tmp_path)
    workspace.checkpoint.mkdir()
    workspace.prepare("4bit")
    with pytest.raises(ValueError, match="4bit does not run"):
        workspace.reference("4bit")


def test_a_model_that_cannot_be_preloaded_is_left_to_its_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")

    def load(checkpoint: Path, quantization: str | None = None, **_: object) -> int:
        raise ValueError(f"no {quantization} here")

    monkeypatch.setattr(tiny, "load", load)
    workspace = Workspace(tmp_path)
    workspace.checkpoint.mkdir()
    workspace.preload("4bit", 2)
    with pytest.raises(ValueError, match="no 4bit here"):
        workspace.load("4bit")


def test_ranks_of_ddp_are_built_each_in_its_own_order(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    from gemma4_compat._lab import scenarios, workspace

    own = Workspace.build(tmp_path)
    own.preload()
    try:
        scenarios.second_rank("transformers.models.gemma4.modeling_gemma4", own)
        assert workspace._preloaded[own.checkpoint, None], "a rank had the model that was built before, in any order"
    finally:
        own.forget()
