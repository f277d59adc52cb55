"""Plans for a mixture of experts against real models: bytes, temporaries, code, and the page with the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._engine.io.text import size_text
from gemma4_compat._gemma4.models import build
from gemma4_compat._gemma4.quantization import expert_storage
from gemma4_compat._gemma4.quantization.bytes import expert_tensors
from gemma4_compat._gemma4.quantization.config import default_skip_modules, linear_names
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import difference
from gemma4_compat._memory import formulas, layout
from gemma4_compat._memory.blueprint import Blueprint, describe
from gemma4_compat._memory.formulas import Load
from gemma4_compat._plan.text import plan_text
from tests.unit.memory.models import held, run, stored
from tools.pages import experts as experts_page

FOUR_BIT = ["4bit", "4bit-double"]


@pytest.fixture(scope="module")
def checkpoint(workspace: Any) -> str:
    return str(workspace.cached(tiny_models.build_moe_checkpoint))


def described(model: Any, quantization: str, *, experts: bool = True) -> Blueprint:
    return describe(model, quantization, linear_names(model, default_skip_modules(model)), experts=experts)


def loaded(workspace: Any, checkpoint: str, quantization: str) -> Any:
    with gemma4_compat.quantize(experts=True):
        return tiny.load(Path(checkpoint), quantization, device=workspace.main, towers=True)


@pytest.mark.parametrize("quantization", FOUR_BIT)
def test_a_loaded_model_has_the_planned_bytes(workspace: Any, checkpoint: str, quantization: str) -> None:
    blueprint = described(build.on_meta(checkpoint)[0], quantization)
    model = loaded(workspace, checkpoint, quantization)
    assert stored(blueprint) == held(model)
    seen = describe(model)
    assert seen.quantization == quantization
    assert [block.stored for block in seen.blocks] == [block.stored for block in blueprint.blocks]
    assert [block.experts for block in seen.blocks] == [block.experts for block in blueprint.blocks]
    assert {layer.experts for layer in seen.layers} == {32 * 3 * 64 * 64 * 2}
    plain = described(build.on_meta(checkpoint)[0], quantization, experts=False)
    assert {layer.experts for layer in plain.layers} == {0}
    assert stored(plain) > 2 * stored(blueprint)


@pytest.mark.parametrize("quantization", FOUR_BIT)
@pytest.mark.parametrize("shape", [(4, 64, 64), (3, 96, 192), (2, 16, 64)])
def test_experts_take_what_is_made_of_them(shape: tuple[int, int, int], quantization: str) -> None:
    import torch

    values = torch.randn(shape, dtype=torch.bfloat16)
    like = expert_storage._empty(values, tiny.quantization_config(quantization))
    module = torch.nn.Module()
    module.weight = expert_storage.quantized(values, like)
    assert sum(expert_tensors(*shape, quantization)) == held(module)


def test_a_prompt_dequantizes_all_experts_of_a_layer_and_a_token_those_it_hits() -> None:
    model = build.on_meta("26B-A4B")[0]
    before, after = described(model, "4bit", experts=False), described(model, "4bit")
    layers = [blueprint.layers[:1] for blueprint in (before, after)]
    whole = 128 * 3 * 2816 * 704 * 2
    assert after.layers[0].experts == whole
    load = Load(context=64)
    prefill, decode = (
        [
            formulas.activations(blueprint, layer, load, prefill=phase, head=False)
            for blueprint, layer in zip((before, after), layers)
        ]
        for phase in (True, False)
    )
    assert prefill[1] - prefill[0] == pytest.approx(whole, rel=0.02)
    assert decode[1] - decode[0] == pytest.approx(whole * 8 / 128 * 5 / 4, rel=0.02)
    assert after.layers[0].loading == whole // 3 * 2


@pytest.mark.parametrize("quantization", FOUR_BIT)
@pytest.mark.parametrize("split", [False, True])
def test_the_code_loads_what_was_planned(
    workspace: Any, checkpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantization: str, split: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    blueprint = described(build.on_meta(checkpoint)[0], quantization)
    budget = layout.smallest_budget(blueprint, Load(context=64)) if split else 1 << 40
    plan = gemma4_compat.plan_device_map(
        checkpoint, {"cpu": budget}, context=64, quantize=quantization, quantize_experts=True, cpu=0
    )
    assert plan.experts == quantization
    assert f"with gemma4_compat.quantize({'offloaded=True, ' * split}experts=True):" in plan.code
    model = run(plan)["model"]
    expected = workspace.outputs(loaded(workspace, checkpoint, quantization), text_only=True)
    assert difference(expected, workspace.outputs(model, text_only=True)) == 0.0


def test_experts_stay_in_bf16_where_they_fit(checkpoint: str) -> None:
    plan = gemma4_compat.plan_device_map(checkpoint, "1GiB")
    assert plan.experts is None
    assert "experts=True" not in plan.code
    assert "quantized as well" not in plan_text(plan)
    dense = gemma4_compat.plan_device_map("E2B", "8GiB", context=64, quantize_experts=True)
    assert dense.experts is None
    assert "experts=True" not in dense.code


def test_experts_are_quantized_where_those_in_bf16_would_leave_the_card() -> None:
    """Of a 12 GiB card: host memory and bytes a token are a quarter, and the plan says what was chosen."""
    chosen = gemma4_compat.plan_device_map("26B-A4B", "11GiB")
    plain = gemma4_compat.plan_device_map("26B-A4B", "11GiB", quantize_experts=False)
    assert (chosen.experts, plain.experts) == ("4bit", None)
    assert 0 < chosen.brought < plain.brought / 4
    assert chosen.cpu < plain.cpu / 4
    assert "with gemma4_compat.quantize(offloaded=True, experts=True):" in chosen.code
    assert "--no-quantize-experts keeps them in bf16." in " ".join(plan_text(chosen, width=100).split())
    asked = gemma4_compat.plan_device_map("26B-A4B", "11GiB", quantize_experts=True)
    assert asked.as_data() == chosen.as_data()
    assert "quantized as well" not in plan_text(asked)
    whole = gemma4_compat.plan_device_map("26B-A4B", "80GiB")
    assert (whole.experts, whole.cpu) == (None, 0)
    assert gemma4_compat.plan_device_map("26B-A4B", "30GiB", quantize="8bit", context=1024).experts is None


def test_what_fits_in_no_way_is_one_error() -> None:
    with pytest.raises(Gemma4CompatError, match="does not fit") as caught:
        gemma4_compat.plan_device_map("26B-A4B", "1GiB")
    assert caught.value.__context__ is None
    assert "quantize_experts" not in str(caught.value)


def test_a_saved_model_with_such_experts_is_planned_as_it_is(workspace: Any, checkpoint: str, tmp_path: Path) -> None:
    model = loaded(workspace, checkpoint, "4bit-double")
    model.save_pretrained(tmp_path)
    plan = gemma4_compat.plan_device_map(str(tmp_path), "1GiB")
    assert plan.experts == "4bit-double"
    assert "quantize(experts=True)" not in plan.code, "the file says it"
    base = gemma4_compat.plan_device_map(checkpoint, "1GiB", quantize="4bit-double", quantize_experts=True)
    assert plan.use[0].weights == base.use[0].weights


@pytest.mark.parametrize("quantize", ["8bit", None])
def test_other_quantizations_have_no_experts(checkpoint: str, quantize: str | None) -> None:
    with pytest.raises(Gemma4CompatError, match=rf"4 bits, and quantize is {quantize!r}; use quantize='4bit'"):
        gemma4_compat.plan_device_map(checkpoint, "1GiB", quantize=quantize, quantize_experts=True)


def test_what_does_not_fit_hears_of_it() -> None:
    with pytest.raises(Gemma4CompatError, match="experts are in bf16 here; quantize_experts"):
        gemma4_compat.plan_device_map("26B-A4B", "2GiB", quantize_experts=False)
    with pytest.raises(Gemma4CompatError) as caught:
        gemma4_compat.plan_device_map("26B-A4B", "1GiB", quantize_experts=True)
    assert "quantize_experts" not in str(caught.value)


def test_the_page_has_the_numbers_of_the_arithmetic() -> None:
    text = experts_page.PAGE.read_text(encoding="utf-8")
    assert experts_page.page(text) == text, "python -m tools.pages.experts"
    assert experts_page.table() in text
    line = "experts: 45.7 GB of 48.5 GB stay bf16"
    assert line in text
    assert "| 4 bits | 45.7 GB | 48.5 GB |" in experts_page.table()


def test_the_command_line_has_it(checkpoint: str) -> None:
    from typer.testing import CliRunner

    from gemma4_compat import cli

    result = CliRunner().invoke(cli.app, ["plan", checkpoint, "--vram", "1GiB", "--quantize-experts"])
    assert result.exit_code == 0, result.output
    assert "experts too" in result.output
    assert "with gemma4_compat.quantize(experts=True):" in result.output


def test_experts_leave_before_whole_layers() -> None:
    """Fewer of them the more memory there is; what a token brings is what it hits."""
    given = {"context": 4096, "prompt": 1024, "quantize": "4bit-double", "quantize_experts": True}
    plans = {
        size: gemma4_compat.plan_device_map("26B-A4B", size, **given) for size in ("6GiB", "8GiB", "12GiB", "24GiB")
    }
    counts = [len(plan.looked_up) for plan in plans.values()]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[2] > counts[3] == 0
    assert not any(plan.streamed for plan in plans.values())
    one = (
        128
        * sum(expert_tensors(128, 2816, 1408, "4bit-double") + expert_tensors(128, 2816, 704, "4bit-double"))
        // 128
    )
    for plan in plans.values():
        assert plan.brought == len(plan.looked_up) * (one * 8 // 128)
        for name in plan.looked_up:
            assert plan.device_map[name] == 0
            assert plan.device_map[f"{name}.experts"] == "cpu"
    given |= {"context": 512, "prompt": 512}
    smallest = gemma4_compat.plan_device_map("26B-A4B", "4GiB", **given)
    assert smallest.streamed
    assert not {f"{name}.experts" for name in smallest.streamed} & smallest.device_map.keys()


def test_the_bus_that_is_given() -> None:
    given = {"context": 4096, "prompt": 1024, "quantize": "4bit-double", "quantize_experts": True}
    plan = gemma4_compat.plan_device_map("26B-A4B", "8GiB", bus="12GiB/s", **given)
    assert plan.bus == 12 << 30
    said = " ".join(plan_text(plan, width=100).split())
    assert f"computed: at least {plan.bus / plan.brought:.1f} at 12.00 GiB/s." in said
    assert f"The experts of {len(plan.looked_up)} decoder layers are off the accelerator" in said
    plan = gemma4_compat.plan_device_map("26B-A4B", "8GiB", **given)
    assert plan.bus == 0
    assert "(PCIe 4 x16)" in plan_text(plan, width=100)


def test_experts_that_stay_are_counted() -> None:
    """In the memory that a prompt needs, and a token does not."""
    given = {"context": 4096, "prompt": 1024, "quantize": "4bit-double", "quantize_experts": True}
    for gib in (6, 8, 12):
        plan = gemma4_compat.plan_device_map("26B-A4B", f"{gib}GiB", **given)
        use = plan.use[0]
        left = use.budget - (use.decode - use.experts)
        assert 0 < use.experts <= left - max(left // 4, 1 << 29)
        assert use.peak <= use.budget
        slots = use.experts / (plan.brought / 8)  # of each layer; a token has 8 experts
        assert slots == pytest.approx(round(slots), abs=0.01)
        assert 8 <= slots <= 128
        said = " ".join(plan_text(plan, width=100).split())
        assert f"The experts used last stay on the accelerator, {size_text(use.experts)} of them" in said
        assert f"each token brings at most {size_text(plan.brought)}" in said
        assert plan.as_data()["use"]["0"]["experts"] == use.experts
    for others in ({"fast": False}, {"batch": 16}):
        assert gemma4_compat.plan_device_map("26B-A4B", "12GiB", **given, **others).use[0].experts == 0
    whole = gemma4_compat.plan_device_map("26B-A4B", "24GiB", **given)
    assert (whole.looked_up, whole.use[0].experts) == ((), 0)


@pytest.mark.parametrize("quantization", FOUR_BIT)
def test_auto_counts_experts_as_they_will_be_stored(checkpoint: str, quantization: str) -> None:
    """In a load inside quantize(experts=True), before there are weights."""
    model = build.on_meta(checkpoint)[0]
    expert_storage.prepare(model, tiny.quantization_config(quantization), lambda _: True, prequantized=False)
    expected = described(build.on_meta(checkpoint)[0], quantization)
    seen = described(model, quantization, experts=False)
    assert [block.stored for block in seen.blocks] == [block.stored for block in expected.blocks]
    assert seen.quantization == quantization


def test_auto_places_experts() -> None:
    from gemma4_compat.patches.placement import transformers_auto_map

    model = build.on_meta("26B-A4B")[0]
    placement, text = transformers_auto_map._plan(model, {0: 16 << 30}, 100 << 30, None, balanced=True)
    assert placement is not None, text
    away = [name for name, device in placement.items() if device == "cpu"]
    assert sum(name.endswith(".experts") for name in away) > 20
    assert not any(name.rpartition(".")[2].isdigit() for name in away)
    assert "model.language_model.layers.0-" in text or ".experts" in text
