"""The model of decode time: what a token reads, the constants that were fitted, and what a plan says of a card."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

import gemma4_compat
from benchmarks.decoding import multiprocessors_fit as fit
from gemma4_compat import Gemma4CompatError
from gemma4_compat._gemma4.models import build
from gemma4_compat._gemma4.quantization.config import default_skip_modules, linear_names
from gemma4_compat._lab import tiny_models
from gemma4_compat._memory import blueprint
from gemma4_compat._memory.layout import Layout
from gemma4_compat._plan import budgets, code, speed, training, training_step
from gemma4_compat._plan.result import Source
from gemma4_compat._plan.text import plan_text
from tests.helpers import gpu

GIVEN: dict[str, Any] = {"context": 612, "quantize": "4bit-double"}


def described(model: Any, quantization: str | None = "4bit-double", *, experts: bool = True) -> blueprint.Blueprint:
    names = linear_names(model, default_skip_modules(model)) if quantization else None
    return blueprint.describe(model, quantization, names, experts=experts)


def test_the_constants_are_those_that_fit_what_was_measured() -> None:
    rows = fit.rows(fit.FITTED)
    assert {row["card"]["multiprocessors"] for row in rows} == {28, 34, 46, 132}
    assert all(abs(fit.error(row, speed.SPEED)) < 0.06 for row in rows)
    found = asdict(fit.fitted(rows))
    assert asdict(speed.SPEED) == {name: pytest.approx(value, rel=0.01) for name, value in found.items()}


def test_a_shape_that_was_not_fitted() -> None:
    rows = fit.rows(fit.CHECKED)
    assert [(row["shape"], row["case"]) for row in rows] == [("12B", "gpu"), ("12B", "gpu+lora")]
    assert all(abs(fit.error(row, speed.SPEED)) < 0.1 for row in rows)


def test_what_a_token_reads_of_a_tiny_model(workspace: Any) -> None:
    model = build.on_meta(str(workspace.cached(tiny_models.build_checkpoint)))[0]
    cut = described(model)
    found = speed.work(cut, context=64)
    text = model.config.get_text_config()
    assert found.layers == text.num_hidden_layers
    assert found.plain > text.vocab_size * text.hidden_size * 2
    quantized = sum(layer.stored.nbytes for layer in cut.layers)
    assert quantized <= found.quantized < 1.2 * quantized
    assert (found.experts, found.adapted) == (0, 0)
    longer = speed.work(cut, context=65)
    full = [layer.attention for layer in cut.layers if layer.attention and layer.attention.window is None]
    more = sum(2 * 2 * one.kv_heads * one.head_dim for one in full)
    assert longer.plain - found.plain >= more > 0


def test_a_token_reads_the_experts_that_it_hits(workspace: Any) -> None:
    model = build.on_meta(str(workspace.cached(tiny_models.build_moe_checkpoint)))[0]
    cut = described(model)
    found = speed.work(cut, context=64)
    assert cut.experts is not None
    stored = sum(layer.experts_stored.nbytes for layer in cut.layers if layer.experts_stored)
    assert found.experts == pytest.approx(stored * cut.experts[1] / cut.experts[0], abs=1)
    assert not speed.unknown(cut, batch=1)
    assert "experts in 4 bits" in speed.unknown(described(model, experts=False), batch=1)


def test_what_was_not_measured_has_no_model(workspace: Any) -> None:
    model = build.on_meta(str(workspace.cached(tiny_models.build_checkpoint)))[0]
    assert not speed.unknown(described(model), batch=1)
    assert "one sequence" in speed.unknown(described(model), batch=2)
    for quantization in (None, "8bit"):
        assert "weights in 4 bits" in speed.unknown(described(model, quantization), batch=1)


def test_more_of_anything_is_faster_and_more_to_do_is_slower() -> None:
    done = speed.Work(layers=40, quantized=2 << 30, experts=1 << 28, plain=1 << 30)
    small = speed.CARDS["RTX 3060"]
    taken = speed.seconds(done, small)
    assert speed.seconds(done, replace(small, multiprocessors=56)) < taken
    assert speed.seconds(done, replace(small, gb_s=720)) < taken
    assert speed.seconds(done, replace(small, multiprocessors=10**6, ghz=9, gb_s=1e9)) > 40 * speed.SPEED.layer
    for name in ("layers", "quantized", "experts", "plain", "adapted"):
        assert speed.seconds(replace(done, **{name: 2 * getattr(done, name) + 1}), small) > taken
    # No card reads its weights faster than its memory is.
    assert taken > (done.quantized + done.experts + done.plain) / (small.gb_s * 1e9)


def test_streamed_layers_come_beside_and_experts_between() -> None:
    assert speed.with_bus(0.01, 0, 0, 0) == 0.01
    assert speed.with_bus(0.01, 1000, 0, 10**9) == 0.01
    assert speed.with_bus(0.01, 10**9, 0, 10**10) > 0.1
    assert speed.with_bus(0.01, 0, 10**8, 10**10) == pytest.approx(0.02)


def test_a_plan_says_what_a_model_says_of_some_cards() -> None:
    plan = gemma4_compat.plan_device_map("E2B", "8GiB", **GIVEN)
    assert list(plan.modelled) == list(speed.COMMON)
    assert plan.modelled["RTX 3060"] < plan.modelled["RTX 4090"]
    said = " ".join(plan_text(plan, width=100).split())
    assert "Tokens a second, modelled and not measured: " in said
    assert f"{plan.modelled['RTX 3060']:.0f} on RTX 3060" in said
    assert plan.as_data()["modelled"] == plan.modelled


@pytest.mark.parametrize("name", ["rtx 4070", "NVIDIA GeForce RTX 4070", "46 SMs, 2.48 GHz, 504 GB/s"])
def test_a_card_by_its_name_or_its_figures(name: str) -> None:
    plan = gemma4_compat.plan_device_map("E2B", "8GiB", card=name, **GIVEN)
    known = gemma4_compat.plan_device_map("E2B", "8GiB", card="RTX 4070", **GIVEN)
    assert plan.modelled == {name: pytest.approx(known.modelled["RTX 4070"])}


def test_a_card_by_its_name_says_how_much_memory_there_is() -> None:
    plan = gemma4_compat.plan_device_map("E2B", card="RTX 3060", context=1024)
    assert {device: use.budget for device, use in plan.use.items()} == {0: 11 << 30}
    assert list(plan.modelled) == ["RTX 3060"]
    assert gemma4_compat.plan_device_map("E2B", "8GiB", card="RTX 3060", context=1024).use[0].budget == 8 << 30
    with pytest.raises(Gemma4CompatError, match=r"how much memory the card '28 SMs, .* give vram"):
        gemma4_compat.plan_device_map("E2B", card="28 SMs, 1.78 GHz, 360 GB/s")


@pytest.mark.parametrize(
    "written, name",
    [
        ("t4", "T4"),
        ("Tesla T4", "T4"),
        ("RTX3060", "RTX 3060"),
        ("RTX 3060 12GB", "RTX 3060"),
        ("rtx 4060 ti 16gb", "RTX 4060 Ti 16GB"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
    ],
)
def test_a_card_by_the_name_that_a_driver_gives_it(written: str, name: str) -> None:
    assert speed.card(written) == speed.CARDS[name]


@pytest.mark.parametrize("written, close", [("A10G", "A10"), ("RTX 3060 6GB", "RTX 3060"), ("RTX 4090 D", "RTX 4090")])
def test_an_unknown_card_is_answered_with_the_nearest_name(written: str, close: str) -> None:
    with pytest.raises(Gemma4CompatError, match=rf"^card {written!r} is unknown; did you mean '{close}'\?"):
        speed.card(written)


def test_a_card_without_bfloat16_is_planned_in_float16() -> None:
    plan = gemma4_compat.plan_device_map("E2B", card="T4", context=1024)
    assert plan.use[0].budget == 14 << 30
    assert "bfloat16" not in plan.code
    assert plan.code.count("torch.float16") == 2
    assert not plan.modelled
    said = " ".join(plan_text(plan, width=100).split())
    assert "In float16: the card has no bfloat16 (compute capability 7.5). If logits are not finite, use" in said
    assert "cannot be modelled: no card before compute capability 8.0 was measured." in said
    assert "CUDA 13" not in said
    old = gemma4_compat.plan_device_map("E2B", card="P100", context=1024)
    assert "PyTorch's builds for CUDA 13 do not run on it" in " ".join(plan_text(old, width=100).split())
    new = gemma4_compat.plan_device_map("E2B", card="L4", context=1024)
    assert "float16" not in new.code.replace("bfloat16", "")


def test_a_card_without_bfloat16_trains_in_float16() -> None:
    source = Source(model="m", model_class="Gemma4ForCausalLM", quantization="4bit", capability=(7, 5))
    placed = Layout(device_map={"": 0}, use={}, cpu=0, disk=0, streamed=())
    said = code.training_code(source, placed, training_step.Step(max_length=64))
    assert "    fp16=True,\n" in said
    assert "bf16" not in said
    newer = replace(source, capability=(8, 0))
    assert "    bf16=True,\n" in code.training_code(newer, placed, training_step.Step(max_length=64))


@pytest.mark.parametrize("vram", ["0GiB", 0, ["8GiB", "0MB"], {"cuda:0": "0"}])
def test_no_memory_is_answered_with_the_words_typed(vram: Any) -> None:
    with pytest.raises(Gemma4CompatError, match=r"^vram is ('0GiB'|0|'0MB'|'0'); it must be more than 0"):
        budgets.of(vram, None)


@pytest.mark.parametrize("name", speed.CARDS)
def test_every_known_card_has_memory_to_plan_for(name: str) -> None:
    assert budgets.of(None, name) == {0: (speed.CARDS[name].gib - 1) << 30}
    assert speed.CARDS[name].gib >= 8


def test_without_vram_and_card_the_free_memory_of_this_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Gemma4CompatError, match=r"no GPU whose memory could be read; give vram \(--vram 8GiB\), or"):
        gemma4_compat.plan_device_map("E2B")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((8 + index) << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu(9 - device.index, 0))
    assert budgets.of(None, None) == {0: 15 << 29, 1: 17 << 29}
    assert gemma4_compat.plan_device_map("E2B", context=1024).use[0].budget == 15 << 29
    assert training._budget(None, None) == (1, 17 << 29)


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_so_does_that_of_intels_and_apples_gpus(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Fast decoding needs CUDA: there plans are without."""
    import torch

    first = "xpu:0" if kind == "xpu" else "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if kind == "xpu":
        monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
        monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
        monkeypatch.setattr(torch.xpu, "mem_get_info", lambda index: ((8 + index) << 30, 24 << 30))
        assert budgets.of(None, None) == {"xpu:0": 15 << 29, "xpu:1": 17 << 29}
    else:
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 << 30)
        monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 4 << 30)
        assert budgets.of(None, None) == {"mps": 15 << 29}
    found = gemma4_compat.plan_device_map("E2B", context=1024)
    assert found.use[first].budget == 15 << 29
    assert (found.fast, found.slow_because) == (False, "graphs need CUDA")
    assert f'"{first}"' in found.code
    compile(found.code, "the plan's code", "exec")
    for absent in (torch.xpu, "mem_get_info"), (torch.mps, "recommended_max_memory"):  # in torch 2.4
        monkeypatch.delattr(*absent)
    with pytest.raises(Gemma4CompatError, match="give vram"):
        budgets.of(None, None)


def test_the_bus_counts_where_something_comes_over_it() -> None:
    given, capable = GIVEN | {"quantize_experts": True, "vram": "8GiB"}, "compute capability 8.9"
    slow, fast = (
        gemma4_compat.plan_device_map("26B-A4B", card=f"46 SMs, 2.48 GHz, 504 GB/s, {bus}/s, {capable}", **given)
        for bus in ("6GiB", "24GiB")
    )
    assert next(iter(slow.modelled.values())) < next(iter(fast.modelled.values()))
    given_bus = gemma4_compat.plan_device_map("26B-A4B", card="RTX 4070", bus="6GiB/s", **given)
    assert list(given_bus.modelled.values()) == pytest.approx(list(slow.modelled.values()))
    unknown = gemma4_compat.plan_device_map("26B-A4B", card="46 SMs, 2.48 GHz, 504 GB/s", **given)
    assert unknown.brought
    assert not unknown.modelled
    assert "over which bus" in unknown.not_modelled


@pytest.mark.parametrize(
    "name", ["RTX 2", "", 3060, "0 SMs, 2.48 GHz, 504 GB/s", "46 SMs", "46 SMs, 1.2.3 GHz, 504 GB/s"]
)
def test_an_unknown_card_is_one_error_with_those_that_are_known(name: Any) -> None:
    with pytest.raises(Gemma4CompatError, match="RTX 4060 Ti") as raised:
        gemma4_compat.plan_device_map("E2B", "1KiB", card=name, **GIVEN)  # before anything is placed
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"fast": False}, "no step is replayed"), ({"batch": 2}, "one sequence"), ({"quantize": None}, "in 4 bits")],
)
def test_a_plan_without_a_model_says_why(options: dict[str, Any], why: str) -> None:
    plan = gemma4_compat.plan_device_map("E2B", "24GiB", **{**GIVEN, **options})
    assert not plan.modelled
    assert why in plan.not_modelled
    said = " ".join(plan_text(plan, width=100).split())
    assert (f"Its tokens a second cannot be modelled: {plan.not_modelled}." in said) == plan.fast
