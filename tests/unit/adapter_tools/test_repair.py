"""F55: ``gemma4-compat repair`` gives a checkpoint back what transformers did not save."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Gemma4CompatError, RepairReport, cli
from gemma4_compat._engine import versions
from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._gemma4.models import config_names
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import difference
from tests.helpers import Finished

TEXT = "model.language_model."
NAMES = {f"layers.{n}.self_attn.{name}.weight" for n in (4, 5) for name in ("k_proj", "v_proj", "k_norm")}
HALVED = {"global_head_dim": 64, "num_global_key_value_heads": None}


@pytest.fixture(scope="module")
def original(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as released: with keys and values of its KV-shared layers."""
    return tiny_models.build_released(workspace.checkpoint, tmp_path_factory.mktemp("original") / "gemma")


@pytest.fixture(scope="module")
def saved(original: Path, warm_child: Callable[..., Finished], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers, without this package, makes of it: trained in float32, and saved in shards."""
    folder = tmp_path_factory.mktemp("saved") / "mine"
    done = warm_child("-c", TRAIN, str(original), str(folder), environment={"GEMMA4_COMPAT_DISABLE": "all"})
    assert done.code == 0, done.stderr[-2000:]
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("my model's card")
    (folder / "optimizer.pt").write_text("not of the model")
    settings = json.loads((folder / "config.json").read_text())
    for name in config_names.NAMES:  # as transformers from 5.15.0 on
        settings["text_config"].pop(name, None)
    settings["text_config"]["per_layer_config"] = {"2": {"head_dim": 64}, "5": {"head_dim": 64}}
    (folder / "config.json").write_text(json.dumps(settings))
    file = next(folder.glob("*.safetensors"))
    assert len(list(folder.glob("*.safetensors"))) > 2, file
    return without_shared(folder)


TRAIN = """
import pathlib, sys, torch
from gemma4_compat._lab import tiny
model = tiny.load(pathlib.Path(sys.argv[1]), dtype=torch.float32)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(1.25)
model.save_pretrained(sys.argv[2], max_shard_size="1MB")
"""


def without_shared(folder: Path) -> Path:
    """Transformers before 5.5.2 has modules for them."""
    from safetensors.torch import load_file, save_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    lost = [name for name in index["weight_map"] if name.removeprefix(TEXT) in NAMES]
    for name in lost:
        file = folder / index["weight_map"].pop(name)
        save_file({key: value for key, value in load_file(file).items() if key != name}, file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def repair(*args: Any, **options: Any) -> RepairReport:
    return gemma4_compat.repair_checkpoint(*args, progress=False, **options)


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def copied(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy with other settings."""
    shutil.copytree(folder, target)
    settings = json.loads((target / "config.json").read_text())
    change(settings)
    (target / "config.json").write_text(json.dumps(settings))
    return target


@pytest.mark.parametrize("size", ["5GB", "1MB"])
def test_the_checkpoint_gets_what_it_lost_and_nothing_else_changes(
    original: Path, saved: Path, tmp_path: Path, size: str
) -> None:
    import torch

    report = repair(saved, original, tmp_path / "out", max_shard_size=size)
    before, released, found = tensors(saved), tensors(original), tensors(tmp_path / "out")
    added = {TEXT + name for name in NAMES}
    assert found.keys() == before.keys() | added
    assert all(torch.equal(found[name], before[name]) for name in before)
    for name in added:
        assert found[name].dtype is torch.float32
        assert torch.equal(found[name], released[name].float())
    assert set(report.tensors) == added
    assert report.dtypes == ("float32",)
    assert report.settings == {f"text_config.{name}": value for name, value in HALVED.items()}
    assert report.nbytes == sum(tensor.nbytes for tensor in found.values())
    assert report.added_nbytes == sum(found[name].nbytes for name in added)
    assert set(report.files) == {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    assert (len(report.files) > 2) == (size == "1MB")
    kept = {"config.json", "generation_config.json", "tokenizer.json", "README.md"}
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there - {"model.safetensors.index.json"} == kept | set(report.files)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_transformers_computes_the_same(workspace: Any, original: Path, saved: Path, tmp_path: Path) -> None:
    import transformers

    repair(saved, original, tmp_path / "out")
    if versions.admits("<5.15", transformers.__version__):  # it cannot read what later releases save
        saved = shutil.copytree(saved, tmp_path / "named")
        shutil.copyfile(tmp_path / "out" / "config.json", saved / "config.json")
    first, second = tiny.load(saved), tiny.load(tmp_path / "out")
    assert difference(workspace.outputs(first), workspace.outputs(second)) == 0.0
    assert first.config.to_dict() == second.config.to_dict() | {"_name_or_path": first.config._name_or_path}


def test_a_language_model_from_a_multimodal_original(workspace: Any, original: Path, tmp_path: Path) -> None:
    tiny_models.build_text_copy(workspace.checkpoint, tmp_path / "text")
    report = repair(tmp_path / "text", original, tmp_path / "out")
    assert set(report.tensors) == {f"model.{name}" for name in NAMES}
    assert tiny_models.class_name(tmp_path / "out", text_only=True).endswith("ForCausalLM")


def test_names_of_settings_alone(workspace: Any, original: Path, tmp_path: Path) -> None:
    def forget(settings: dict[str, Any]) -> None:
        text = settings["text_config"]
        for name in config_names.NAMES:
            text.pop(name, None)
        text["per_layer_config"] = {"2": {"head_dim": 64}, "5": {"head_dim": 64}}

    whole = copied(original, tmp_path / "whole", forget)
    report = repair(whole, original, tmp_path / "out")
    assert (report.tensors, report.dtypes) == ((), ())
    assert report.settings == {f"text_config.{name}": value for name, value in HALVED.items()}


def test_only_pieces_of_tensors_are_in_memory(
    original: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "read", lambda entry: pytest.fail(f"{entry.name} was read as a whole"))
    sizes: list[int] = []
    as_bytes = shards.as_bytes
    monkeypatch.setattr(shards, "as_bytes", lambda piece: sizes.append(piece.nbytes) or as_bytes(piece))
    pieces = shards.pieces
    monkeypatch.setattr(shards, "pieces", lambda entry: pieces(entry, 4096))
    repair(saved, original, tmp_path / "out")
    assert max(sizes) <= 2 * 4096  # of bf16, in float32


REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another number of layers": (
        lambda settings: settings["text_config"].update(num_hidden_layers=7),
        "num_hidden_layers is 7 in the one and 6 in the other",
    ),
    "other kinds": (
        lambda settings: settings["text_config"].update(layer_types=["full_attention"] * 6),
        "was not made from .*layer_types is .* in the one",
    ),
    "quantized": (
        lambda settings: settings.update(quantization_config={"quant_method": "bitsandbytes"}),
        "is quantized: readers would mistake plain weights",
    ),
    "another family": (
        lambda settings: settings.update(model_type="llama"),
        "is not a Gemma 4 model: .* model_type 'llama'",
    ),
    "no number": (
        lambda settings: settings["text_config"].update(num_hidden_layers="many"),
        "a setting in .* cannot be right: text_config.num_hidden_layers",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals_name_what_is_wrong(original: Path, saved: Path, tmp_path: Path, what: str) -> None:
    change, message = REFUSALS[what]
    folder = copied(saved, tmp_path / "in", change)
    with pytest.raises(Gemma4CompatError, match=message):
        repair(folder, original, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_another_original_is_refused(workspace: Any, saved: Path, original: Path, tmp_path: Path) -> None:
    with pytest.raises(Gemma4CompatError, match="has no keys and values of KV-shared layers either"):
        repair(saved, workspace.checkpoint, tmp_path / "out")
    with pytest.raises(Gemma4CompatError, match="there is nothing to repair"):
        repair(original, original, tmp_path / "out")
    with pytest.raises(Gemma4CompatError, match="the original 'nobody/nothing' is neither a folder nor in the cache"):
        repair(saved, "nobody/nothing", tmp_path / "out")
    wide = tmp_path / "wide"
    shutil.copytree(original, wide)
    widen(wide / "model.safetensors")
    with pytest.raises(
        Gemma4CompatError, match=r"layers.0.mlp.up_proj.weight is \[128, 64\] in the one and \[256, 64\]"
    ):
        repair(saved, wide, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(Gemma4CompatError, match="exists; nothing is overwritten"):
        repair(saved, original, tmp_path / "out")
    with pytest.raises(Gemma4CompatError, match="is inside"):
        repair(saved, original, saved / "out")


def widen(file: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    name = f"{TEXT}layers.0.mlp.up_proj.weight"
    values = load_file(file)
    save_file(values | {name: torch.cat([values[name]] * 2)}, file, {"format": "pt"})


@pytest.mark.parametrize(
    "what",
    [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left"), "SIGTERM"],
    ids=["interrupt", "full", "SIGTERM"],
)
def test_nothing_is_left_when_it_is_cut_short(
    original: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Any
) -> None:
    def fail(_: Any) -> bytes:
        assert list(tmp_path.iterdir()), "it fails while there is something to clean up"
        if isinstance(what, str):
            os.kill(os.getpid(), getattr(signal, what))
            return b""
        raise what

    monkeypatch.setattr(shards, "as_bytes", fail)
    wanted = SystemExit if isinstance(what, str) else KeyboardInterrupt
    with pytest.raises(Gemma4CompatError if isinstance(what, OSError) else wanted):
        repair(saved, original, tmp_path / "new" / "out")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_seen_before_anything_is_written(
    original: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(shards, "write", lambda *_: pytest.fail("it was written"))
    with pytest.raises(Gemma4CompatError, match="has 1000 bytes free and the repaired checkpoint needs"):
        repair(saved, original, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_merge_keeps_what_its_base_has(workspace: Any, original: Path, tmp_path: Path, dtype: str) -> None:
    """Nothing to repair there."""
    import torch

    short = {"bfloat16": "bf16", "float32": "fp32"}[dtype]
    options: dict[str, Any] = {"check": 0, "progress": False, "dtype": short}
    gemma4_compat.merge_adapter(original, workspace.adapter("language"), tmp_path / "merged", **options)
    found, given = tensors(tmp_path / "merged"), tensors(original)
    assert found.keys() == given.keys()
    for name in (TEXT + name for name in NAMES):
        assert torch.equal(found[name], given[name].to(getattr(torch, dtype)))
    settings = [json.loads((folder / "config.json").read_text()) for folder in (original, tmp_path / "merged")]
    assert settings[0]["text_config"].keys() == settings[1]["text_config"].keys()
    with pytest.raises(Gemma4CompatError, match="there is nothing to repair"):
        repair(tmp_path / "merged", original, tmp_path / "out")


def test_the_command(original: Path, saved: Path, tmp_path: Path) -> None:
    def run(out: str, *options: str) -> Any:
        return CliRunner().invoke(
            cli.app, ["repair", str(saved), "--from", str(original), str(tmp_path / out), *options]
        )

    said = run("out")
    assert said.exit_code == 0, said.output
    assert "added 6 tensors of KV-shared layers" in said.stdout
    assert "added to config.json: text_config.global_head_dim = 64" in said.stdout
    data = json.loads(run("other", "--json").stdout)
    assert len(data["tensors"]) == 6
    again = run("out")
    assert (again.exit_code, again.stdout) == (2, "")
    assert "exists; nothing is overwritten" in again.stderr
