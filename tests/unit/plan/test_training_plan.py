"""What a training plan says against steps that are really run, and its own code."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Gemma4CompatError, cli
from gemma4_compat._engine import settings
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._gemma4.models import build
from gemma4_compat._gemma4.quantization.experts import all_experts
from gemma4_compat._gemma4.state import checkpointing
from gemma4_compat._graphs import recording
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.stand_ins.tape import standing_in
from gemma4_compat._memory.formulas import TrainingLoad
from gemma4_compat._plan import equal_layers, switches, training, training_step
from gemma4_compat._plan.text import plan_text
from gemma4_compat._plan.training_step import Step
from gemma4_compat._training import chunks, counting, mlp, parts
from gemma4_compat._training.captured import layers
from tests.helpers import ROOT, without
from tests.patches.training.parts import only
from tests.unit.gemma4.attention.test_products import deterministic
from tests.unit.memory.models import VARIANTS

__all__ = ["deterministic"]
MIB = 1 << 20
BLOCK = 512  # bytes, of an allocation
LENGTH = 2048  # tokens of the shortest text by windows


def of(checkpoint: Any, quantized: tuple[str, ...] = (), **step: Any) -> training_step.StepMemory:
    return training_step.measure(build.on_meta(str(checkpoint))[0], quantized, Step(**step))


@pytest.fixture(autouse=True)
def not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU that plans are compared with."""
    monkeypatch.setattr(windows, "MULTIPLYING", ())


class Stepped(NamedTuple):
    """The most that operators made in each pass of a real step, and the model."""

    forward: int
    backward: int
    model: Any


def stepped(
    workspace: Any, *, sequence: int, batch: int, checkpointing: bool, chunked: bool, tokens: int | None, padding: bool
) -> Stepped:
    """The same model, in bf16 on the CPU, with the same adapter, and a real forward and backward pass."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        workspace.load(), LoraConfig(r=4, lora_alpha=4, target_modules=training_step.TARGETS, init_lora_weights=False)
    ).train()
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    by_windows = settings.is_enabled(windows.ID)
    only(model, loss=chunked, mlp=tokens is not None and mlp.TOKENS, windows=by_windows, products=by_windows)
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    more = {"shift_labels": ids} if chunked else {}  # a plan counts a label for every token
    inputs = {"input_ids": ids, **more, "attention_mask": torch.ones_like(ids)}
    if padding:
        inputs["attention_mask"][0, 0] = 0
    inputs["mm_token_type_ids"] = torch.zeros_like(ids)
    counted = training_step.storage_counter(model)
    with counted, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**inputs, labels=ids, use_cache=False).loss
    forward = counted.reset_peak()
    with counted:
        loss.backward()
    return Stepped(forward, counted.peak, model)


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("chunked, tokens", [(False, None), (True, None), (True, 7)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sequence, batch", [(24, 1), (16, 3)])
def test_every_byte_is_that_of_a_step_with_memory(
    workspace: Any,
    monkeypatch: pytest.MonkeyPatch,
    sequence: int,
    batch: int,
    checkpointing: bool,
    chunked: bool,
    tokens: int | None,
    padding: bool,
) -> None:
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 10 * 256 * 2)  # of 10 tokens: several chunks
    step = {"gradient_checkpointing": checkpointing, "chunked_loss": chunked, "chunked_mlp": tokens is not None}
    monkeypatch.setattr(mlp, "TOKENS", tokens or mlp.TOKENS)
    planned = of(workspace.checkpoint, max_length=sequence, batch=batch, padding=padding, r=4, **step)
    found = stepped(
        workspace,
        sequence=sequence,
        batch=batch,
        checkpointing=checkpointing,
        chunked=chunked,
        tokens=tokens,
        padding=padding,
    )
    spare = 0 if padding else 2 * BLOCK  # of small tensors beside a sliding mask
    assert 0 <= planned.forward - found.forward <= spare
    # The indices of the labels that count are of one block more where they are looked up.
    assert -spare <= found.backward - planned.backward <= (BLOCK if chunked else 0)
    trained = [parameter.numel() for parameter in found.model.parameters() if parameter.requires_grad]
    assert sorted(planned.sizes) == sorted(trained)
    assert all(parameter.grad is not None for parameter in found.model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("checkpointing, padding", [(True, False), (False, True)])
def test_every_byte_of_a_step_by_windows(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, checkpointing: bool, padding: bool
) -> None:
    """With the blocks of a GPU; the same text without windows takes more."""
    monkeypatch.setattr(windows, "ROUNDED", windows.UNIT)
    monkeypatch.setattr(windows, "LEAST_ON_GPU", LENGTH)
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", windows.ID)
    options = {"max_length": LENGTH, "padding": padding, "r": 4, "gradient_checkpointing": checkpointing}
    plain, planned = (of(workspace.checkpoint, sliding_windows=on, **options) for on in (False, True))
    found = stepped(
        workspace, sequence=LENGTH, batch=1, checkpointing=checkpointing, chunked=False, tokens=None, padding=padding
    )
    assert planned.peak < plain.peak
    spare = 0 if padding else 2 * BLOCK  # of small tensors beside a sliding mask
    assert 0 <= planned.forward - found.forward <= spare
    assert -spare <= found.backward - planned.backward <= 0
    with without(windows.ID), pytest.raises(Gemma4CompatError, match=f"needs the patch {windows.ID}"):
        of(workspace.checkpoint, sliding_windows=True, **options)


@pytest.mark.parametrize("checkpointing, padding", [(True, False), (False, True)])
def test_every_byte_of_a_step_by_products(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpointing: bool,
    padding: bool,
) -> None:
    """By products that compute nothing: on a CPU they need copies of what they multiply."""
    from gemma4_compat._gemma4.attention import products

    monkeypatch.setattr(windows, "ROUNDED", windows.UNIT)
    monkeypatch.setattr(windows, "MULTIPLYING", ("cpu", "gpu"))
    monkeypatch.setattr(products, "_multiply", lambda _left, _right, found, add=False: found)
    monkeypatch.setattr(products, "work", lambda _device, _dtype: True)
    monkeypatch.setattr(products, "_MOST", 16)
    monkeypatch.setattr(products, "_SCORES", 2**20)
    monkeypatch.setattr(windows, "LEAST_ON_GPU", LENGTH)
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", windows.ID)
    checkpoint = tiny_models.build_checkpoint(tmp_path, full_width=512)
    options = {"max_length": LENGTH, "padding": padding, "r": 4, "gradient_checkpointing": checkpointing}
    planned = of(checkpoint, sliding_windows=True, **options)
    workspace = SimpleNamespace(load=functools.partial(tiny.load, checkpoint))
    found = stepped(
        workspace, sequence=LENGTH, batch=1, checkpointing=checkpointing, chunked=False, tokens=None, padding=padding
    )
    assert planned.forward == found.forward
    assert planned.backward == found.backward


def test_short_texts_are_multiplied_where_train_fast_is_called(
    workspace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What products take is counted then."""
    from gemma4_compat._gemma4.attention import products

    monkeypatch.setattr(windows, "MULTIPLYING", ("gpu",))
    counted, multiply = list[int](), products.attention
    monkeypatch.setattr(products, "attention", lambda *args, **kwargs: counted.append(1) or multiply(*args, **kwargs))
    for named in ({}, {"chunked_loss": True}, {"train_fast": True}):
        counted.clear()
        of(workspace.checkpoint, max_length=32, r=4, **named)
        assert bool(counted) == bool(named)
    with without(windows.ID):
        counted.clear()
        of(workspace.checkpoint, max_length=32, r=4, chunked_loss=True)
        assert not counted


@pytest.mark.parametrize("length, batch, padding", [(24, 1, False), (16, 3, True)])
def test_graphs_keep_what_they_are_counted_with(workspace: Any, length: int, batch: int, padding: bool) -> None:
    """The memory of real ones, and the pool that the same layers need with memory."""
    import torch
    from peft import LoraConfig, get_peft_model

    step = {"max_length": length, "batch": batch, "padding": padding, "r": 4, "gradient_checkpointing": False}
    plain, planned = (of(workspace.checkpoint, train_fast=on, **step) for on in (False, True))
    assert planned.peak - planned.graphs.nbytes == plain.peak
    model = get_peft_model(
        workspace.load(), LoraConfig(r=4, lora_alpha=4, target_modules=training_step.TARGETS, init_lora_weights=False)
    ).train()
    ids = torch.zeros(batch, length, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
    if padding:
        inputs["attention_mask"][0, 0] = 0

    def run() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**inputs, labels=ids, use_cache=False).loss

    with standing_in(recording.RECORDERS):
        only(model, graphs=True)
        for _ in range(layers.CAPTURED_AT):
            run().backward()
        assert gemma4_compat.statistics(model).training.captured
        (memory,) = vars(layers.decoder_layers(model)[0])["_gemma4_compat_training"]._memory.values()
        gemma4_compat.train_fast(model, enabled=False)
    counted = training_step.storage_counter(model)
    with counted:
        found = counting.kept(model, run, counted)
    assert planned.graphs == found
    assert found.buffers == memory.nbytes


@pytest.mark.full
@pytest.mark.parametrize("variant, length", [("E2B", 512), ("E4B", 512), ("E4B", 2048)])
def test_graphs_take_what_they_took_on_a_gpu(variant: str, length: int) -> None:
    """Of what PyTorch reserves, which includes a pool of graphs."""
    file = ROOT / f"benchmarks/results/2026-11-28-h200/short_steps-{variant}.json"
    cells = [cell for cell in json.loads(file.read_text())["cells"].values() if cell["sequence"] == length]
    plain, fast = (
        max(cell["memory"]["peak_reserved_gib"] for cell in cells if cell["way"] == way) for way in ("plain", "fast")
    )
    step = Step(max_length=length, padding=False, chunked_loss=True, train_fast=True)
    taken = training._measure(variant, "4bit-double", step).graphs.nbytes / (1 << 30)
    assert taken == pytest.approx(fast - plain, abs=0.04)


def test_offloaded_checkpoints_take_no_memory_but_where_they_are_needed(workspace: Any) -> None:
    """As with transformers' ``offload``, each layer's hidden states are there once more while it is computed again."""
    if not training_step.can_offload():
        pytest.skip("this transformers does not offload checkpointed activations")
    step = {"max_length": 512, "r": 2, "chunked_loss": True}
    plain, away = (of(workspace.checkpoint, activation_offloading=offloads, **step) for offloads in (False, True))
    text = build.on_meta(str(workspace.checkpoint))[0].config.get_text_config()
    states = 512 * text.hidden_size * 2
    kept = plain.forward - away.forward
    assert (text.num_hidden_layers - 2) * states <= kept <= (text.num_hidden_layers + 1) * states
    assert away.peak < plain.peak
    with pytest.raises(Gemma4CompatError, match="it needs checkpointing"):
        of(workspace.checkpoint, activation_offloading=True, gradient_checkpointing=False, **step)


def test_a_4_bit_base_adds_the_copy_that_a_layer_is_dequantized_into(workspace: Any) -> None:
    """Of each layer in turn: the most that one of them can add is its weight in bf16."""
    built = build.on_meta(str(workspace.checkpoint))[0]
    names = tuple(
        name for name, module in built.named_modules() if "language_model" in name and name.endswith("up_proj")
    )
    largest = max(built.get_submodule(name).weight.numel() for name in names)
    plain, packed = (of(workspace.checkpoint, chosen, max_length=4, r=2) for chosen in ((), names))
    assert 0 <= packed.backward - plain.backward <= 2 * largest
    assert packed.sizes == plain.sizes


def four_bits(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The most that operators make in each pass of a checkpointed step of 512 tokens, of a model in 4 bits.

    Under autocast PEFT's 4-bit layers do not cast their inputs to float32. They ask for CUDA's: it is on here.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    tokens = torch.zeros(1, 512, dtype=torch.long)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=4, target_modules=training_step.TARGETS)).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "mm_token_type_ids": 0 * tokens}
    inputs["attention_mask"][0, 0] = 0
    counted = training_step.storage_counter(model)
    ask = torch.is_autocast_enabled  # of the CPU it must tell the truth: leaving an autocast restores what this said
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: ask(*device) if device else True)
    with counted, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**inputs, labels=tokens, use_cache=False).loss
    forward = counted.reset_peak()
    with counted:
        loss.backward()
    monkeypatch.undo()
    assert not torch.is_autocast_enabled("cpu")
    return forward, counted.peak


def test_a_4_bit_step_keeps_what_bitsandbytes_and_peft_keep(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    found = four_bits(workspace.load("4bit"), monkeypatch)
    planned = training._measure(str(workspace.checkpoint), "4bit", Step(max_length=512, r=4))
    assert (planned.forward, planned.backward) == found


def test_a_step_of_experts_in_4_bits_keeps_what_they_keep(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are dequantized in each pass, and a checkpoint keeps nothing of their forward."""
    pytest.importorskip("bitsandbytes")
    checkpoint = workspace.cached(tiny_models.build_moe_checkpoint)
    with gemma4_compat.quantize(experts=True):
        model = tiny.load(checkpoint, "4bit", device=workspace.main)
    forward, backward = four_bits(model, monkeypatch)
    planned = training._measure(str(checkpoint), "4bit", Step(max_length=512, r=4), quantized_experts=True)
    weights = sum(weight.quant_state.shape.numel() for weight in all_experts(model).popitem()[1].parameters())
    scales = 3 * 4 * weights // 64  # copies on a CPU, in float32
    assert 0 <= forward - planned.forward <= scales
    assert 0 <= backward - planned.backward <= scales
    assert planned.backward > 2 * weights


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_plan_stores_experts_as_it_is_told(workspace: Any, asked: bool | None) -> None:
    checkpoint = workspace.cached(tiny_models.build_moe_checkpoint)
    plan = gemma4_compat.plan_training(str(checkpoint), "8GiB", max_length=8, r=2, quantize_experts=asked)
    assert plan.experts == ("4bit" if asked else None)
    assert ("with gemma4_compat.quantize(experts=True)" in plan.code) is bool(asked)
    assert (", experts too:" in " ".join(plan_text(plan, width=100).split())) is bool(asked)


def test_experts_that_do_not_fit_are_stored_in_4_bits() -> None:
    cut, _ = training._described("26B-A4B", "4bit")
    assert training._experts_leave(cut, 24 << 30)
    assert not training._experts_leave(cut, 60 << 30)
    dense, _ = training._described("31B", "4bit")
    assert not training._experts_leave(dense, 8 << 30)


@pytest.mark.full
@pytest.mark.parametrize(("width", "workspace"), [(512, 4 * 2 * 512 * 3 * 64), (128, 0)])
def test_gradients_of_wide_heads_need_the_workspace_of_the_kernel_on_a_gpu(width: int, workspace: int) -> None:
    """Beside the gradients, which are bfloat16, sums of them in float32."""
    import torch

    inputs = [torch.zeros(1, 2, 64, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    found = torch.nn.functional.scaled_dot_product_attention(*inputs)
    given = torch.zeros_like(found)
    counted = training_step.storage_counter(torch.nn.Module())
    with counted:
        gradients = torch.autograd.grad(found, inputs, given)
    assert len(gradients) == 3
    assert counted.peak == counted.now + workspace


@pytest.mark.parametrize(
    "shape, keys",
    [((1, 8, 32_768, 512), 25 * 64), ((63, 8, 512, 256), 64), ((1, 2, 64, 512), 64)],
)
def test_that_kernel_works_on_a_few_blocks_of_keys_at_once(shape: tuple[int, ...], keys: int) -> None:
    """On 200 of all heads, or one of each: those of windows, of which each is a row, take little."""
    batch, heads, tokens, width = shape
    assert training_step._attention_workspace(shape, shape) == 4 * batch * heads * width * (tokens + 2 * keys)


def test_steps_grow_with_what_they_are(workspace: Any) -> None:
    base = of(workspace.checkpoint, max_length=32)
    assert of(workspace.checkpoint, max_length=64).peak > base.peak
    assert of(workspace.checkpoint, max_length=32, batch=2).peak > base.peak
    assert of(workspace.checkpoint, max_length=32, r=32).adapter == pytest.approx(2 * base.adapter, rel=0.01)
    assert of(workspace.checkpoint, max_length=32, gradient_checkpointing=False).peak > base.peak


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_states_of_torchs_optimizers_are_what_they_keep(optimizer: str) -> None:
    import torch

    sizes = (16, 4096, 100_000)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    made = torch.optim.SGD(parameters) if optimizer == "sgd" else torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    states = [value for state in made.state.values() for value in state.values() if value.dim()]
    kept = sum(value.numel() * value.element_size() for value in states)
    assert training_step.optimizer_bytes(optimizer, sizes) == pytest.approx(kept, abs=512 * len(sizes))


def test_states_of_8_bit_optimizers_are_what_bitsandbytes_makes() -> None:
    import bitsandbytes as bnb
    import torch

    sizes = (16, 4096, 100_000)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    made = bnb.optim.AdamW8bit(parameters)
    kept = 0
    for index, parameter in enumerate(parameters):
        made.init_state(made.param_groups[0], parameter, 0, index)
        state = made.state[parameter]
        found = [state[name] for name in ("state1", "state2", "absmax1", "absmax2") if name in state]
        kept += sum(value.numel() * value.element_size() for value in found)
    assert training_step.optimizer_bytes("adamw_8bit", sizes) == pytest.approx(kept, abs=512 * len(sizes))
    assert training_step.optimizer_bytes("paged_adamw_8bit", sizes) == 0


@functools.cache
def planned(checkpoint: str, **options: Any) -> Any:
    return gemma4_compat.plan_training(checkpoint, 1 << 40, max_length=32, **options)


@pytest.mark.full
def test_more_memory_never_offloads_more(workspace: Any) -> None:
    whole = planned(str(workspace.checkpoint))
    assert set(whole.device_map.values()) == {0}
    assert whole.streamed == ()
    away: list[set[str]] = []
    for left in (whole.peak - 1, whole.peak - whole.weights // 4):
        plan = gemma4_compat.plan_training(
            str(workspace.checkpoint), left + parts.MARGIN, max_length=32, chunked_loss=False
        )
        assert plan.peak <= left
        assert not plan.warning
        away.append({name for name, device in plan.device_map.items() if device == "cpu"})
    assert set() < away[0] <= away[1]


def test_a_step_leaves_memory_free_or_the_plan_warns() -> None:
    """Half a GiB where a placement allows it. One that fits with less is planned with a warning."""
    step = {"adapter": 0, "optimizer": 0, "forward": 0, "sizes": ()}
    cut = training._described("E2B", "4bit")[0]
    for budget in (12 << 30, 2 << 30):
        least = training.layout.smallest_budget(cut, TrainingLoad(step=0))

        def placed(free: float, budget: int = budget, least: int = least) -> Any:
            memory = training_step.StepMemory(backward=int((budget - free - least) / 1.01) - MIB, **step)
            return training._placed(cut, 0, budget, memory, {}, cpu=None).use[0]

        use = placed(parts.MARGIN)
        assert use.budget == budget
        assert use.peak <= budget - parts.MARGIN
        assert not switches.warning(use)
        use = placed(parts.MARGIN // 2)
        assert budget - parts.MARGIN < use.peak <= budget
        assert f"of {budget >> 30}.00 GiB are left" in switches.warning(use)
        with pytest.raises(Gemma4CompatError, match=f"there are {budget >> 30}.00 GiB"):
            placed(-3 * MIB)


def test_the_loss_is_in_chunks_where_that_is_needed() -> None:
    """Its logits would stream layers, or leave too little; on a large card they do neither."""
    cut = training._described("E2B", "4bit")[0]
    step = {"adapter": 0, "optimizer": 0, "forward": 0, "sizes": ()}
    memories = {
        False: training_step.StepMemory(backward=3 << 30, **step),
        True: training_step.StepMemory(backward=1 << 30, **step),
    }
    whole = training.layout.smallest_budget(cut, TrainingLoad(step=3 << 30), layers_leave=False) + parts.MARGIN
    for budget, chunked, why in (
        (whole, False, "in chunks the step would take 2.00 GiB less"),
        (whole - (200 << 20), True, "more decoder layers would be streamed"),
        (3 << 30, True, "would not leave 512 MiB free"),
    ):
        found, reason = switches.loss((cut, 0, budget), memories)
        assert (found, why in reason) == (chunked, True), reason


def test_mlps_are_in_pieces_where_nothing_else_fits() -> None:
    """Layers are streamed first; and what is one chunk has nothing to choose."""
    cut = training._described("E2B", "4bit")[0]
    step = {"adapter": 0, "optimizer": 0, "forward": 0, "sizes": ()}
    memories = {
        False: training_step.StepMemory(backward=3 << 30, **step),
        True: training_step.StepMemory(backward=1 << 30, **step),
    }
    least = training.layout.smallest_budget(cut, TrainingLoad(step=3 << 30)) + parts.MARGIN
    for budget, chosen, why in (
        (least, False, "in chunks the step would take 2.00 GiB less, and more time"),
        (least - (100 << 20), True, "the step takes 2.00 GiB more, and would not leave 512 MiB free"),
    ):
        found, reason = switches.mlp((cut, 0, budget), memories)
        assert (found, why in reason) == (chosen, True), reason


def test_a_plan_chooses_pieces_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step that takes 8 GiB, 5 with the loss in chunks, 3 with MLPs in chunks as well."""
    taken = {(False, False): 8, (True, False): 5, (False, True): 6, (True, True): 3}
    asked = []

    def measure(model: Any, quantization: str | None, step: Step) -> training_step.StepMemory:
        asked.append(step)
        backward = taken[step.chunked_loss, step.chunked_mlp] << 30
        return training_step.StepMemory(adapter=0, optimizer=0, forward=0, backward=backward, sizes=())

    monkeypatch.setattr(training, "_measure", measure)

    def plan(vram: str, **options: Any) -> Any:
        return gemma4_compat.plan_training("E2B", vram, max_length=16_384, **options)

    small = plan("5GiB")
    assert (small.chunked_loss, small.chunked_mlp) == (True, True)
    assert "the step takes 2.00 GiB more, and would not leave 512 MiB free" in small.reasons["chunked_mlp"]
    assert (small.changes["--no-chunked-loss"], small.changes["--no-chunked-mlp"]) == (3 << 30, 2 << 30)
    assert "gemma4_compat.train_fast(model, mlp=True, windows=False, products=False, graphs=False)\n" in small.code
    text = " ".join(plan_text(small, width=90).split())
    assert "the loss in chunks, MLPs in chunks" in text
    assert "chunked mlp: on: otherwise the step takes" in text
    large = plan("7GiB")
    assert (large.chunked_loss, large.chunked_mlp) == (True, False)
    assert large.changes["--chunked-mlp"] == -2 << 30
    assert "gemma4_compat.train_fast(model, mlp=False, " in large.code
    asked.clear()
    forced = plan("7GiB", chunked_mlp=True)
    assert forced.chunked_mlp
    assert "chunked_mlp" not in forced.reasons
    assert plan("9GiB", chunked_loss=False, chunked_mlp=False).chunked_mlp is False
    with pytest.raises(Gemma4CompatError, match=r"--chunked-mlp saves 2\.00 GiB"):
        plan("5GiB", chunked_mlp=False)
    with pytest.raises(Gemma4CompatError, match=r"the loss in chunks and MLPs in chunks, 3\.00 GiB"):
        plan("2GiB")
    asked.clear()
    short = gemma4_compat.plan_training("E2B", "9GiB", max_length=2048)
    assert short.reasons["chunked_mlp"] == "2,048 tokens are one chunk"
    assert not any(step.chunked_mlp for step in asked)


def test_windows_are_used_where_layers_would_be_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or where the step does not fit; else you have to ask, because gradients are rounded differently."""
    cut = training._described("E2B", "4bit")[0]
    step = {"adapter": 0, "optimizer": 0, "forward": 0, "sizes": ()}
    memories = {
        False: training_step.StepMemory(backward=3 << 30, **step),
        True: training_step.StepMemory(backward=2 << 30, **step),
    }
    whole = training.layout.smallest_budget(cut, TrainingLoad(step=3 << 30), layers_leave=False) + parts.MARGIN
    least = training.layout.smallest_budget(cut, TrainingLoad(step=3 << 30)) + parts.MARGIN
    for budget, last, chosen, why in (
        (whole, True, False, "would save 1.00 GiB and time, with another rounding of gradients"),
        (whole - (200 << 20), False, True, "more decoder layers would be streamed; it also takes less time"),
        (least - (100 << 20), False, True, "would not leave 512 MiB free; it also takes less time"),
        (least - (2 << 30), False, False, "so you have to ask for it"),  # chunks of MLPs may save enough
        (least - (2 << 30), True, True, "would not leave 512 MiB free"),
    ):
        found, reason = switches.by_windows((cut, 0, budget), memories, last=last)
        assert (found, why in reason) == (chosen, True), reason


@pytest.mark.parametrize(
    "vram, pieces, by_windows",
    [("10GiB", False, False), ("7GiB", False, True), ("6GiB", True, False), ("4GiB", True, True)],
)
def test_a_plan_chooses_windows_and_says_so(
    monkeypatch: pytest.MonkeyPatch, vram: str, pieces: bool, by_windows: bool
) -> None:
    """With a step that takes 6 GiB, 5.5 by windows, 2.5 with MLPs in chunks, 2 with both."""
    taken = {(False, False): 6.0, (False, True): 5.5, (True, False): 2.5, (True, True): 2.0}

    def measure(model: Any, quantization: str | None, step: Step) -> training_step.StepMemory:
        backward = int(taken[step.chunked_mlp, step.sliding_windows] * (1 << 30))
        return training_step.StepMemory(adapter=0, optimizer=0, forward=0, backward=backward, sizes=())

    monkeypatch.setattr(training, "_measure", measure)
    plan = gemma4_compat.plan_training("E2B", vram, max_length=16_384, chunked_loss=True)
    assert (plan.chunked_mlp, plan.sliding_windows) == (pieces, by_windows)
    option = "--no-sliding-windows" if by_windows else "--sliding-windows"
    assert plan.changes[option] == int((taken[pieces, not by_windows] - taken[pieces, by_windows]) * (1 << 30))
    text = " ".join(plan_text(plan, width=90).split())
    assert ("sliding layers by windows" in text) is by_windows
    assert f"sliding windows: {'on: otherwise' if by_windows else 'off: it would save'}" in text
    named = f"mlp={pieces}{'' if by_windows else ', windows=False, products=False'}, graphs=False"
    assert f"gemma4_compat.train_fast(model, {named})\n" in plan.code
    asked = gemma4_compat.plan_training("E2B", vram, max_length=16_384, sliding_windows=True)
    assert asked.sliding_windows
    assert "sliding_windows" not in asked.reasons


@pytest.mark.parametrize("switch", ["chunked_loss", "chunked_mlp", "sliding_windows"])
def test_a_switch_whose_patch_is_off_is_left_out(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    """Unless somebody asks for it: then it is an error, as the switch itself raises."""
    measured = training._measure
    step = Step(max_length=4096, padding=False, **{switch: True})  # type: ignore[arg-type]

    def measure(model: Any, quantization: str | None, step: Step) -> training_step.StepMemory:
        assert not getattr(step, switch)
        return training_step.StepMemory(adapter=0, optimizer=0, forward=0, backward=4 << 30, sizes=())

    monkeypatch.setattr(training, "_measure", measure)
    patch = switches._PATCHES[switch]
    with without(patch):
        plan = gemma4_compat.plan_training(
            "E2B", "9GiB", max_length=16_384, **{name: False for name in switches._PATCHES if name != switch}
        )
        assert plan.reasons[switch] == f"the patch {patch} is off"
        assert not any(switch.replace("_", "-") in option for option in plan.changes)
        with pytest.raises(Gemma4CompatError, match=f"needs the patch {patch}"):
            measured("E2B", None, step)
    step = Step(max_length=4095, padding=False)
    assert switches.unsupported_reason(step, "sliding_windows") == "not used on a GPU below 4,096 tokens"


def test_what_is_enabled_for_all_models_is_planned(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has it, and the plan says why. Other plans are what they are without the variable."""
    step = {"max_length": 32, "padding": False, "r": 4, "gradient_checkpointing": False}
    monkeypatch.setattr(mlp, "TOKENS", 7)
    monkeypatch.setattr(windows, "LEAST_ON_GPU", 32)
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 10 * 256 * 2)
    way = {"chunked_loss": True, "chunked_mlp": True}
    before = [of(workspace.checkpoint, **step), of(workspace.checkpoint, **step, **way)]
    assert before[0] != before[1]
    enabled = ["transformers-fp16-logits", *switches._PATCHES.values()]
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", ",".join(enabled))
    assert [of(workspace.checkpoint, **step), of(workspace.checkpoint, **step, **way)] == before
    plan = gemma4_compat.plan_training(str(workspace.checkpoint), {"cpu": 1 << 40}, max_length=32, r=4)
    for switch, patch in switches._PATCHES.items():
        assert getattr(plan, switch)
        assert plan.reasons[switch] == f"GEMMA4_COMPAT_ENABLE names {patch}"
    assert "gemma4_compat.train_fast(model, mlp=True" in plan.code


def test_layers_are_replayed_where_they_can_be_and_graphs_fit() -> None:
    cut = training._described("E2B", "4bit")[0]
    step = {"adapter": 0, "optimizer": 0, "forward": 0, "backward": 1 << 30, "sizes": ()}
    graphs = counting.Kept(pool=200 << 20, buffers=56 << 20, captured=1)
    memories = {
        False: training_step.StepMemory(**step),
        True: training_step.StepMemory(**step, graphs=graphs),
    }
    never = memories | {True: training_step.StepMemory(**step, graphs=counting.Kept(reasons=("why",)))}

    def least(load: TrainingLoad, **options: bool) -> int:
        return training.layout.smallest_budget(cut, load, **options) + parts.MARGIN

    whole = least(memories[True].load, layers_leave=False)
    for budget, given, chosen, why in (
        (whole, memories, True, "graphs take 256 MiB, for sequences of one length"),
        (whole, never, False, "why"),
        (whole - (100 << 20), memories, True, "graphs take 256 MiB, and 6 more decoder layers are streamed"),
        (least(memories[True].load), memories, True, "graphs take 256 MiB, and 14 more decoder layers are streamed"),
        (least(memories[False].load), memories, False, "graphs take 256 MiB, and would not leave 512 MiB free"),
    ):
        found, reason = switches.replays((cut, 0, budget), given)
        assert (found, why in reason) == (chosen, True), reason


def test_graphs_of_streamed_layers_read_one_buffer_more() -> None:
    cut = training._described("E2B", "4bit")[0]
    step = {"adapter": 0, "optimizer": 0, "forward": 0, "backward": 0, "sizes": ()}
    found = []
    for captured in (0, 1):
        memory = training_step.StepMemory(**step, graphs=counting.Kept(captured=captured))
        budget = training.layout.smallest_budget(cut, memory.load)
        found.append(training._placed(cut, 0, budget, memory, {}, cpu=None).use[0])
    largest = max(layer.away.allocated for layer in cut.layers)
    assert [use.stream_buffers for use in found] == [2 * largest, 3 * largest]
    assert found[1].peak - found[0].peak >= largest


def test_a_plan_replays_layers_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs of 1 GiB for a step of 1 GiB. Without checkpointing nothing is captured."""

    def measure(model: Any, quantization: str | None, step: Step) -> training_step.StepMemory:
        kept = (
            counting.Kept(pool=1 << 30, captured=1) if step.gradient_checkpointing else counting.Kept(reasons=("no",))
        )
        graphs = kept if step.train_fast else counting.Kept()
        return training_step.StepMemory(adapter=0, optimizer=0, forward=0, backward=1 << 30, sizes=(), graphs=graphs)

    monkeypatch.setattr(training, "_measure", measure)
    plan = gemma4_compat.plan_training("E2B", "12GiB")
    assert plan.train_fast
    assert (plan.graphs, plan.activations, plan.changes["--no-train-fast"]) == (1 << 30, 1 << 30, -1 << 30)
    assert "gemma4_compat.train_fast(model, loss=False)\n" in plan.code
    assert "pad_to_multiple_of" in plan.code
    text = " ".join(plan_text(plan, width=90).split())
    for part in (
        "decoder layers replayed",
        "graphs of train_fast 1.00 GiB",
        "train fast: on: short steps are CPU-bound",
    ):
        assert part in text
    for options, why in (
        ({"gradient_checkpointing": False}, "no"),
        ({"gradient_checkpointing": False, "train_fast": True}, "no"),
        ({"max_length": 4096}, "above 2,048 tokens"),
    ):
        without_it = gemma4_compat.plan_training("E2B", "12GiB", **options)
        assert not without_it.train_fast
        assert why in without_it.reasons["train_fast"]
        assert "train_fast(model" not in without_it.code
        assert not any("train-fast" in option for option in without_it.changes)
    assert gemma4_compat.plan_training("E2B", "12GiB", train_fast=False).changes["--train-fast"] == 1 << 30
    asked = gemma4_compat.plan_training("E2B", "12GiB", max_length=8192, train_fast=True)
    assert asked.train_fast
    named = "max_tokens=8192, loss=False, mlp=False, windows=False, products=False"
    assert f"gemma4_compat.train_fast(model, {named})\n" in asked.code
    assert asked.changes["--no-train-fast"] == -1 << 30


@pytest.mark.parametrize("offloading", [False, True])
def test_what_train_fast_leaves_a_plan_leaves(workspace: Any, offloading: bool) -> None:
    """Its own words say why."""
    if offloading and not training_step.can_offload():
        pytest.skip("this transformers does not offload checkpointed activations")
    kept = of(workspace.checkpoint, max_length=16, r=2, activation_offloading=offloading, train_fast=True).graphs
    if not checkpointing.is_in_forward():
        assert kept.reasons[0].startswith("checkpointing is on, and needs transformers 5.23")
    elif offloading:
        assert kept.reasons == ("activation offloading or selective checkpointing is on",)
    else:
        assert not kept.reasons
    assert bool(kept.captured) is (checkpointing.is_in_forward() and not offloading)


@pytest.mark.full
def test_the_parts_add_up_to_the_peak(workspace: Any) -> None:
    plan = planned(str(workspace.checkpoint))
    parts = plan.weights + plan.buffers + plan.adapter + plan.optimizer_states + plan.activations + plan.graphs
    workspace_of_blas = 32 * MIB
    assert plan.peak == pytest.approx(1.01 * (parts + workspace_of_blas), rel=1e-6)
    assert plan.changes["--no-gradient-checkpointing"] > 0
    chunked = planned(str(workspace.checkpoint), chunked_loss=True)
    assert chunked.changes["--no-chunked-loss"] == -plan.changes["--chunked-loss"]
    assert chunked.activations - plan.activations == plan.changes["--chunked-loss"]
    assert plan.changes["--optim paged_adamw_8bit"] == -plan.optimizer_states
    assert planned(str(workspace.checkpoint), gradient_checkpointing=False).changes[
        "--gradient-checkpointing"
    ] == pytest.approx(-plan.changes["--no-gradient-checkpointing"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_length": 0}, "max_length is 0; it must be at least 1"),
        ({"r": -1}, "r is -1"),
        ({"optim": "adam"}, "optim 'adam' is unknown; use one of adamw_torch"),
        ({"quantize": "8bit"}, "training plans know 4bit"),
        ({"quantize": "none", "quantize_experts": True}, "quantize is 'none'; use '4bit'"),
        ({"vram": {0: "8GiB", 1: "8GiB"}}, "a training plan covers one accelerator"),
        ({"vram": 1000}, r"takes .* with all decoder layers streamed.* saves .*A shorter sequence"),
    ],
)
def test_what_cannot_be_is_one_error(workspace: Any, options: dict[str, Any], message: str) -> None:
    options = {"vram": "8GiB", "max_length": 8, **options}
    with pytest.raises(Gemma4CompatError, match=message):
        gemma4_compat.plan_training(str(workspace.checkpoint), **options)


@pytest.mark.parametrize("switched", [False, True])
def test_the_code_trains(workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switched: bool) -> None:
    """On a host without a GPU, whose main device is the CPU: one step, and an adapter is saved."""
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", "")
    plan = gemma4_compat.plan_training(
        str(workspace.checkpoint),
        {"cpu": 1 << 40},
        max_length=8,
        r=2,
        chunked_loss=switched,
        sliding_windows=switched,
    )
    assert ("loss=False" in plan.code) is not switched
    rows = [
        {"input_ids": torch.arange(8), "labels": torch.arange(8), "attention_mask": torch.ones(8, dtype=torch.long)}
    ]
    code = plan.code.replace('"adapter",\n', '"adapter",\n    max_steps=1, report_to=[], use_cpu=True,\n', 1)
    assert code != plan.code
    exec(compile(code, "plan", "exec"), {"DATASET": rows})
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["r"] == 2
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_can_be_planned_by_windows(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its sliding layers, in the forward pass and where checkpointing computes it again."""
    seen: list[Any] = []
    by_windows = windows._by_windows

    def spied(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[1])
        return by_windows(*args, **kwargs)

    monkeypatch.setattr(windows, "_by_windows", spied)
    monkeypatch.setattr(equal_layers, "_kind", id)  # no two layers are equal
    training._measure(variant, "4bit", Step(max_length=4096, padding=False, chunked_loss=True, sliding_windows=True))
    kinds = build.on_meta(variant)[0].config.get_text_config().layer_types
    assert len(seen) == 2 * kinds.count("sliding_attention")


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_can_be_planned(variant: str) -> None:
    plan = gemma4_compat.plan_training(variant, "80GiB", max_length=64)
    assert plan.adapter < plan.activations
    assert plan.trained > 10**7
    assert plan.changes["--chunked-loss"] <= 0  # of 64 tokens the loss need not be what the peak is made of


def says(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, [*arguments])
    assert result.exit_code == code, result.output
    return result


def test_the_command_prints_the_report(workspace: Any) -> None:
    arguments = ["--vram", "1GiB", "--max-length", "16", "--r", "4"]
    text = says("plan-training", str(workspace.checkpoint), *arguments).stdout
    for part in (
        "sequences of 16 tokens",
        "of rank 4",
        "gpu 0 [",
        "Expected peak: ",
        "--no-gradient-checkpointing",
        "gradient checkpointing: on: keeps one hidden state per layer",
        "sliding windows: off: not used on a GPU below 4,096 tokens",
        "DATASET",
    ):
        assert part in " ".join(text.split())
    report = text.partition("import gemma4_compat")[0]
    assert max(map(len, report.splitlines())) <= 100


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a command hands to the function, which plans nothing here."""
    found: dict[str, Any] = {}

    def refuse(model: str, vram: Any, **options: Any) -> None:
        found.update(options, model=model, vram=vram)
        raise Gemma4CompatError("not planned")

    monkeypatch.setattr(gemma4_compat, "plan_training", refuse)
    return found


def test_the_command_hands_its_options_over(given: dict[str, Any]) -> None:
    options = ["--max-length=8", "--r", "4", "--no-gradient-checkpointing", "--optim", "sgd"]
    says("plan-training", "E2B", "--vram", "8GiB", *options, code=2)
    assert [given[name] for name in ("max_length", "r", "gradient_checkpointing", "optim")] == [8, 4, False, "sgd"]


def test_a_plan_in_json_has_its_keys(workspace: Any) -> None:
    data = planned(str(workspace.checkpoint)).as_data()
    assert [data[key] for key in ("sequence", "rank", "checkpointing", "optimizer")] == [32, 16, True, "adamw_torch"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["plan", "E2B", "--max-length", "8"], "No such option: --max-length"),
        (["plan-training", "E2B", "--vision"], "No such option: --vision"),
        (["plan-training", "E2B", "--vram", "1GiB"], "a training plan covers one accelerator; give --vram once"),
    ],
)
def test_what_a_command_does_not_take_is_refused(arguments: list[str], message: str) -> None:
    assert message in says(*arguments, "--vram", "8GiB", code=2).stderr
