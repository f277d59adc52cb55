"""A merged model that is written in 4 or 8 bits: the files transformers writes, and how much it loses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Gemma4CompatError, cli
from gemma4_compat._adapter_tools.merge import quantized, result
from gemma4_compat._gemma4.checkpoint import folders, shards
from gemma4_compat._lab import tiny_models
from tests.unit.adapter_tools.merge.adapters import tensors


def settings_of(name: str) -> dict[str, Any]:
    """What a user gives ``BitsAndBytesConfig`` for this quantization."""
    import torch

    if name == "8bit":
        return {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": name == "4bit-double",
        "bnb_4bit_compute_dtype": torch.bfloat16,
        "llm_int8_skip_modules": ["lm_head"],
    }


@pytest.mark.parametrize("name", [pytest.param("4bit", marks=pytest.mark.full), "4bit-double", "8bit"])
def test_the_files_are_those_of_transformers(workspace: Any, tmp_path: Path, name: str) -> None:
    import torch
    from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

    adapter = workspace.adapter("language")
    options: dict[str, Any] = {"check": 0, "max_shard_size": "300KB"}
    report = gemma4_compat.merge_adapter(
        workspace.checkpoint, adapter, tmp_path / "out", quantize_result=name, **options
    )
    assert (report.quantized_as, report.ok, len(report.files) > 1) == (name, True, True)
    gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "plain", check=0)
    model = Gemma4ForConditionalGeneration.from_pretrained(
        tmp_path / "plain",
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
        quantization_config=BitsAndBytesConfig(**settings_of(name)),
    )
    model.save_pretrained(tmp_path / "transformers")
    found, wanted = tensors(tmp_path / "out"), tensors(tmp_path / "transformers")
    assert found.keys() == wanted.keys()
    assert not [key for key in found if not torch.equal(found[key], wanted[key])]
    assert report.nbytes == sum(entry.nbytes for entry in shards.checkpoint(tmp_path / "out").values())
    settings = [
        json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        for folder in ("out", "transformers")
    ]
    assert settings[0] == settings[1]
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.full
@pytest.mark.parametrize("name, start", [("4bit", "original"), ("4bit", "dequantized"), ("8bit", "original")])
def test_it_says_how_much_is_lost(workspace: Any, tmp_path: Path, name: str, start: str) -> None:
    out = tmp_path / "out"
    arguments = ["merge", str(workspace.checkpoint), str(workspace.adapter("language")), str(out), "--json"]
    done = CliRunner().invoke(cli.app, [*arguments, "--quantize-result", name, "--check", "2", "--start", start])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    exact, lossy = data["parity"], data["quantized_parity"]
    assert exact["ok"]
    assert lossy["ok"]
    assert exact["difference_rms"] < lossy["difference_rms"] <= lossy["bound_rms"]
    assert lossy["noise_of"] != exact["noise_of"]
    text = (out / "merge_report.txt").read_text()
    assert f"in {name}" in text
    assert lossy["noise_of"] in text


@pytest.mark.full
def test_a_quantization_that_loses_more_is_out_of_bounds(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packed values are in another order: the merge itself is right, so only the second check can see it."""
    write = quantized.write

    def worse(source: Path, out: Path, *arguments: Any, **options: Any) -> Any:
        written = write(source, out, *arguments, **options)
        for entry in shards.checkpoint(out).values():
            if entry.name.endswith("_proj.weight") and entry.dtype == "uint8":
                with entry.file.open("r+b") as stream:
                    stream.seek(entry.start)
                    stream.write(shards.as_bytes(shards.read(entry).flip(0)))
        return written

    monkeypatch.setattr(quantized, "write", worse)
    with pytest.raises(result.MergeParityError) as caught:
        gemma4_compat.merge_adapter(
            workspace.checkpoint, workspace.adapter("language"), tmp_path / "out", quantize_result="4bit", check=2
        )
    report = caught.value.report
    assert report.parity.ok
    assert not report.ok
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.parametrize("name, dtype", [("4bit", "uint8"), ("8bit", "int8")])
def test_keys_of_shared_layers_are_kept(workspace: Any, tmp_path: Path, name: str, dtype: str) -> None:
    from transformers import Gemma4ForConditionalGeneration

    base = tiny_models.build_released(workspace.checkpoint, tmp_path / "base")
    extra = set(shards.checkpoint(base)) - set(shards.checkpoint(workspace.checkpoint))
    assert any(key.endswith("k_proj.weight") for key in extra)
    out = tmp_path / "out"
    report = gemma4_compat.merge_adapter(base, workspace.adapter("language"), out, quantize_result=name, check=1)
    assert report.ok
    found = shards.checkpoint(out)
    for key in extra:
        assert found[key].dtype == (dtype if key.endswith("_proj.weight") else "bfloat16")
    _, loading = Gemma4ForConditionalGeneration.from_pretrained(out, device_map={"": "cpu"}, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]


def test_unknown_names_and_numbers_too_large_for_float16(workspace: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    adapter = workspace.adapter("language")
    with pytest.raises(Gemma4CompatError, match="quantize_result must be 4bit, 4bit-double or 8bit, not '2bit'"):
        gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "out", quantize_result="2bit")
    with pytest.raises(Gemma4CompatError, match="--quantize-result 4bit"):
        gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "out", quantize="4bit")
    large = tmp_path / "large"
    large.mkdir()
    values = load_file(adapter / "adapter_model.safetensors")
    key = next(key for key in values if "layers.1.self_attn.q_proj.lora_B" in key)
    save_file(values | {key: torch.full_like(values[key], 1e6)}, large / "adapter_model.safetensors")
    (large / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    match = r"layers\.1\.self_attn\.q_proj\.weight has \d+ values that float16 cannot hold, .* merge to bf16 or fp32"
    with pytest.raises(Gemma4CompatError, match=match):
        gemma4_compat.merge_adapter(workspace.checkpoint, large, tmp_path / "out", dtype="float16", check=0)
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["4bit", "4bit-double", "8bit"])
def test_what_is_kept_unquantized_in_a_stored_base_stays_so(workspace: Any, tmp_path: Path, name: str) -> None:
    from gemma4_compat._lab import tiny

    skip = ["model.language_model.layers.0"]
    stored = tmp_path / "stored"
    tiny.load(workspace.checkpoint, name, skip_modules=skip, towers=True).save_pretrained(stored)
    out = tmp_path / "out"
    gemma4_compat.merge_adapter(
        stored, workspace.adapter("language"), out, start="dequantized", quantize_result=name, check=0
    )
    found, base = shards.checkpoint(out), shards.checkpoint(stored)
    assert {key: entry.dtype for key, entry in found.items()} == {key: entry.dtype for key, entry in base.items()}


@pytest.mark.full
@pytest.mark.parametrize("name", ["4bit", "4bit-double", "8bit"])
def test_the_room_it_needs_is_known_before(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wanted: list[int] = []
    refuse = folders.refuse_without_room
    monkeypatch.setattr(folders, "refuse_without_room", lambda *items: (wanted.append(items[1]), refuse(*items)))
    base = tiny_models.build_released(workspace.checkpoint, tmp_path / "base")
    report = gemma4_compat.merge_adapter(
        base, workspace.adapter("language"), tmp_path / "out", quantize_result=name, check=0
    )
    plain = sum(entry.nbytes for entry in shards.checkpoint(base).values())
    beside = sum(file.stat().st_size for file in folders.other_files(base))
    needed = plain + report.nbytes + 2 * beside
    assert needed * 0.99 <= wanted[-1] <= needed * 1.01


def test_eight_bits_go_through_float16(workspace: Any, tmp_path: Path) -> None:
    """A value that float16 cannot hold would make its row not a number."""
    import torch
    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    shutil.copytree(workspace.checkpoint, base)
    values = load_file(base / "model.safetensors")
    key = "model.language_model.layers.3.self_attn.q_proj.weight"
    values[key][0, 0] = 1e6
    save_file(values, base / "model.safetensors", metadata={"format": "pt"})
    match = r"layers\.3\.self_attn\.q_proj\.weight has 1 values that float16 cannot hold.*--quantize-result 4bit"
    with pytest.raises(Gemma4CompatError, match=match):
        gemma4_compat.merge_adapter(
            base, workspace.adapter("language"), tmp_path / "out", quantize_result="8bit", check=0
        )
    assert torch.isfinite(values[key]).all()
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
