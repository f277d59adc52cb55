"""Adapters that do not fit their base: the problems that a scan finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

import peft

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat._lab import tiny_adapters, tiny_models
from tests.unit.adapter_tools.scan.helpers import LORA, hits, ids, saved_with, scan
from tests.unit.gemma4.adapters.adapter_files import PREFIX


def test_an_adapter_of_a_larger_model(workspace: Any) -> None:
    result = CliRunner().invoke(cli.app, ["scan", str(workspace.adapter("language")), "E2B"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0].endswith(("problem:", "problems:"))
    assert "  - shape: " in result.stdout.splitlines()[1]
    found = scan(workspace.adapter("language"), "E2B")
    (problem,) = [item for item in found.problems if item.id == "shape"]
    assert "is [4, 128] instead of [4, 6144]" in problem.message
    assert len(problem.keys) == found.keys["text"] == sum(found.keys.values())


def test_a_rank_that_the_configuration_does_not_say(changed: Any, workspace: Any, bare: Path) -> None:
    found = scan(changed("all", r=8), bare)
    assert ids(found) == ["rank"]
    assert len(found.problems[0].keys) == sum(found.keys.values())
    assert "is [4, 64] instead of [8, 64]" in found.problems[0].message
    with pytest.raises(RuntimeError, match=r"\[4, 64\]"):
        peft.PeftModel.from_pretrained(workspace.load(None), found.adapter)


def test_targets_that_leave_keys_out(changed: Any, bare: Path) -> None:
    found = scan(changed("all", target_modules=tiny_adapters.TARGETS["language"]), bare)
    assert ids(found) == ["untargeted"]
    assert len(found.problems[0].keys) == found.keys["vision"] + found.keys["audio"]


def test_targets_that_the_file_has_nothing_for(changed: Any, bare: Path) -> None:
    found = scan(changed("language", lambda key: None if "layers.1." in key else key), bare)
    assert ids(found) == ["missing"]
    assert len(found.problems[0].keys) == 14
    assert all(".layers.1." in key for key in found.problems[0].keys)


def test_a_layer_with_half_of_its_weights(changed: Any, bare: Path) -> None:
    lost = f"{PREFIX}model.language_model.layers.1.mlp.up_proj.lora_B.weight"
    found = scan(changed("language", lambda key: None if key == lost else key), bare)
    assert ids(found) == ["half", "missing"]
    assert found.problems[1].keys == (lost,)


def test_keys_of_another_model(changed: Any, bare: Path) -> None:
    found = scan(changed("language", lambda key: key.replace("language_model.layers", "transformer.h")), bare)
    assert ids(found)[0] == "unmatched"
    assert "all keys belong to modules that this base lacks" in found.problems[0].message
    assert found.hits == ()


def test_tower_keys_on_a_base_without_towers(workspace: Any, tmp_path: Path) -> None:
    base = tiny_models.build_text_checkpoint(tmp_path / "text")
    found = scan(workspace.adapter("all"), base)
    assert ids(found)[0] == "unmatched"
    assert len(found.problems[0].keys) == 48
    assert hits(found) == {("text", "linear"): found.keys["text"] // 2}
    assert len(found.remapped) == found.keys["text"]


def test_targets_that_match_nothing_are_refused_by_peft_and_the_scan_says_so(changed: Any, bare: Path) -> None:
    found = scan(changed("language", target_modules=["nothing_proj"]), bare)
    assert ids(found)[0] == "refused"
    assert f"PEFT {peft.__version__} refuses it" in found.problems[0].message
    assert "nothing_proj" in found.problems[0].message


@pytest.mark.filterwarnings("ignore")
def test_a_trained_copy_of_a_quantized_weight(workspace: Any, bare: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(**LORA, modules_to_save=["embed_vision"])
    folder = saved_with(config, workspace.load(None), tmp_path / "adapter")
    found = scan(folder, bare, quantize="4bit")
    assert ids(found) == ["quantized"]
    with pytest.raises((KeyError, RuntimeError)):
        peft.PeftModel.from_pretrained(workspace.load("4bit"), folder)


def test_with_the_redirecting_patch_off_peft_refuses_wrappers(changed: Any, bare: Path) -> None:
    folder = changed("towers", target_modules=tiny_adapters.TARGETS["towers"])
    assert len(scan(folder, bare).redirected) == 20
    gemma4_compat.revert("peft-clippable-linear")
    try:
        found = scan(folder, bare)
    finally:
        gemma4_compat.install()
    assert ids(found) == ["refused"]
    assert "Gemma4ClippableLinear" in found.problems[0].message
    assert scan(folder, bare).ok
