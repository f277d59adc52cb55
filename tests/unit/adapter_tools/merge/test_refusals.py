"""What cannot be merged is one clear error, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning
from gemma4_compat._gemma4.checkpoint import shards
from tests.unit.adapter_tools.merge.adapters import assert_same, broken, digests, reheadered, tensors


@pytest.mark.parametrize(
    "how, message",
    [
        ("truncated", r"is truncated: it has \d+ bytes and its header describes \d+"),
        ("no header", r"is not a safetensors file"),
        ("pickle", r"is a pickle .* --allow-pickle"),
        ("rank", r"the adapter does not fit .*down_proj.* size mismatch"),
        ("shape", r"the adapter does not fit .* size mismatch"),
        ("type", r"type 'NEWTUNER', which peft .* does not know"),
        ("prompt", r"PROMPT_TUNING changes the prompt, not the weights"),
        ("shared", r"XLORA are not merged module by module"),
        ("other model", r"not one of the \d+ keys of the adapter"),
        ("some keys", r"1 keys of the adapter .* belong to no module"),
        ("half a module", r"the file lacks .*lora_B"),
        ("nan", r"PEFT cannot merge the adapter of .*NaN"),
        ("no layer", r"weights for \d+ modules that its configuration leaves out, .*layers_to_transform \[999\]"),
        ("other targets", r"weights for \d+ modules that its configuration leaves out"),
        ("overlap", r"is damaged: .* shares \d+ bytes with"),
        ("gap", r"is damaged: .* begins 8 bytes after the end of"),
        ("gap at the start", r"is damaged: .* begins 8 bytes after the end of 'the header'"),
        ("unknown dtype", r"is damaged: .* has the dtype 'I3', which safetensors does not have"),
        ("no config", r"there is no adapter_config.json"),
        ("no JSON", r"adapter_config.json' is not JSON"),
        ("empty", r"has no weights"),
    ],
)
def test_a_bad_adapter_is_one_clear_error(
    workspace: Any, tmp_path: Path, how: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(workspace.adapter("language"), adapter)
    broken(adapter, how)
    with pytest.raises(Gemma4CompatError, match=f"(?s){message}"):
        gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "out", check=0)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_pickle_is_read_when_allowed_and_never_runs_code(workspace: Any, tmp_path: Path) -> None:
    import torch

    adapter = tmp_path / "adapter"
    shutil.copytree(workspace.adapter("language"), adapter)
    broken(adapter, "pickle")
    for name, folder, options in (
        ("out", adapter, {"allow_pickle": True}),
        ("same", workspace.adapter("language"), {}),
    ):
        gemma4_compat.merge_adapter(workspace.checkpoint, folder, tmp_path / name, check=0, **options)
    assert_same(tensors(tmp_path / "out"), tensors(tmp_path / "same"))
    torch.save({"weight": Trap(tmp_path / "ran")}, adapter / "adapter_model.bin")
    with pytest.raises(Gemma4CompatError, match="cannot be read as plain tensors"):
        gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "new", check=0, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_targets_without_weights_are_said(workspace: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    adapter = tmp_path / "adapter"
    shutil.copytree(workspace.adapter("language"), adapter)
    file = adapter / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(file).items() if "layers.2.mlp.up_proj" not in key}, file)
    with pytest.warns(
        Gemma4CompatWarning, match=r"targets 1 modules that its file has no weights for, .*2.mlp.up_proj"
    ):
        report = gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "out", check=0)
    assert report.absent == ("model.language_model.layers.2.mlp.up_proj",)


@pytest.mark.parametrize(
    "how, message",
    [
        ("truncated", r"is truncated"),
        ("missing shard", r"names the shard .*, which is not in"),
        ("shard above", r"names the shard '\.\./model-.*', which is not in its folder"),
        ("shard elsewhere", r"names the shard '/.*', which is not in its folder"),
        ("overlap", r"is damaged: .* shares \d+ bytes with"),
        ("llama", r"is a llama model"),
        ("no weights", r"there are no weights in safetensors"),
        ("no config", r"there is no config.json"),
        ("smaller", r"is \[64, 128\] in the weights and \[64, 96\] by config.json"),
    ],
)
def test_a_bad_base_is_one_clear_error(workspace: Any, base: Path, tmp_path: Path, how: str, message: str) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif how == "missing shard":
        shard.unlink()
    elif how in ("shard above", "shard elsewhere"):
        index = folder / "model.safetensors.index.json"
        other = str(base / shard.name) if how == "shard elsewhere" else f"../{shard.name}"
        index.write_text(index.read_text().replace(f'"{shard.name}"', json.dumps(other)))
    elif how == "overlap":
        reheadered(shard, how)
    elif how == "llama":
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    elif how == "no weights":
        for file in folder.glob("model*"):
            file.unlink()
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "smaller":
        data = json.loads((folder / "config.json").read_text())
        data["text_config"]["intermediate_size"] = 96
        (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(Gemma4CompatError, match=message):
        gemma4_compat.merge_adapter(folder, workspace.adapter("language"), tmp_path / "out", check=0)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"start": "other"}, "start 'other' is unknown"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"dtype": ["bf16"]}, r"dtype \['bf16'\] is unknown"),
        ({"check": -1}, r"check must be a number of prompts \(0 for none\), not -1"),
        ({"check": "0"}, r"check must be a number of prompts \(0 for none\), not '0'"),
        ({"check": None}, r"check must be a number of prompts \(0 for none\), not None"),
        ({"check": 0.5}, r"check must be a number of prompts \(0 for none\), not 0.5"),
        ({"tolerance": -1.0}, "tolerance must be a difference of logits"),
        ({"tolerance": "1"}, "tolerance must be a difference of logits, 0 or more, not '1'"),
        ({"skip_modules": "lm_head", "start": "dequantized"}, "skip_modules must be a list of names, not 'lm_head'"),
        ({"quantize": 4, "start": "dequantized"}, "quantize must be 4bit, 8bit or a BitsAndBytesConfig, not 4"),
        ({"max_shard_size": "much"}, "'much' is not a size"),
        ({"max_shard_size": "5"}, r"did you mean 5GiB\?"),
        ({"device_map": "mars:9"}, "'mars:9': no such device"),
        ({"device_map": "cuda:99"}, "'cuda:99': this machine has"),
        ({"device_map": {"": 99}}, "99: this machine has"),
        ({"device_map": {"": True}}, "device_map has the entry '': True"),
        ({"device_map": {1: "cpu"}}, "device_map has the entry 1: 'cpu'"),
        ({"device_map": {"": "meta"}}, "where nothing can be computed"),
        ({"device_map": 1.5}, "device_map has the entry '': 1.5"),
        ({"max_shard_size": 0}, "max_shard_size must be more than 0"),
        ({"quantize": "4bit"}, "are for --start dequantized"),
        ({"quantize": "2bit", "start": "dequantized"}, "quantization '2bit' is unknown"),
    ],
)
def test_bad_options_are_one_clear_error(workspace: Any, tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(Gemma4CompatError, match=message):
        gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["inside", "link", "long"])
def test_a_bad_output_is_refused_before_anything_is_read(
    workspace: Any, base: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    targets = {"inside": folder / "new" / "out", "link": tmp_path / "link", "long": tmp_path / ("x" * 300)}
    before = digests(folder)
    monkeypatch.setattr(shards, "checkpoint", lambda _: pytest.fail("the base was read"))
    with pytest.raises(Gemma4CompatError, match=r"is inside|is a link|is longer than"):
        gemma4_compat.merge_adapter(folder, workspace.adapter("language"), targets[place], check=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "empty", "link"]
    assert digests(folder) == before


def test_what_is_there_is_not_overwritten(workspace: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    for target in (out, out / "mine.txt"):
        with pytest.raises(Gemma4CompatError, match="exists; nothing is overwritten"):
            gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), target)
    assert (out / "mine.txt").read_text() == "kept"
    with pytest.raises(Gemma4CompatError, match="neither a folder nor in the cache"):
        gemma4_compat.merge_adapter("nobody/nothing", workspace.adapter("language"), tmp_path / "new")
    (out / "mine.txt").unlink()
    gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), out, check=0)
    assert (out / "model.safetensors").is_file()
