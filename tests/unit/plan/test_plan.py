"""What a plan says against real models: bytes, names, and its own code run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Gemma4CompatError, cli
from gemma4_compat._gemma4.models import build
from gemma4_compat._gemma4.quantization.bytes import linear_tensors
from gemma4_compat._gemma4.quantization.config import default_skip_modules
from gemma4_compat._lab import tiny, tiny_configs
from gemma4_compat._lab.workspace import difference
from gemma4_compat._memory import layout
from gemma4_compat._memory.blueprint import describe
from gemma4_compat._memory.formulas import Load
from tests.unit.memory.models import HAS_UNIFIED, QUANTIZATIONS, VARIANTS, held, on_meta, planned, run, stored, whole

# ------------------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", [(32, 64), (96, 64), (64, 6144), (1536, 256), (130, 192)])
def test_4_bit_weights_take_what_bitsandbytes_says(shape: tuple[int, int], double: bool) -> None:
    import torch
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(torch.randn(shape), quant_type="nf4", compress_statistics=double)
    tensors = [packed, state.absmax, state.code]
    tensors += [state.state2.absmax, state.state2.code, state.offset] if double else []
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    assert linear_tensors(*shape, "4bit-double" if double else "4bit") == sizes


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_loaded_model_has_the_planned_bytes(workspace: Any, quantization: str | None) -> None:
    model, *_ = build.on_meta(str(workspace.checkpoint))
    blueprint = planned(model, quantization)
    loaded = whole(workspace, quantization)
    assert stored(blueprint) == held(loaded)
    seen = describe(loaded)
    assert seen.quantization == quantization
    assert [block.stored for block in seen.blocks] == [block.stored for block in blueprint.blocks]


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_unquantized_variant_has_the_bytes_of_its_tensors(variant: str) -> None:
    model = on_meta(variant)
    blueprint = planned(model, None)
    assert stored(blueprint) == held(model)
    assert all(block.plain == block.stored for block in blueprint.blocks)


@pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_replaces_is_what_is_planned(variant: str, quantization: str) -> None:
    import torch
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    model = build.on_meta(variant)[0]
    expected = planned(model, quantization)
    skip = default_skip_modules(model)
    torch.set_default_dtype(torch.bfloat16)  # as while transformers builds a model: new biases have it
    try:
        replace_with_bnb_linear(model, skip, tiny.quantization_config(quantization))
    finally:
        torch.set_default_dtype(torch.float32)
    seen = describe(model)
    assert [block.stored for block in seen.blocks] == [block.stored for block in expected.blocks]
    assert seen.quantization == quantization
    kinds = ("Linear4bit", "Linear8bitLt")
    total = sum(
        sum(linear_tensors(module.out_features, module.in_features, quantization))
        for module in model.modules()
        if type(module).__name__ in kinds
    )
    others = {
        id(tensor): tensor.numel() * tensor.element_size()
        for module in model.modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if type(module).__name__ not in kinds or name not in ("weight", "SCB")
    }
    assert stored(expected) == total + sum(others.values())


@pytest.mark.parametrize(
    "variant, billions", [("E2B", 5.10), ("E4B", 7.94), ("12B", 11.96), ("26B-A4B", 25.81), ("31B", 31.27)]
)
def test_variants_have_the_parameters_of_the_released_models(variant: str, billions: float) -> None:
    if variant not in VARIANTS:
        pytest.skip("this transformers has no gemma4_unified")
    count = sum(parameter.numel() for parameter in on_meta(variant).parameters())
    # Before 5.6 the layers that share keys and values still had projections of their own.
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_map_names_every_tensor_of_the_real_class_once(variant: str) -> None:
    from accelerate.utils import check_device_map

    model = on_meta(variant)
    least = layout.smallest_budget(planned(model, "4bit"), Load(context=1024))
    plan = gemma4_compat.plan_device_map(variant, least, context=1024, quantize_experts=False)
    check_device_map(model, plan.device_map)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    for name in names:
        owners = [key for key in plan.device_map if name == key or name.startswith(f"{key}.")]
        assert len(owners) == 1, name


@pytest.mark.parametrize("variant, gib", [("E2B", 1.2), ("E4B", 1.6)])
def test_the_small_models_go_down_to_what_was_sketched(variant: str, gib: float) -> None:
    plan = gemma4_compat.plan_device_map(variant, f"{gib}GiB", context=512)
    assert len(plan.streamed) > 0
    assert plan.use[0].peak <= gib * (1 << 30)


def test_other_classes_have_their_own_names(workspace: Any) -> None:
    import torch
    from transformers import Gemma4ForCausalLM

    with torch.device("meta"):
        model = Gemma4ForCausalLM(tiny_configs.config().text_config)
    plan = gemma4_compat.plan_device_map(model, "1GiB")
    assert {"lm_head", "model.embed_tokens", "model.layers.0", "model.norm"} <= plan.device_map.keys()
    assert plan.model_class == "Gemma4ForCausalLM"


@pytest.mark.skipif(not HAS_UNIFIED, reason="this transformers has no gemma4_unified")
def test_the_12b_has_no_towers_and_no_table() -> None:
    plan = gemma4_compat.plan_device_map("12B", "4GiB", context=1024)
    assert plan.model_class == "Gemma4UnifiedForConditionalGeneration"
    assert plan.device_map["model.embed_vision"] == plan.device_map["model.embed_audio"] == "cpu"
    assert not any("tower" in key or "per_layer" in key for key in plan.device_map)


# -------------------------------------------------------------------------------------------------------- its own code


@pytest.mark.parametrize("tower", [False, True], ids=["towers stay", "towers leave"])
def test_the_code_loads_the_model_and_it_answers_as_on_one_device(
    workspace: Any, one_device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tower: bool
) -> None:
    """A CPU host: the main device is the cpu, and what leaves goes to the disk."""
    monkeypatch.chdir(tmp_path)
    built = build.on_meta(str(workspace.checkpoint))[0]
    blueprint = describe(built)
    budget = layout.smallest_budget(blueprint, Load(context=64)) if tower else 1 << 40
    plan = gemma4_compat.plan_device_map(str(workspace.checkpoint), {"cpu": budget}, context=64, quantize=None, cpu=0)
    assert ("disk" in plan.device_map.values()) is tower
    names = run(plan)
    if tower:
        assert names["model"].hf_device_map == plan.device_map
    assert not names["model"].training
    assert_same(workspace.outputs(names["model"]), one_device(None, None))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_code_loads_each_quantization_and_the_adapter(
    workspace: Any, quantization: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter = workspace.adapter("language")
    plan = gemma4_compat.plan_device_map(
        str(workspace.checkpoint), {"cpu": 1 << 40}, context=64, quantize=quantization, adapter=adapter
    )
    model = run(plan)["model"]
    assert type(model).__name__.startswith("Peft")
    from peft import PeftModel

    reference = PeftModel.from_pretrained(whole(workspace, quantization), adapter)
    assert_same(workspace.outputs(model), workspace.outputs(reference))


@pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])
def test_the_code_loads_offloaded_layers_quantized(
    workspace: Any, quantization: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    names = build.on_meta(str(workspace.checkpoint))[0]
    budget = layout.smallest_budget(planned(names, quantization), Load(context=64))
    plan = gemma4_compat.plan_device_map(
        str(workspace.checkpoint), {"cpu": budget}, context=64, quantize=quantization, cpu=0
    )
    assert plan.streamed
    assert plan.quantize_offloaded
    assert_same(workspace.outputs(run(plan)["model"]), workspace.outputs(whole(workspace, quantization)))


def test_code_for_offloaded_4_bit_layers_says_so(workspace: Any) -> None:
    plan = gemma4_compat.plan_device_map("E2B", "2GiB", context=1024)
    assert plan.quantize_offloaded
    assert "with gemma4_compat.quantize(offloaded=True):" in plan.code
    assert "llm_int8_enable_fp32_cpu_offload" not in plan.code, "not needed, and saved with the model"
    compile(plan.code, "plan", "exec")
    whole = gemma4_compat.plan_device_map("E2B", "80GiB", context=1024)
    assert "offloaded=True" not in whole.code
    assert "cpu_offload" not in whole.code


def assert_same(outputs: Any, expected: Any) -> None:
    assert difference(expected, outputs) == 0


# ------------------------------------------------------------------------------------------------ models, bad and good


def test_a_checkpoint_that_is_quantized_already_stays_as_it_is(workspace: Any, tmp_path: Path) -> None:
    config = json.loads((Path(workspace.checkpoint) / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert gemma4_compat.plan_device_map(str(tmp_path), "1GiB", quantize="8bit").quantization == "4bit-double"
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Gemma4CompatError, match="quantized with 'gptq'"):
        gemma4_compat.plan_device_map(str(tmp_path), "1GiB")


@pytest.mark.parametrize(
    "model, message",
    [
        ("E3B", r"'E3B' is not a folder, not a variant \(E2B, .* hf download E3B"),
        ("nobody/nothing", "not a model in the cache of the hub"),
        ("./models/gemma-4-E2B-it", r"the folder './models/gemma-4-E2B-it' does not exist; .* or a variant \(E2B\)"),
        ("/models/E4B", r"the folder '/models/E4B' does not exist; .* \(E4B\)"),
        ("~/models/other", r"the folder '~/models/other' does not exist; .* \(E2B, E4B, "),
        ("runs/1/gemma-4-E2B-it", "does not exist"),
        ("google/gemma-4-E2B-it/", "does not exist"),
    ],
)
def test_an_unknown_model_is_refused_with_the_remedy(model: str, message: str) -> None:
    with pytest.raises(Gemma4CompatError, match=message):
        gemma4_compat.plan_device_map(model, "8GiB")


def test_a_folder_without_a_configuration_and_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Gemma4CompatError, match=r"no config\.json"):
        gemma4_compat.plan_device_map(str(tmp_path), "8GiB")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(Gemma4CompatError, match="is a llama model"):
        gemma4_compat.plan_device_map(str(tmp_path), "8GiB")


def test_an_id_that_is_not_cached_is_planned_as_its_variant() -> None:
    plan = gemma4_compat.plan_device_map("google/gemma-4-E2B-it", "80GiB")
    assert plan.assumed.startswith("google/gemma-4-E2B-it is neither a folder nor in the cache: shapes as in")
    assert '"google/gemma-4-E2B-it"' in plan.code


@pytest.mark.skipif(HAS_UNIFIED, reason="this transformers has gemma4_unified")
def test_the_12b_is_refused_where_transformers_has_it_not() -> None:
    with pytest.raises(Gemma4CompatError, match=r"install 5\.10 or newer"):
        gemma4_compat.plan_device_map("12B", "8GiB")


# ---------------------------------------------------------------------------------------------------- the command line


def says(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, ["plan", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_the_command_prints_the_report() -> None:
    text = says("E2B", "--vram", "1.4GiB", "--context", "1024").stdout
    for part in ("gpu 0  [", "of 1.40 GiB", "Expected peaks:", "Longest context", "Assumed: ", "layers are streamed"):
        assert part in text
    assert text.count("import gemma4_compat") == 1


def test_the_command_as_json() -> None:
    data = json.loads(says("E2B", "--vram", "2GiB", "--context", "1024", "--json").stdout)
    plan = gemma4_compat.plan_device_map("E2B", "2GiB", context=1024)
    assert data == {"schema": 1, "gemma4_compat": gemma4_compat.__version__, **json.loads(json.dumps(plan.as_data()))}
    assert all(isinstance(value, int) for value in data["use"]["0"].values())
    assert data["device_map"] == plan.device_map


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["E2B", "--vram", "8 apples"], "'8 apples' is not a size"),
        (["E2B", "--vram", "100MB"], "does not fit into 95 MiB"),
        (["E2B", "--vram", "8GiB", "--quantize", "3bit"], "quantization '3bit' is unknown"),
        (["E2B", "--vram", "8GiB", "--context", "0"], "context is 0"),
        (["nowhere", "--vram", "8GiB"], "'nowhere' is not a folder"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    result = says(*arguments, code=2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_two_accelerators() -> None:
    data = json.loads(says("E4B", "--vram", "4GiB", "--vram", "8GiB", "--context", "1024", "--json").stdout)
    assert {0, 1} <= set(data["device_map"].values())
    assert data["paged"] == []
