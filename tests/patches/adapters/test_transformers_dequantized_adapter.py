"""F6: what an adapter can do after the model below it was dequantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.quantization.plain_layers import is_quantized, plain_class
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters.transformers_dequantized_adapter import PATCH
from tests.patches.promise import Promise

#: Text layers of each kind, and linears of a tower. Output widths suit every tuner.
TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj"]


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"has no attribute '(quant_state|state)'"


def configs() -> dict[str, Any]:
    """One config for each tuner that has, in some release, a layer of its own for bitsandbytes."""
    import peft

    found: dict[str, Any] = {
        "dora": peft.LoraConfig(r=4, use_dora=True, target_modules=TARGETS),
        "dropout": peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=TARGETS),
        "ia3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
        "adalora": peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=TARGETS),
        "vera": peft.VeraConfig(r=4, target_modules=TARGETS),
        "randlora": peft.RandLoraConfig(r=8, target_modules=TARGETS),
        "road": peft.RoadConfig(group_size=32, target_modules=TARGETS),
        "oft": peft.OFTConfig(r=0, oft_block_size=32, target_modules=TARGETS),
    }
    for name in ("hira", "pvera"):
        if kind := getattr(peft, f"{name.capitalize()}Config", None):
            found[name] = kind(r=4, target_modules=TARGETS)
    return found


def moved(model: Any) -> Any:
    """``model`` with every adapter weight away from where it starts."""
    import torch

    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.add_(0.05 * noise)
    return model.eval()


def pair(workspace: Any, quantization: str, adapter: Path | str) -> tuple[Any, Any]:
    """An adapter on a model that was dequantized before, and on one that is afterwards."""
    from peft import PeftModel

    base = workspace.load(quantization)
    base.dequantize()
    before = PeftModel.from_pretrained(base, adapter)
    after = PeftModel.from_pretrained(workspace.load(quantization), adapter)
    after.dequantize()
    return before, after


TUNERS = ["dora", "dropout", "ia3", "adalora", "vera", "randlora", "road", "oft", "hira", "pvera"]


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
@pytest.mark.parametrize("tuner", TUNERS)
def test_the_layers_become_those_of_an_adapter_loaded_after_dequantizing(
    workspace: Any, tmp_path: Path, tuner: str, quantization: str
) -> None:
    import torch
    from peft import get_peft_model

    if tuner not in configs():
        pytest.skip(f"this release of PEFT has no {tuner}")
    moved(get_peft_model(workspace.load(), configs()[tuner])).save_pretrained(tmp_path)
    before, after = pair(workspace, quantization, tmp_path)
    with torch.no_grad():
        batch = _inputs(workspace)
        loaded = after(**batch).logits
        assert torch.equal(before(**batch).logits, loaded)
    wanted = dict(before.named_modules())
    for name, module in after.named_modules():
        assert type(module) is type(wanted[name]), name
        assert vars(module).keys() >= vars(wanted[name]).keys(), name
    assert not [name for name, module in after.named_modules() if plain_class(module) is not None]
    merged = [model.merge_and_unload() for model in (before, after)]
    with torch.no_grad():
        logits = [model(**batch).logits for model in merged]
    assert torch.equal(*logits)


def _inputs(workspace: Any) -> dict[str, Any]:
    from gemma4_compat._lab import tiny

    return tiny.inputs(workspace.main)


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double", "8bit"])
def test_a_merge_is_the_loaded_adapter_but_for_one_rounding_of_each_weight(workspace: Any, quantization: str) -> None:
    import torch
    from peft import PeftModel

    _, model = pair(workspace, quantization, workspace.adapter("language"))
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    wanted = {
        name: layer.get_base_layer().weight.float() + layer.get_delta_weight("default").float()
        for name, layer in layers.items()
    }
    merged = model.merge_and_unload()
    for name, weight in wanted.items():
        found = merged.get_submodule(name.removeprefix("base_model.model.")).weight
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, weight.to(torch.bfloat16))
    # The tiny model makes more of that rounding than a trained one. In float32 the two are the same model.
    base = workspace.load(quantization)
    base.dequantize()
    precise = PeftModel.from_pretrained(base.float(), workspace.adapter("language"))
    before = workspace.outputs(precise).logits[0]
    effect = (before - workspace.outputs(precise.unload()).logits[0]).abs().max()
    after = PeftModel.from_pretrained(base, workspace.adapter("language")).merge_and_unload()
    assert (workspace.outputs(after).logits[0] - before).abs().max() < 1e-3 < 1e-3 * effect


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_whatever_one_does_with_adapters_gives_the_same_as_after_loading_them_later(
    workspace: Any, quantization: str
) -> None:
    before, after = pair(workspace, quantization, workspace.adapter("language"))

    def both(act: Any) -> None:
        results = []
        for model in (before, after):
            act(model)
            results.append(workspace.outputs(model))
        assert difference(*results) == 0.0

    both(lambda model: model.load_adapter(str(workspace.adapter("all")), adapter_name="second"))
    both(lambda model: model.set_adapter("second"))
    both(lambda model: model.base_model.set_adapter(["default", "second"]))
    both(lambda model: model.add_weighted_adapter(["default"], [0.5], "weighted", combination_type="linear"))
    both(lambda model: model.set_adapter("weighted"))
    both(lambda model: model.merge_adapter())
    both(lambda model: model.unmerge_adapter())
    both(lambda model: model.delete_adapter("weighted"))
    both(lambda model: model.set_adapter("default"))
    both(lambda model: model.merge_adapter(["default", "second"], safe_merge=True))
    results = []
    for model in (before, after):
        with model.disable_adapter():
            results.append(workspace.outputs(model))
    assert difference(*results) == 0.0
    before, after = before.unload(), after.unload()
    assert difference(workspace.outputs(before), workspace.outputs(after)) == 0.0


def test_adapter_weights_stay_the_same_objects_and_only_they_learn(workspace: Any) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(workspace.load("4bit"), LoraConfig(r=4, target_modules=TARGETS, use_dora=True))
    trainable = {name: id(value) for name, value in model.named_parameters() if value.requires_grad}
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.1)
    model.dequantize()
    assert {name: id(value) for name, value in model.named_parameters() if value.requires_grad} == trainable
    assert not any(is_quantized(module) for module in model.modules())
    assert not getattr(model, "is_loaded_in_4bit", False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = _inputs(workspace)
    for _ in range(2):  # lora_A has no gradient while lora_B is zero
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == trainable.keys()


def test_a_merged_model_can_be_saved_and_loaded(workspace: Any, tmp_path: Path) -> None:
    from transformers import Gemma4ForConditionalGeneration

    _, model = pair(workspace, "4bit", workspace.adapter("language"))
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = Gemma4ForConditionalGeneration.from_pretrained(tmp_path, device_map={"": workspace.main})
    assert not getattr(again, "is_quantized", False)
    assert difference(workspace.outputs(merged), workspace.outputs(again.eval())) == 0.0


def test_a_hook_around_an_adapter_layer_runs_the_new_forward(workspace: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.load("4bit"), workspace.adapter("language"))
    layer = next(module for module in model.modules() if plain_class(module) is not None)
    add_hook_to_module(layer, ModelHook())
    model.dequantize()
    assert vars(layer)["_old_forward"].__func__ is type(layer).forward
    reference, _ = pair(workspace, "4bit", workspace.adapter("language"))
    assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0


def test_unquantized_offloaded_modules_do_not_matter(workspace: Any) -> None:
    """Towers in bf16 on the CPU or disk, the rest 4-bit: what a device map of transformers gives."""
    from peft import PeftModel

    from gemma4_compat._lab import tiny

    def load() -> Any:
        return tiny.load(
            workspace.checkpoint,
            "4bit",
            device=workspace.main,
            skip_modules=["model.vision_tower", "model.audio_tower"],
        )

    whole = PeftModel.from_pretrained(load(), workspace.adapter("all"))
    split = PeftModel.from_pretrained(workspace.dispatch(load(), "towers"), workspace.adapter("all"))
    for model in (whole, split):
        model.dequantize()
    assert difference(workspace.outputs(whole), workspace.outputs(split)) == 0.0
    for model in (whole, split):
        model.merge_adapter()
    assert difference(workspace.outputs(whole), workspace.outputs(split)) == 0.0


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_offloaded_quantized_layers_are_one_error_and_the_model_stays_as_it_was(
    workspace: Any, quantization: str
) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.split(quantization, "layers"), workspace.adapter("language"))
    before = workspace.outputs(model)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"quantized layers are offloaded, '.*layers\.0\."):
        model.dequantize()
    assert difference(before, workspace.outputs(model)) == 0.0
    assert model.is_quantized


def test_an_adapter_of_transformers_own(workspace: Any) -> None:
    model, reference = workspace.load("4bit"), workspace.load("4bit")
    reference.dequantize()
    try:
        model.load_adapter(str(workspace.adapter("language")))
        reference.load_adapter(str(workspace.adapter("language")))
    except (ImportError, ValueError) as error:
        pytest.skip(f"load_adapter does not run here: {error}")
    model.dequantize()
    assert not [module for module in model.modules() if plain_class(module) is not None]
    adapter = {name: value for name, value in model.named_parameters() if "lora_" in name}
    for name, value in reference.named_parameters():
        if name in adapter:  # some releases load them in bf16 here, and in float32 onto a quantized model
            value.data = adapter[name].data
    assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0


def test_a_model_without_adapters_is_dequantized_as_before(workspace: Any) -> None:
    model = workspace.load("4bit")
    names = [name for name, module in model.named_modules() if is_quantized(module)]
    model.dequantize()
    assert all(model.get_submodule(name).weight.requires_grad for name in names)
