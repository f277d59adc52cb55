"""Adapters against a base: what the scan says is what PEFT does when it loads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

import peft
import transformers

import gemma4_compat
from gemma4_compat._adapter_tools.scan.result import tower_of
from gemma4_compat._gemma4.adapters.saved import read
from gemma4_compat._gemma4.models import build
from gemma4_compat._lab import tiny_adapters, tiny_configs
from tests.unit.adapter_tools.scan.helpers import LORA, NAMES, expected_shapes, hits, ids, json_of, saved_with, scan
from tests.unit.gemma4.adapters.adapter_files import PREFIX, as_in_the_forum_thread, write_adapter

#: transformers that builds keys and values for KV-shared layers, as it did at first
OWN_KV = "model.language_model.layers.5.self_attn.k_proj"


@pytest.mark.parametrize("name", ["language", "towers", "all"])
def test_the_scan_counts_the_layers_that_peft_adapts(workspace: Any, bare: Path, name: str) -> None:
    found = scan(workspace.adapter(name), bare)
    assert ids(found) == []
    model = peft.PeftModel.from_pretrained(workspace.load(None), workspace.adapter(name))
    layers = [path for path, module in model.named_modules() if hasattr(module, "lora_A")]
    assert Counter(tower_of(path) for path in layers) == Counter(
        {tower: sum(hit.modules for hit in found.hits if hit.tower == tower) for tower in found.keys}
    )
    weights = [tensor for path, tensor in model.named_parameters() if "lora_" in path]
    assert sum(found.keys.values()) == len(weights)
    assert found.nbytes == sum(tensor.numel() * 4 for tensor in weights)
    assert found.ranks == {4: len(layers)}
    kinds = {"text": "linear", "vision": "clipped linear", "audio": "clipped linear"}
    assert {(hit.tower, hit.kind) for hit in found.hits} == {(tower, kinds[tower]) for tower in found.keys}
    assert (found.base, found.model_class) == (str(bare), "Gemma4ForConditionalGeneration")


CONFIGS: dict[str, Callable[[], Any]] = {
    "wrapper names": lambda: peft.LoraConfig(r=4, target_modules=NAMES),
    "all-linear": lambda: peft.LoraConfig(r=4, target_modules="all-linear"),
    "dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "rank_pattern": lambda: peft.LoraConfig(**LORA, use_rslora=True, rank_pattern={"layers.0.self_attn.q_proj": 8}),
    "modules_to_save": lambda: peft.LoraConfig(**LORA, modules_to_save=["embed_vision", "lm_head"]),
    "tokens": lambda: peft.LoraConfig(**LORA, trainable_token_indices=[1, 2]),
    "embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "embed_tokens_per_layer"]),
    "bias": lambda: peft.LoraConfig(**LORA, bias="all"),
    "pissa": lambda: peft.LoraConfig(**LORA, init_lora_weights="pissa"),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(**LORA),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=8),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["o_proj"]),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"]),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.filterwarnings("ignore")  # PEFT's about its own settings
@pytest.mark.parametrize("name", CONFIGS)
def test_what_peft_saved_has_no_problem_on_the_same_base(
    workspace: Any, bare: Path, tmp_path: Path, name: str
) -> None:
    config = CONFIGS[name]()
    found = scan(saved_with(config, workspace.load(None), tmp_path / "adapter"), bare)
    assert ids(found) == []
    assert (found.remapped, found.dead) == ({}, ())
    assert found.peft_type == config.peft_type.value
    assert sum(found.keys.values()) == len(read(tmp_path / "adapter").tensors)
    assert bool(found.hits) is (name != "prompt")


@pytest.mark.filterwarnings("ignore")
def test_kinds_of_what_is_hit(workspace: Any, bare: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens_per_layer"], modules_to_save=["embed_vision"])
    found = scan(saved_with(config, workspace.load(None), tmp_path / "adapter"), bare)
    assert hits(found) == {("embeddings", "embedding"): 1, ("embedders", "full weight of linear"): 1}
    assert found.settings["modules_to_save"] == ["embed_vision"]


def test_settings_with_dora_and_ranks(workspace: Any, bare: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(**LORA, use_dora=True, rank_pattern={"layers.0.self_attn.q_proj": 8})
    found = scan(saved_with(config, workspace.load(None), tmp_path / "adapter"), bare)
    assert found.settings["use_dora"] is True
    assert 8 in found.settings["rank_pattern"].values()
    assert set(found.ranks) == {4, 8}
    assert sum(found.ranks.values()) == sum(hit.modules for hit in found.hits)


def test_expert_parameters(tmp_path: Path) -> None:
    import torch

    config = tiny_configs.config()
    for name, value in {
        "enable_moe_block": True,
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "top_k_experts": 2,
    }.items():
        setattr(config.text_config, name, value)
    with torch.device("meta"):
        model = transformers.Gemma4ForConditionalGeneration._from_config(config)
    names = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = peft.LoraConfig(r=4, target_modules=[], target_parameters=names)
    shapes = expected_shapes(adapter, model)
    folder = write_adapter(tmp_path, shapes, json_of(adapter))
    found = scan(folder, config)
    assert ids(found) == []
    assert hits(found) == {("text", "expert parameter"): 6}
    assert found.ranks == {4: 12}
    assert found.settings["target_parameters"] == names


def test_the_adapter_of_the_forum_thread_on_e2b_by_name(tmp_path: Path) -> None:
    """786 keys; those of the 20 KV-shared layers' keys and values have no use where transformers builds none."""
    model, *_ = build.on_meta("E2B")
    built = {name for name, _ in model.named_modules()}
    names = {key.removeprefix(PREFIX).partition(".lora_")[0] for key in as_in_the_forum_thread()}
    here = sorted(names & built)
    config = peft.LoraConfig(r=16, target_modules=here)
    data = json_of(config)
    known = expected_shapes(config, model)
    shapes = {key: known.get(key, (16, 1536)) for key in as_in_the_forum_thread()}
    found = scan(write_adapter(tmp_path, shapes, data | {"target_modules": sorted(names)}), "E2B")
    assert ids(found) == []
    assert found.keys == {"text": 490, "vision": 224, "audio": 72}
    assert len(found.dead) == 2 * len(names - built)
    assert len(found.dead) in (0, 80)
    assert len(found.hits) == 3
    assert "conversion script" in found.notes[0]
    assert found.base == "google/gemma-4-E2B-it"


def test_keys_on_the_wrapper_are_renamed_to_its_inner_layer(changed: Any, bare: Path) -> None:
    folder = changed(
        "towers", lambda key: key.replace(".linear.", "."), target_modules=tiny_adapters.TARGETS["towers"]
    )
    found = scan(folder, bare)
    assert ids(found) == []
    assert len(found.remapped) == sum(found.keys.values()) == 40
    assert hits(found) == {("vision", "clipped linear"): 10, ("audio", "clipped linear"): 10}
    assert len(found.redirected) == 20
    assert all(name == key.replace(".lora_", ".linear.lora_") for key, name in found.remapped.items())


def test_an_adapter_of_the_text_model_is_renamed(bare: Path, tmp_path: Path) -> None:
    model = transformers.Gemma4ForCausalLM(tiny_configs.config().text_config)
    folder = saved_with(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), model, tmp_path / "adapter")
    found = scan(folder, bare)
    assert found.saved_from == "Gemma4ForCausalLM"
    assert ids(found) == []
    assert set(found.keys) == {"text"}
    assert len(found.remapped) == found.keys["text"]
    assert found.remapped[f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"] == (
        f"{PREFIX}model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    )
    assert found.notes == ()
    gemma4_compat.revert("peft-adapter-keys")
    try:
        found = scan(folder, bare)
    finally:
        gemma4_compat.install()
    assert ids(found) == ["renamed"]
    assert len(found.problems[0].keys) == found.keys["text"]
    assert [note.split(",")[0] for note in found.notes] == [
        "the targets also reach vision",
        "the targets also reach audio",
    ]


def test_targets_in_the_words_of_another_class_are_fitted(bare: Path, tmp_path: Path) -> None:
    model = transformers.Gemma4ForCausalLM(tiny_configs.config().text_config)
    config = peft.LoraConfig(r=4, target_modules=r"model\.layers\.\d+\.self_attn\.q_proj")
    found = scan(saved_with(config, model, tmp_path / "adapter"), bare)
    assert ids(found) == []
    assert hits(found) == {("text", "linear"): 6}


def test_keys_of_layers_that_share_keys_and_values_have_no_use(changed: Any, workspace: Any, bare: Path) -> None:
    model, *_ = build.on_meta(str(bare))
    if OWN_KV in dict(model.named_modules()):
        pytest.skip("this transformers builds keys and values for KV-shared layers")
    saved = read(workspace.adapter("language"))
    extra = {f"{PREFIX}{OWN_KV}.lora_{half}.weight": shape for half, shape in {"A": (4, 64), "B": (64, 4)}.items()}
    shapes = {key: tensor.shape for key, tensor in saved.tensors.items()} | extra
    found = scan(write_adapter(bare.parent / "adapter", shapes, saved.config), bare)
    assert ids(found) == []
    assert set(found.dead) == set(extra)
    assert found.keys == {"text": 78}
