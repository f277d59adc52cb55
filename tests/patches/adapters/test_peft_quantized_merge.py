"""F7: what a merge into quantized weights loses is measured and said."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._gemma4.quantization.plain_layers import is_quantized
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters.peft_quantized_merge import PATCH
from tests.patches.promise import Promise

TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj"]


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"\d+ warnings about rounding errors, none says what is lost"
    exact = False


def loaded(workspace: Any, quantization: str, adapter: str = "language") -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(workspace.load(quantization), workspace.adapter(adapter))


def said(act: Any) -> tuple[Any, list[str]]:
    """What ``act`` returns, and what the shim and PEFT's layers warned of meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = act()
    return result, [
        str(warning.message)
        for warning in caught
        if warning.category is gemma4_compat.Gemma4CompatWarning or "different generations" in str(warning.message)
    ]


def upstream(act: Any) -> Any:
    gemma4_compat.revert(PATCH.id)
    try:
        return act()
    finally:
        gemma4_compat.install()


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double", "8bit"])
def test_the_merged_model_is_upstreams_bit_for_bit_and_one_warning_measures_it(
    workspace: Any, quantization: str
) -> None:
    import torch

    reference = upstream(lambda: loaded(workspace, quantization).merge_and_unload())
    model = loaded(workspace, quantization)
    before, wanted = {}, {}
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            name = name.removeprefix("base_model.model.")
            before[name] = dequantized(layer.get_base_layer())
            wanted[name] = before[name] + layer.get_delta_weight("default").float()
    merged, texts = said(model.merge_and_unload)
    assert difference(workspace.outputs(reference), workspace.outputs(merged)) == 0.0
    for name in wanted:
        assert torch.equal(dequantized(reference.get_submodule(name)), dequantized(merged.get_submodule(name)))
    (text,) = texts
    lost = sum((dequantized(merged.get_submodule(name)) - wanted[name]).square().sum() for name in wanted)
    change = sum((wanted[name] - before[name]).square().sum() for name in wanted)
    assert f"is {100 * (lost / change).sqrt().item():.0f} % of the adapter's whole change" in text
    assert f"into {len(wanted)} quantized layers" in text
    assert "gemma4-compat merge" in text


def dequantized(module: Any) -> Any:
    from peft.utils.integrations import dequantize_bnb_weight

    state = getattr(module, "state", None) or getattr(module.weight, "quant_state", None)
    return dequantize_bnb_weight(module.weight, state=state).float()


def test_merge_adapter_warns_once_for_each_call_and_layers_keep_no_trace(workspace: Any) -> None:
    model = loaded(workspace, "4bit")
    _, texts = said(model.merge_adapter)
    assert len(texts) == 1
    assert re.search(r"is \d+ % of the adapter's whole change \(\d+ % in 'model\.language_model", texts[0])
    assert not [name for name, module in model.named_modules() if "merge" in vars(module)]
    upstream_texts = said(model.unmerge_adapter)[1]
    assert all("Unmerge" in text for text in upstream_texts)
    assert len(said(model.merge_adapter)[1]) == 1


def test_nothing_is_said_where_nothing_is_merged_or_lost(workspace: Any) -> None:
    from peft import PeftModel

    assert said(lambda: loaded(workspace, "4bit").unload())[1] == []
    plain = PeftModel.from_pretrained(workspace.load(), workspace.adapter("language"))
    assert said(plain.merge_and_unload)[1] == []
    dequantized_first = loaded(workspace, "4bit")
    dequantized_first.dequantize()
    assert said(dequantized_first.merge_and_unload)[1] == []


@pytest.mark.parametrize("tuner", ["dora", "vera", "randlora", "road", "oft", "hira"])
def test_other_tuners_are_measured_by_their_own_merge_or_refused(workspace: Any, tuner: str) -> None:
    """The share lost is between nothing and a few times the whole, also where the change is not ``B @ A``."""
    import peft
    import torch

    model = peft.get_peft_model(workspace.load("4bit"), config(tuner))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    weights = {name: dequantized(module) for name, module in model.named_modules() if is_quantized(module)}
    # They take the new weight for quantized already, or give it another shape.
    cannot = {"randlora": ">=0.18", "vera": "<0.20", "oft": "<0.21"}.get(tuner)
    if cannot is not None and versions.admits(cannot, peft.__version__):
        with pytest.raises(gemma4_compat.Gemma4CompatError, match=rf"cannot merge {tuner} .*Nothing was changed"):
            model.merge_and_unload()
        assert all(torch.equal(dequantized(model.get_submodule(name)), old) for name, old in weights.items())
        return
    (text,) = said(model.merge_and_unload)[1]
    assert 1 < float(re.search(r"is (\d+) % of the adapter's whole change", text)[1]) < 300  # type: ignore[index]


def config(tuner: str) -> Any:
    import peft

    if tuner == "hira" and not hasattr(peft, "HiraConfig"):
        pytest.skip("this release of PEFT has no hira")
    made = {
        "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=TARGETS),
        "vera": lambda: peft.VeraConfig(r=4, target_modules=TARGETS),
        "randlora": lambda: peft.RandLoraConfig(r=8, target_modules=TARGETS),
        "road": lambda: peft.RoadConfig(group_size=32, target_modules=TARGETS),
        "oft": lambda: peft.OFTConfig(r=0, oft_block_size=32, target_modules=TARGETS),
        "hira": lambda: peft.HiraConfig(r=4, target_modules=TARGETS),
    }
    return made[tuner]()


@pytest.mark.parametrize("tuner", ["adalora", "c3a"])
def test_a_tuner_that_cannot_merge_is_one_error_and_nothing_is_changed(workspace: Any, tuner: str) -> None:
    import peft

    configs = {
        "adalora": peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=TARGETS),
        "c3a": peft.C3AConfig(block_size=32, target_modules=TARGETS),
    }
    model = peft.get_peft_model(workspace.load("4bit"), configs[tuner]).eval()
    before = workspace.outputs(model)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=rf"cannot merge {tuner} adapters .*Nothing was changed"):
        model.merge_and_unload()
    assert difference(before, workspace.outputs(model)) == 0.0


def test_other_models_keep_upstreams_warnings() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    tiny = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=32
    )
    model = LlamaForCausalLM(tiny)
    weights = {name: value.clone() for name, value in model.named_parameters()}
    settings = BitsAndBytesConfig(load_in_4bit=True)
    model = replace_with_bnb_linear(model, ["lm_head"], settings)
    import bitsandbytes as bnb

    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.weight = bnb.nn.Params4bit(weights[f"{name}.weight"], requires_grad=False).to("cpu")
    vars(model)["is_loaded_in_4bit"] = True
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    _, texts = said(adapted.merge_and_unload)
    assert len(texts) == 2
