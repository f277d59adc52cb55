"""F4: targets that reach a clipped linear go to the layer inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.adapters.clipped import is_wrapper
from gemma4_compat._lab import tiny_adapters
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters.peft_clippable_linear import PATCH
from tests.patches.promise import Promise

NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "ffw_layer_1"]


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"ValueError: Target module Gemma4ClippableLinear\("


def adapted(model: Any) -> dict[str, int]:
    """The adapted modules, with the rank each has."""
    return {
        name.removeprefix("base_model.model."): module.r["default"]
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def expected(model: Any, names: list[str]) -> set[str]:
    """Every module whose last name is asked for, a wrapper's inner layer in place of the wrapper."""
    found = set()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names:
            found.add(f"{name}.linear" if is_wrapper(module) else name)
    return found


def peft_model(workspace: Any, **config: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(workspace.load(), LoraConfig(**{"r": 4, **config}))


@pytest.mark.parametrize(
    "targets",
    [
        NAMES,
        r".*\.(" + "|".join(NAMES) + ")",
        r"(?i).*\.(" + "|".join(NAMES) + ")",
        [*NAMES, "q_proj.linear", "k_proj.linear"],
    ],
    ids=["names", "regex", "regex with an inline flag", "wrapper and inner both"],
)
def test_names_and_patterns_reach_the_inner_layers_once(workspace: Any, targets: Any) -> None:
    assert adapted(peft_model(workspace, target_modules=targets)).keys() == expected(workspace.load(), NAMES)


def test_exclude_modules_by_list_and_by_pattern(workspace: Any) -> None:
    everything = expected(workspace.load(), NAMES)
    without_audio = {name for name in everything if "audio_tower" not in name}
    by_pattern = peft_model(workspace, target_modules=NAMES, exclude_modules=r".*audio_tower.*")
    assert adapted(by_pattern).keys() == without_audio
    without_names = {name for name in everything if not name.removesuffix(".linear").endswith((".k_proj", ".up_proj"))}
    by_list = peft_model(workspace, target_modules=NAMES, exclude_modules=["k_proj", "up_proj"])
    assert adapted(by_list).keys() == without_names
    inner = peft_model(workspace, target_modules=NAMES, exclude_modules=["q_proj.linear"])
    assert adapted(inner).keys() == {name for name in everything if not name.endswith(".q_proj.linear")}


def test_rank_and_alpha_patterns_apply_to_the_inner_layers(workspace: Any) -> None:
    model = peft_model(
        workspace,
        target_modules=NAMES,
        lora_alpha=8,
        rank_pattern={r"vision_tower\..*\.q_proj": 2, "k_proj": 3},
        alpha_pattern={"k_proj": 30},
    )
    for name, rank in adapted(model).items():
        plain = name.removesuffix(".linear")
        wanted = 2 if "vision_tower" in plain and plain.endswith("q_proj") else 3 if plain.endswith("k_proj") else 4
        assert rank == wanted, name
        layer = model.base_model.model.get_submodule(name)
        assert layer.scaling["default"] == (30 if plain.endswith("k_proj") else 8) / wanted


def test_a_rank_pattern_that_ends_in_a_dollar_sign_applies_too(workspace: Any) -> None:
    pattern = r"^model\.vision_tower.*q_proj$"
    ranks = adapted(peft_model(workspace, target_modules=NAMES, rank_pattern={pattern: 2, "q_proj": 3}))
    assert {ranks[name] for name in ranks if "vision_tower" in name and ".q_proj" in name} == {2}
    assert {ranks[name] for name in ranks if "audio_tower" in name and ".q_proj" in name} == {3}


def test_a_tuner_that_cannot_exclude_saves_the_full_names(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel, VeraConfig, get_peft_model

    import gemma4_compat

    targets = [".".join(("self_attn", name)) for name in ("q_proj", "o_proj")]
    model = get_peft_model(workspace.load(), VeraConfig(r=2, target_modules=targets)).eval()
    reference = workspace.outputs(model)
    model.save_pretrained(tmp_path)
    gemma4_compat.revert(PATCH.id)
    try:
        elsewhere = PeftModel.from_pretrained(workspace.load(), tmp_path)
    finally:
        gemma4_compat.install()
    assert difference(reference, workspace.outputs(elsewhere)) == 0.0


def test_layers_to_transform_keeps_its_meaning(workspace: Any) -> None:
    model = peft_model(workspace, target_modules=NAMES, layers_to_transform=[1])
    assert adapted(model).keys() == {name for name in expected(workspace.load(), NAMES) if ".layers.1." in name}


def test_all_linear_and_default_targets_keep_their_meaning(workspace: Any) -> None:
    import torch

    base = workspace.load()
    linears = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    assert adapted(peft_model(workspace, target_modules="all-linear")).keys() == linears


def test_the_clamps_stay_around_the_adapted_layer(workspace: Any) -> None:
    import torch

    model = peft_model(workspace, target_modules=["q_proj"])
    wrapper = next(module for module in model.modules() if is_wrapper(module) and hasattr(module.linear, "lora_A"))
    with torch.no_grad():
        for parameter in wrapper.linear.lora_B.parameters():
            parameter.fill_(100.0)
        output = wrapper(torch.ones(1, wrapper.linear.in_features, dtype=torch.bfloat16, device=workspace.main))
    assert output.abs().max() == wrapper.output_max


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_quantized_inner_layers_are_adapted(workspace: Any, quantization: str) -> None:
    from peft import LoraConfig, get_peft_model

    base = workspace.load(quantization)
    kinds = {type(module.linear).__name__ for module in base.modules() if is_wrapper(module)}
    model = get_peft_model(base, LoraConfig(r=4, target_modules=NAMES))
    assert adapted(model).keys() == expected(workspace.load(quantization), NAMES)
    wrapped = {
        type(module.linear).__name__
        for module in model.modules()
        if is_wrapper(module) and hasattr(module.linear, "lora_A")
    }
    assert wrapped == kinds


def test_what_we_save_names_inner_layers_and_loads_without_the_patch(workspace: Any, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from safetensors import safe_open

    import gemma4_compat

    model = peft_model(workspace, target_modules=NAMES, rank_pattern={"q_proj": 2}, exclude_modules=["o_proj"])
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
    reference = workspace.outputs(model.eval())
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        keys = list(file.keys())
    assert any(".vision_tower." in key and key.endswith(".q_proj.linear.lora_A.weight") for key in keys)
    targets = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))["target_modules"]
    assert len(targets) < 20, "the saved targets should stay readable"

    with_patch = PeftModel.from_pretrained(workspace.load(), tmp_path)
    assert difference(reference, workspace.outputs(with_patch)) == 0.0
    gemma4_compat.revert(PATCH.id)
    try:
        elsewhere = PeftModel.from_pretrained(workspace.load(), tmp_path)
    finally:
        gemma4_compat.install()
    assert adapted(elsewhere) == adapted(with_patch)
    assert difference(reference, workspace.outputs(elsewhere)) == 0.0


def test_an_adapter_saved_elsewhere_with_a_pattern_that_names_the_wrapper_loads(
    workspace: Any, tmp_path: Path
) -> None:
    """Tools that redirect while they train leave wrapper names in the config and ``.linear`` in the keys."""
    import shutil

    from peft import PeftModel

    shutil.copytree(workspace.adapter("all"), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["target_modules"] = tiny_adapters.TARGETS["all"]
    file.write_text(json.dumps(config), encoding="utf-8")
    reference = PeftModel.from_pretrained(workspace.load(), workspace.adapter("all"))
    model = PeftModel.from_pretrained(workspace.load(), tmp_path / "adapter")
    assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0


def test_merging_keeps_the_clamps_and_the_answer(workspace: Any) -> None:
    import torch
    from peft import PeftModel

    base = workspace.outputs(workspace.load()).logits
    model = PeftModel.from_pretrained(workspace.load(), workspace.adapter("towers"))
    loaded = workspace.outputs(model).logits
    merged = model.merge_and_unload()
    assert all(type(module.linear) is torch.nn.Linear for module in merged.modules() if is_wrapper(module))
    # A merged bf16 weight is rounded once more (8 bits of mantissa, 34 linears in the towers, 6 layers of text after
    # them): measured 0.45 where the adapter's effect is 4.64. Lost clamps or a lost delta are of the effect's size.
    rounding = (loaded[0] - workspace.outputs(merged).logits[0]).abs().max()
    assert rounding < 0.25 * (loaded[0] - base[0]).abs().max()


def test_a_config_can_be_used_twice(workspace: Any) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=NAMES)
    first = adapted(get_peft_model(workspace.load(), config))
    assert adapted(get_peft_model(workspace.load(), config)) == first


def test_a_model_without_wrappers_and_its_config_are_left_alone() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=16
    )
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 3})
    model = get_peft_model(LlamaForCausalLM(tiny), config)
    assert set(config.target_modules) == {"q_proj", "v_proj"}
    assert config.exclude_modules is None
    assert config.rank_pattern == {"q_proj": 3}
    assert len(adapted(model)) == 4
