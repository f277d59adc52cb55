"""Merged weights: bit for bit those of PEFT in float32, whatever the base and the tuner."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._adapter_tools.merge.weights import DTYPES
from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from tests.unit.adapter_tools.merge.adapters import LANGUAGE, assert_same, make, merged_by_peft, randomized, tensors

pytestmark = pytest.mark.full


def configs() -> dict[str, Callable[[], Any]]:
    import peft

    plain: dict[str, Any] = {"target_modules": LANGUAGE}
    lora: dict[str, Any] = {"r": 4, "lora_alpha": 8, **plain}
    found: dict[str, Callable[[], Any]] = {
        "lora": lambda: peft.LoraConfig(**lora),
        "rslora": lambda: peft.LoraConfig(use_rslora=True, **lora),
        "dora": lambda: peft.LoraConfig(use_dora=True, **lora),
        "patterns": lambda: peft.LoraConfig(
            rank_pattern={r"layers\.2\..*q_proj": 2}, alpha_pattern={"o_proj": 3}, **lora
        ),
        "towers": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "ffw_layer_1"]),
        "embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens_per_layer", "q_proj"]),
        "modules_to_save": lambda: peft.LoraConfig(modules_to_save=["embedding_projection"], **lora),
        "pissa": lambda: peft.LoraConfig(init_lora_weights="pissa", **lora),
        "loha": lambda: peft.LoHaConfig(r=4, **plain),
        "lokr": lambda: peft.LoKrConfig(r=4, **plain),
        "ia3": lambda: peft.IA3Config(
            target_modules=r".*language_model.*\.(k_proj|down_proj)", feedforward_modules=r".*down_proj"
        ),
        "oft": lambda: peft.OFTConfig(oft_block_size=8, use_cayley_neumann=False, **plain),
        "boft": lambda: peft.BOFTConfig(boft_block_size=4, **plain),
        "hra": lambda: peft.HRAConfig(r=4, **plain),
        "miss": lambda: peft.MissConfig(r=4, **plain),
        "fourierft": lambda: peft.FourierFTConfig(n_frequency=50, **plain),
        "adalora": lambda: peft.AdaLoraConfig(init_r=6, target_r=3, total_step=10, **plain),
        "vera": lambda: peft.VeraConfig(r=8, **plain),
        "vera not saved": lambda: peft.VeraConfig(r=8, save_projection=False, projection_prng_key=5, **plain),
        "randlora": lambda: peft.RandLoraConfig(r=4, **plain),
        "randlora not saved": lambda: peft.RandLoraConfig(r=4, save_projection=False, **plain),
        "randlora sparse": lambda: peft.RandLoraConfig(r=4, sparse=True, **plain),
        "ln_tuning": lambda: peft.LNTuningConfig(target_modules=r".*language_model.*input_layernorm"),
    }
    return found


@pytest.mark.parametrize(
    "kind",
    [
        *("lora", "rslora", "dora", "patterns", "towers", "embedding", "modules_to_save", "pissa"),
        *("loha", "lokr", "ia3", "oft", "boft", "hra", "miss", "fourierft", "ln_tuning"),
        *("adalora", "vera", "vera not saved", "randlora", "randlora not saved", "randlora sparse"),
    ],
)
def test_weights_are_those_of_a_merge_by_peft_in_float32(workspace: Any, tmp_path: Path, kind: str) -> None:
    adapter = make(workspace.checkpoint, tmp_path / "adapter", configs()[kind]())
    report = gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "out", check=0)
    wanted = merged_by_peft(workspace.checkpoint, adapter)
    found = tensors(tmp_path / "out")
    assert_same(found, wanted)
    before = tensors(workspace.checkpoint)
    changed = [name for name in found if not found[name].equal(before[name])]
    assert len(changed) == report.modules + report.replaced > 0
    assert report.parity is None


def test_experts_merge_through_target_parameters(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    shape, tables = tiny_configs.text_shape(), {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 64}
    config = Gemma4TextConfig(
        **shape, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32, **tables
    )
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    parameters = ["layers.1.experts.gate_up_proj", "layers.1.experts.down_proj", "layers.2.experts.down_proj"]
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
    randomized(get_peft_model(model, lora)).save_pretrained(tmp_path / "adapter")
    report = gemma4_compat.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", check=1)
    assert_same(tensors(tmp_path / "out"), merged_by_peft(tmp_path / "base", tmp_path / "adapter"))
    assert report.modules == 6 + 2
    assert report.parity is not None
    assert report.parity.ok


@pytest.mark.parametrize("quantization", ["4bit-double", "8bit"])
def test_a_base_that_is_quantized_on_disk(workspace: Any, tmp_path: Path, quantization: str) -> None:
    import torch

    stored = tmp_path / "stored"
    tiny.load(workspace.checkpoint, quantization, towers=True).save_pretrained(stored)
    adapter = workspace.adapter("language")
    with pytest.raises(Gemma4CompatError, match=r"quantized on disk: .* --start dequantized"):
        gemma4_compat.merge_adapter(stored, adapter, tmp_path / "out")
    report = gemma4_compat.merge_adapter(stored, adapter, tmp_path / "out", start="dequantized", check=1)
    assert report.quantization == quantization
    assert not report.assumed
    assert report.parity.ok
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    gemma4_compat.merge_adapter(
        workspace.checkpoint, adapter, tmp_path / "same", start="dequantized", quantize=quantization, check=0
    )
    found, wanted = tensors(tmp_path / "out"), tensors(tmp_path / "same")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_dequantized_weights_are_those_the_loaded_base_computes_with(workspace: Any, tmp_path: Path) -> None:
    import torch
    from bitsandbytes.functional import dequantize_4bit

    gemma4_compat.merge_adapter(
        workspace.checkpoint,
        workspace.adapter("towers"),
        tmp_path / "out",
        start="dequantized",
        quantize="4bit",
        check=0,
    )
    found = tensors(tmp_path / "out")
    model = workspace.load("4bit")
    seen = 0
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit" and "language_model" in name:
            wanted = dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert torch.equal(found[f"{name}.weight"], wanted), name
            seen += 1
    assert seen > 30


@pytest.mark.parametrize("dtype, start", [("fp16", "original"), ("fp32", "original"), ("fp32", "dequantized")])
def test_dtypes(workspace: Any, tmp_path: Path, dtype: str, start: str) -> None:
    report = gemma4_compat.merge_adapter(
        workspace.checkpoint, workspace.adapter("language"), tmp_path / "out", dtype=dtype, start=start, check=1
    )
    assert report.parity.ok
    assert report.assumed == (start == "dequantized")
    wanted = DTYPES[dtype]
    assert {entry.dtype for entry in shards.checkpoint(tmp_path / "out").values()} == {wanted}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == wanted
    if dtype == "fp32":
        assert report.parity.difference < 0.01


def test_a_checkpoint_of_the_language_model_alone(tmp_path: Path) -> None:
    import peft
    from peft import get_peft_model
    from transformers import Gemma4ForCausalLM

    folder = tiny_models.build_text_checkpoint(tmp_path / "base")
    model = Gemma4ForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    randomized(get_peft_model(model, config)).save_pretrained(tmp_path / "adapter")
    report = gemma4_compat.merge_adapter(folder, tmp_path / "adapter", tmp_path / "out")
    assert report.model_class == "Gemma4ForCausalLM"
    assert report.parity.ok
    assert len(report.parity.prompts) == 4
    assert_same(tensors(tmp_path / "out"), merged_by_peft(folder, tmp_path / "adapter"))


def test_an_adapter_of_another_class_is_translated(workspace: Any, tmp_path: Path) -> None:
    """Trained on the language model alone, merged into the whole model; patterns and all."""
    import peft
    from peft import get_peft_model
    from transformers import Gemma4ForCausalLM

    folder = tiny_models.build_text_checkpoint(tmp_path / "text")
    patterns = {"alpha_pattern": {r"^model\.layers\.2\.self_attn\.q_proj": 5}, "rank_pattern": {"up_proj": 2}}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=r"model\.layers\.\d\..*(q_proj|up_proj)", **patterns)
    randomized(get_peft_model(Gemma4ForCausalLM.from_pretrained(folder), config)).save_pretrained(
        tmp_path / "text-adapter"
    )
    report = gemma4_compat.merge_adapter(workspace.checkpoint, tmp_path / "text-adapter", tmp_path / "out", check=1)
    assert report.parity.ok
    assert report.modules == 12

    there = r".*language_model\.layers\.\d\..*(q_proj|up_proj)"
    patterns["alpha_pattern"] = {r".*language_model\.layers\.2\.self_attn\.q_proj": 5}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=there, **patterns)
    same = make(workspace.checkpoint, tmp_path / "same", config)
    from safetensors.torch import load_file, save_file

    values = load_file(tmp_path / "text-adapter" / "adapter_model.safetensors")
    renamed = {key.replace("model.model.layers", "model.model.language_model.layers"): v for key, v in values.items()}
    assert set(renamed) == set(load_file(same / "adapter_model.safetensors"))
    save_file(renamed, same / "adapter_model.safetensors")
    assert_same(tensors(tmp_path / "out"), merged_by_peft(workspace.checkpoint, same))


def test_an_adalora_that_dropped_ranks(workspace: Any, tmp_path: Path) -> None:
    """As PEFT saves it after an allocation: the kept ranks alone, and which these are. One module has none."""
    from safetensors.torch import load_file, save_file

    adapter = make(workspace.checkpoint, tmp_path / "adapter", configs()["adalora"]())
    file, settings = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    values, pattern = load_file(file), {}
    for number, key in enumerate(sorted(key for key in values if key.endswith(".lora_E"))):
        kept = [rank % 3 != number % 3 if number else False for rank in range(6)]
        path = key.removesuffix(".lora_E")
        pattern[f"{path.removeprefix('base_model.model.')}.lora_E"] = kept
        for name in ("lora_E", "lora_A"):
            values[f"{path}.{name}"] = values[f"{path}.{name}"][kept]
        values[f"{path}.lora_B"] = values[f"{path}.lora_B"][:, kept].contiguous()
    save_file(values, file)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"rank_pattern": pattern}))
    report = gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "out", check=1)
    assert report.ok
    assert_same(tensors(tmp_path / "out"), merged_by_peft(workspace.checkpoint, adapter))
