"""F3 and F13: PEFT leaves a dispatched base where it is, and puts adapters where their layers compute."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_adapters
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters.peft_keep_dispatch import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"hf_device_map of \d+ entries became|KeyError: 'base_model|Cannot copy out of meta tensor"


def placement(model: Any) -> tuple[dict[str, Any], dict[str, str], dict[str, int]]:
    """The map, the device of every base tensor and the identity of every base module's hook."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    tensors = [*base.named_parameters(), *base.named_buffers()]
    devices = {
        name.replace(".base_layer", ""): str(tensor.device)
        for name, tensor in tensors
        if "lora_" not in name and "modules_to_save" not in name
    }
    hooks = {
        name.replace(".base_layer", ""): id(module._hf_hook)
        for name, module in base.named_modules()
        if hasattr(module, "_hf_hook")
    }
    return dict(getattr(model, "hf_device_map", {})), devices, hooks


def lora_devices(model: Any) -> set[str]:
    return {parameter.device.type for name, parameter in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize(
    "options", [{}, {"is_trainable": True}, {"low_cpu_mem_usage": True}, {"autocast_adapter_dtype": False}], ids=str
)
@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_three_adapters_change_nothing_of_the_base_and_answer_as_on_one_device(
    workspace: Any, quantization: str | None, options: dict[str, Any]
) -> None:
    from peft import PeftModel

    outputs = []
    for base in (workspace.load(quantization), workspace.split(quantization)):
        before = placement(base)
        model = PeftModel.from_pretrained(base, workspace.adapter("language"), **options)
        assert placement(model) == before
        for name, adapter in (("second", "towers"), ("third", "all")):
            model.load_adapter(str(workspace.adapter(adapter)), name, **options)
            assert placement(model) == before
        assert lora_devices(model) == {"cpu" if workspace.main == "cpu" else "cuda"}
        model.eval()
        seen = []
        for name in ("default", "second", "third"):
            model.set_adapter(name)
            seen.append(workspace.outputs(model))
        with model.disable_adapter():
            seen.append(workspace.outputs(model))
        model.delete_adapter("third")
        model.load_adapter(str(workspace.adapter("towers")), "third", **options)
        model.eval()
        model.set_adapter("third")
        seen.append(workspace.outputs(model))
        assert placement(model) == before
        outputs.append(seen)
    whole, split = outputs
    assert [difference(a, b) for a, b in zip(whole, split)] == [0.0] * 5
    assert all(difference(whole[0], other) > 0.0 for other in whole[1:]), "the adapters must differ to show anything"


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_get_peft_model_initializes_as_on_one_device(workspace: Any, quantization: str | None) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    created = []
    for base in (workspace.load(quantization), workspace.split(quantization)):
        torch.manual_seed(3)
        before = placement(base)
        config = LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["all"], init_lora_weights="gaussian")
        model = get_peft_model(base, config)
        assert placement(model) == before
        created.append({name: value for name, value in model.named_parameters() if "lora_" in name})
    whole, split = created
    assert whole.keys() == split.keys()
    for name, value in whole.items():
        assert value.dtype == split[name].dtype
        assert value.device == split[name].device
        assert torch.equal(value, split[name])


@pytest.mark.parametrize("arguments", [{"device_map": "auto"}, {"max_memory": {"cpu": "1MiB"}}])
def test_placement_arguments_are_ignored_with_one_notice(workspace: Any, arguments: dict[str, Any]) -> None:
    from peft import PeftModel

    base = workspace.split()
    before = placement(base)
    with pytest.warns(gemma4_compat.Gemma4CompatWarning, match="base model is already dispatched") as notices:
        model = PeftModel.from_pretrained(base, workspace.adapter("language"), **arguments)
    ours = [notice for notice in notices if notice.category is gemma4_compat.Gemma4CompatWarning]
    assert [notice.filename for notice in ours] == [__file__]  # the user's line, not PEFT's
    assert placement(model) == before


def test_the_auto_classes_which_give_the_base_and_the_adapter_one_map_are_not_warned(
    workspace: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    from peft import AutoPeftModel, LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=r".*language_model.*\.q_proj", init_lora_weights=False)
    base = workspace.load()
    model = get_peft_model(base, config)
    model.peft_config["default"].base_model_name_or_path = str(workspace.checkpoint)
    model.peft_config["default"].auto_mapping = {
        "base_model_class": type(base).__name__,
        "parent_library": "transformers",
    }
    model.save_pretrained(tmp_path / "adapter")
    asked = tiny.device_map(base, "both", main=workspace.main, offloaded="disk")
    recwarn.clear()
    model = AutoPeftModel.from_pretrained(
        tmp_path / "adapter", device_map=asked, offload_folder=str(tmp_path / "offload")
    )
    assert model.hf_device_map == asked
    assert not [item for item in recwarn if item.category is gemma4_compat.Gemma4CompatWarning]


def test_either_name_of_the_offload_folder_or_both_is_fine(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    for arguments in ({}, {"offload_dir": tmp_path}, {"offload_folder": tmp_path}):
        model = PeftModel.from_pretrained(workspace.split(), workspace.adapter("language"), **arguments)
        assert len(model.hf_device_map) > 1
    both = {"offload_dir": str(tmp_path), "offload_folder": str(tmp_path)}
    assert len(PeftModel.from_pretrained(workspace.split(), workspace.adapter("language"), **both).hf_device_map) > 1


def test_a_load_that_fails_gives_the_map_back(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    base = workspace.split()
    before = placement(base)
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        PeftModel.from_pretrained(base, tmp_path)
    assert placement(base) == before


def test_a_base_loaded_from_disk_by_transformers(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path
) -> None:
    from peft import PeftModel

    asked = tiny.device_map(workspace.load(), "both", main=workspace.main, offloaded="disk")
    base = tiny.load(workspace.checkpoint, device_map=asked, offload_folder=tmp_path)
    before = placement(base)
    model = PeftModel.from_pretrained(base, workspace.adapter("all"))
    assert placement(model) == before
    assert difference(one_device(None, "all"), workspace.outputs(model)) == 0.0


def test_modules_to_save_on_an_offloaded_module_are_trained_from_the_real_values(workspace: Any) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    name = "layers.0.mlp.up_proj"  # offloaded by the split
    steps = []
    for base in (workspace.load(), workspace.split()):
        torch.manual_seed(3)
        config = LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["language"], modules_to_save=[name])
        model = get_peft_model(base, config).train()
        batch = tiny.inputs(workspace.main)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for _ in range(2):
            loss = model(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        copied = next(value for key, value in model.named_parameters() if "modules_to_save.default.weight" in key)
        assert copied.device.type != "meta"
        steps.append((losses, copied.detach().cpu()))
    (whole_losses, whole), (split_losses, split) = steps
    assert whole_losses == split_losses
    assert whole_losses[0] != whole_losses[1]
    assert torch.equal(whole, split)


def test_a_model_that_is_not_dispatched_is_left_to_upstream(workspace: Any, one_device: Callable[..., Any]) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.load(), workspace.adapter("all"))
    assert difference(one_device(None, "all"), workspace.outputs(model)) == 0.0


ADAPTERS_THAT_READ_THE_BASE_WEIGHT: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "DoRA with rsLoRA": {"use_dora": True, "use_rslora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
}


def created_and_trained(base: Any, config: Any, workspace: Any) -> tuple[list[float], Any, Any]:
    """Losses of two training steps, then the answers, then the state of the adapter."""
    import torch
    from peft import get_peft_model, get_peft_model_state_dict

    torch.manual_seed(3)
    model = get_peft_model(base, config)
    batch = tiny.inputs(workspace.main)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(2):
        loss = model.train()(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    outputs = workspace.outputs(model.eval())
    return losses, outputs, {name: value.cpu() for name, value in get_peft_model_state_dict(model).items()}


def assert_same_everywhere(workspace: Any, config: Any, quantization: str | None = None) -> None:
    import copy

    import torch

    bases = workspace.load(quantization), workspace.split(quantization)
    before = placement(bases[1])
    whole, split = (created_and_trained(base, copy.deepcopy(config), workspace) for base in bases)
    assert whole[0] == split[0]
    assert whole[0][0] != whole[0][1], "nothing was learnt: the test shows nothing"
    assert difference(whole[1], split[1]) == 0.0
    assert whole[2].keys() == split[2].keys()
    assert not [name for name, value in whole[2].items() if not torch.equal(value, split[2][name])]
    assert placement(bases[1])[0] == before[0]


def test_an_adapter_folder_without_weights_is_named_and_nothing_is_touched(workspace: Any, tmp_path: Path) -> None:
    import shutil

    from peft import PeftModel

    shutil.copy(workspace.adapter("all") / "adapter_config.json", tmp_path)
    base = workspace.split()
    before, modules = placement(base), [type(module) for module in base.modules()]
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"no weights \(adapter_model\.safetensors or"):
        PeftModel.from_pretrained(base, tmp_path)
    assert placement(base) == before
    assert [type(module) for module in base.modules()] == modules
    model = PeftModel.from_pretrained(base, workspace.adapter("language"))
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=re.escape(str(tmp_path))):
        model.load_adapter(str(tmp_path), "second")
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize("name", ADAPTERS_THAT_READ_THE_BASE_WEIGHT)
def test_lora_that_reads_or_changes_the_base_weight(workspace: Any, name: str) -> None:
    from peft import LoraConfig

    options = ADAPTERS_THAT_READ_THE_BASE_WEIGHT[name]
    assert_same_everywhere(workspace, LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["all"], **options))


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double"])
def test_dora_on_quantized_layers(workspace: Any, quantization: str) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["language"], use_dora=True)
    assert_same_everywhere(workspace, config, quantization)


def test_target_parameters(workspace: Any) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=2, target_modules=[], target_parameters=["mlp.up_proj.weight", "mlp.down_proj.weight"])
    assert_same_everywhere(workspace, config)


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "HRAConfig", "C3AConfig", "LNTuningConfig"])
def test_other_tuners(workspace: Any, kind: str) -> None:
    import peft

    options: dict[str, Any] = {"target_modules": tiny_adapters.TARGETS["language"]}
    if kind == "IA3Config":
        options["feedforward_modules"] = r".*\.down_proj"
    elif kind == "LNTuningConfig":
        options = {"target_modules": ["input_layernorm"]}
    elif kind == "C3AConfig":
        options["block_size"] = 32
    else:
        options["r"] = 2
    assert_same_everywhere(workspace, getattr(peft, kind)(**options))


def test_a_saved_dora_adapter_loads_and_answers_as_on_one_device(workspace: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    get_peft_model(
        workspace.load(),
        LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["all"], use_dora=True, init_lora_weights=False),
    ).save_pretrained(tmp_path)
    reference = workspace.outputs(PeftModel.from_pretrained(workspace.load(), tmp_path))
    model = PeftModel.from_pretrained(workspace.split(), tmp_path)
    assert difference(reference, workspace.outputs(model)) == 0.0


def test_a_bias_that_is_offloaded_cannot_be_trained_and_says_so(workspace: Any) -> None:
    from peft import LoraConfig, get_peft_model

    base = workspace.split()
    before = placement(base)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"audio_tower.*is offloaded.*bias='none'"):
        get_peft_model(base, LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["all"], bias="all"))
    assert placement(base) == before


def test_a_merge_into_an_offloaded_base_is_the_merge_of_one_device(workspace: Any) -> None:
    from peft import PeftModel

    merged = [
        workspace.outputs(PeftModel.from_pretrained(base, workspace.adapter("all")).merge_and_unload())
        for base in (workspace.load(), workspace.split())
    ]
    assert difference(*merged) == 0.0
