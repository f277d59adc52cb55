"""What is exported adds to each weight what PEFT adds, decoded as the reader does it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from tests.unit.adapter_tools.export import deltas
from tests.unit.adapter_tools.export.conftest import ADAPTERS

#: A product of float32 matrices of these sizes, summed in another order.
ROUNDING = 2e-6
SERVED = {
    "vllm": tuple(ADAPTERS),
    "sglang": ("language", "query", "up", "patterns", "stabilized", "keys", "attention"),
    "mlx": tuple(ADAPTERS),
}
CASES = [(target, name) for target, names in SERVED.items() for name in names]


def exported(adapters: Any, name: str, target: str, out: Path) -> tuple[gemma4_compat.ExportReport, dict[str, Any]]:
    adapter, base = adapters(name)
    with contextlib.ExitStack() as stack:
        if target == "sglang" or (target, name) in (("mlx", "towers"), ("mlx", "embedders")):
            reason = "SGLang 0.5.23 stops" if target == "sglang" else "mlx-vlm 0.7.10 cannot load an adapter"
            stack.enter_context(pytest.warns(gemma4_compat.Gemma4CompatWarning, match=reason))
        report = gemma4_compat.export_adapter(adapter, out, target, base=base)
    return report, deltas.of_mlx(out) if target == "mlx" else deltas.of_server(out)


def values_that_are_keys(base: Path) -> set[str]:
    text = json.loads((base / "config.json").read_text())["text_config"]
    kinds = text["layer_types"] if text["attention_k_eq_v"] else []
    return {f"layers.{layer}.self_attn.v_proj" for layer, kind in enumerate(kinds) if kind == "full_attention"}


@pytest.mark.parametrize("target, name", CASES)
def test_each_weight_gets_what_peft_adds(adapters: Any, tmp_path: Path, target: str, name: str) -> None:
    import torch

    report, found = exported(adapters, name, target, tmp_path / "out")
    wanted = deltas.by_peft(adapters(name)[1], adapters(name)[0])
    for module, delta in wanted.items():
        torch.testing.assert_close(found.pop(module), delta, rtol=ROUNDING, atol=ROUNDING, msg=module)
    # What is left, the adapter has nothing for: zeros, or what keys get where they are the values.
    same = values_that_are_keys(adapters(name)[1])
    for module, delta in found.items():
        keys = wanted.get(module.replace("v_proj", "k_proj")) if module in same else None
        assert not delta.any() if keys is None else torch.allclose(delta, keys, rtol=ROUNDING, atol=ROUNDING), module
    assert {one for one in report.added if ".experts." not in one} == {one for one in found if "experts" not in one}
    assert report.modules == len(wanted)


def test_values_that_are_keys_get_what_keys_get(adapters: Any, tmp_path: Path) -> None:
    """VLLM and SGLang give an adapter of ``k_proj`` to the key alone; in transformers it is in the value, too."""
    import torch

    wanted = deltas.by_peft(adapters("keys")[1], adapters("keys")[0])
    full = [name for name in wanted if name.endswith("k_proj") and name.replace("k_proj", "v_proj") not in wanted]
    assert full
    for target in ("vllm", "sglang"):
        report, found = exported(adapters, "keys", target, tmp_path / target)
        for name in full:
            value = name.replace("k_proj", "v_proj")
            assert torch.equal(found[value], found[name])
            assert value in report.added


def test_a_plain_adapter_keeps_its_bits(adapters: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    adapter, base = adapters("language")
    report = gemma4_compat.export_adapter(adapter, tmp_path / "out", "vllm", base=base)
    assert (report.rank, report.scale, report.padded, report.rescaled, report.added) == (4, 2.0, (), (), ())
    before = load_file(adapter / "adapter_model.safetensors")
    after = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_several_ranks_and_scales_are_said(adapters: Any, tmp_path: Path) -> None:
    adapter, base = adapters("patterns")
    report = gemma4_compat.export_adapter(adapter, tmp_path / "out", "vllm", base=base)
    assert report.rank == 8
    assert any("q_proj" in name for name in report.padded)
    assert any("o_proj" in name for name in report.rescaled)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == report.scale
    assert "--max-lora-rank 8 " in report.command


@pytest.mark.parametrize("program, target", [("llama.cpp", "gguf"), ("ollama", "gguf"), ("mlx-lm", "mlx")])
def test_a_program_stands_for_what_it_reads(adapters: Any, tmp_path: Path, program: str, target: str) -> None:
    adapter, base = adapters("language")
    assert gemma4_compat.export_adapter(adapter, tmp_path / "out", program, base=base).target == target


@pytest.mark.parametrize("target", ["vllm", "sglang", "mlx", "gguf"])
def test_keys_of_layers_that_share_are_left_out(adapters: Any, tmp_path: Path, target: str) -> None:
    """Releases of transformers that have them there saved them; mlx-lm and llama.cpp refuse them."""
    from safetensors.torch import load_file, save_file

    adapter, base = adapters("language")
    copy = tmp_path / "adapter"
    copy.mkdir()
    weights = load_file(adapter / "adapter_model.safetensors")
    prefix = "base_model.model.model.language_model.layers"
    for half in "AB":
        weights[f"{prefix}.5.self_attn.k_proj.lora_{half}.weight"] = weights[
            f"{prefix}.2.self_attn.k_proj.lora_{half}.weight"
        ].clone()
    save_file(weights, copy / "adapter_model.safetensors")
    (copy / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    with contextlib.ExitStack() as stack:
        if target == "sglang":
            stack.enter_context(pytest.warns(gemma4_compat.Gemma4CompatWarning))
        report = gemma4_compat.export_adapter(copy, tmp_path / "out", target, base=base)
    assert len(report.dead) == 2
    assert all(".layers.5.self_attn.k_proj." in key for key in report.dead)
    assert ("layers.5.self_attn.k_proj" in report.added) == (target == "sglang")
