"""train_fast: replayed layers have the bits of layers without a graph, in every step, and notice what changes."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers.modeling_layers")
import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.attention import block_layout, products, windows
from gemma4_compat._gemma4.cache import cache_names, shared_kv
from gemma4_compat._gemma4.state import checkpointing
from gemma4_compat._graphs import recording
from gemma4_compat._graphs.statistics import TrainingStatistics
from gemma4_compat._lab import tiny_models
from gemma4_compat._lab.stand_ins.tape import standing_in
from gemma4_compat._offload.transfer import streaming
from gemma4_compat._plan.training_step import TARGETS
from gemma4_compat._training.captured import calls, graphs, layers
from tests.patches.training.parts import only
from tests.patches.training.test_transformers_chunked_loss import CLASSES, batch, built
from tests.unit.gemma4.attention.test_products import deterministic

__all__ = ["deterministic"]

#: Steps until every layer is captured, and one more.
SETTLED = layers.CAPTURED_AT + 1


@pytest.fixture(autouse=True)
def tapes() -> Iterator[None]:
    with standing_in(recording.RECORDERS):
        yield


def adapted(model: Any, *, checkpointed: bool | None = None, **options: Any) -> Any:
    """With LoRA on the decoder, in training mode, and checkpointing where it may be on."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**({"r": 4, "target_modules": TARGETS, "init_lora_weights": False} | options))
    found = get_peft_model(model.requires_grad_(False), config)
    if checkpointing.is_in_forward() if checkpointed is None else checkpointed:
        found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found.enable_input_require_grads()
    return found.train()


def step(model: Any, given: dict[str, Any], scale: float = 1.0) -> list[Any]:
    """The loss, and each gradient."""
    import torch

    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**given, use_cache=False).loss
    (loss * scale).backward()
    return [loss.detach(), *gradients(model)]


def gradients(model: Any) -> list[Any]:
    found = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert found
    return [gradient.clone() for gradient in found]


def same(right: list[Any], found: list[Any]) -> bool:
    return len(right) == len(found) and all(one.equal(other) for one, other in zip(right, found))


def settled(model: Any, given: dict[str, Any], **parts: Any) -> Any:
    """With graphs, after steps in which everything was captured."""
    assert only(model, graphs=True, **parts) is model
    for _ in range(SETTLED):
        step(model, given)
    return model


def replayed(model: Any, run: Callable[[], Any]) -> int:
    """How many layers ``run`` replays."""
    before = gemma4_compat.statistics(model).training.replayed
    run()
    return gemma4_compat.statistics(model).training.replayed - before


@pytest.fixture
def model(workspace: Any) -> Any:
    return adapted(workspace.load())


@pytest.fixture
def given(workspace: Any) -> dict[str, Any]:
    return batch(workspace, text_only=True)


@pytest.mark.parametrize("checkpointed", [None, False])
@pytest.mark.parametrize("name", CLASSES)
def test_every_class(
    monkeypatch: pytest.MonkeyPatch, workspace: Any, tmp_path: Path, name: str | None, checkpointed: bool | None
) -> None:
    base, text_only, variant = built(workspace, name, tmp_path)
    model, given = adapted(base, checkpointed=checkpointed), batch(workspace, text_only=text_only, variant=variant)
    right = step(model, given)
    only(model, graphs=True)
    monkeypatch.setattr(graphs.Graph, "gradients_without", None)  # no backward pass needs it
    assert all(same(right, step(model, given)) for _ in range(SETTLED + 1))
    counted = gemma4_compat.statistics(model).training
    number = len(layers.decoder_layers(model))
    assert counted.reasons == ()
    assert (counted.captured, counted.replayed) == (number, (SETTLED + 2 - layers.CAPTURED_AT) * number)


@pytest.mark.parametrize("window", [8, 64])
@pytest.mark.parametrize("name", [None, "26B-A4B"])
def test_a_loop_that_makes_a_cache(workspace: Any, tmp_path: Path, name: str | None, window: int) -> None:
    """Without ``use_cache=False``: layers are replayed, and the cache that is returned holds what it does without."""
    import torch

    base, text_only, variant = built(workspace, name, tmp_path)
    for module in base.modules():
        if hasattr(module, "sliding_window"):
            module.sliding_window = window
    base.config.get_text_config().sliding_window = window
    model, given = adapted(base, checkpointed=False), batch(workspace, text_only=text_only, variant=variant)

    def run(model: Any) -> tuple[list[Any], list[Any]]:
        model.zero_grad()
        outputs = model(**given)
        outputs.loss.backward()
        cached = [vars(layer) for layer in cache_names.cache_in(outputs).layers]
        return [outputs.loss.detach(), *gradients(model)], cached

    right, cached = run(model)
    only(model, graphs=True)
    for _ in range(SETTLED):
        found, now = run(model)
        assert same(right, found)
        for one, other in zip(now, cached, strict=True):
            assert one.keys() == other.keys()
            for attribute, value in other.items():
                if isinstance(value, torch.Tensor):
                    assert one[attribute].equal(value)
                    assert one[attribute].requires_grad == value.requires_grad
                else:
                    assert one[attribute] == value
    number = len(layers.decoder_layers(model))
    counted = gemma4_compat.statistics(model).training
    if shared_kv.NAME in inspect.signature(type(base.get_decoder().layers[0].self_attn).forward).parameters:
        assert (counted.captured, counted.replayed, counted.reasons) == (number, 2 * number, ())
    else:  # before 5.5.2
        assert "use_cache=False" in str(counted.reasons)


def test_caches_that_layers_read(model: Any, given: dict[str, Any]) -> None:
    """One with room for a length, and one with earlier tokens: the reason says what to do."""
    from transformers import DynamicCache, StaticCache

    config = model.config.get_text_config()
    model.gradient_checkpointing_disable()
    plain = copy.deepcopy(model)
    only(model, graphs=True)
    for one in (model, plain):
        cache = DynamicCache(config=config)
        losses = [one(**given, past_key_values=cache).loss for _ in range(2)]
        losses += [one(**given, past_key_values=StaticCache(config=config, max_cache_len=64)).loss]
        sum(losses).backward()
    assert same(gradients(plain), gradients(model))
    reasons = gemma4_compat.statistics(model).training.reasons
    assert [reason for reason in reasons if "StaticCache; pass use_cache=False" in reason]
    assert [reason for reason in reasons if "holds tokens; pass use_cache=False" in reason]


@pytest.mark.parametrize("names", [["position_ids"], ["input_ids", "labels", "attention_mask"]])
def test_tensors_of_inference_mode(model: Any, given: dict[str, Any], names: list[str]) -> None:
    """They have no version, and autograd keeps none of them. They may be written to between steps."""
    import torch

    given = {name: given[name] for name in ("input_ids", "attention_mask", "labels")}
    given["position_ids"] = torch.arange(given["input_ids"].shape[1])[None]
    with torch.inference_mode():
        given |= {name: given[name].clone() for name in names}
    other = settled(copy.deepcopy(model), given)
    for _ in range(2):
        right = step(model, given)
        assert same(right, step(other, given))
        with torch.inference_mode():
            if names == ["position_ids"]:
                given["position_ids"] += 1
    assert gemma4_compat.statistics(other).training.replayed


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_whole_models_that_are_trained(workspace: Any, given: dict[str, Any], dtype: str) -> None:
    import torch

    model = workspace.load().to(getattr(torch, dtype)).train()
    right = step(model, given)
    assert same(right, step(settled(model, given), given))


def test_weights_change_in_place(model: Any, given: dict[str, Any]) -> None:
    """Adapters after eight steps of an optimizer, with accumulation of gradients and a scaled loss."""
    import torch

    def trained(model: Any) -> list[Any]:
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
        for number in range(8):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**given, use_cache=False).loss
            (loss / (1 + number % 2)).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return [one.detach().clone() for one in model.parameters() if one.requires_grad]

    other = only(copy.deepcopy(model), graphs=True)
    right, found = trained(model), trained(other)
    assert gemma4_compat.statistics(other).training.replayed
    assert same(right, found)


def test_two_forwards_before_their_backward_passes(workspace: Any, model: Any, given: dict[str, Any]) -> None:
    """Inputs in shared memory are those of the right call, and masks are copied again."""
    import torch

    other = {**given, "input_ids": given["input_ids"].flip(1), "attention_mask": given["attention_mask"].clone()}
    other["attention_mask"][:, :3] = 0

    def both() -> list[Any]:
        model.zero_grad()
        losses = [model(**one, use_cache=False).loss for one in (given, other)]
        for loss in losses:
            loss.backward()
        return [*torch.stack(losses).detach(), *gradients(model)]

    right = both()
    only(model, graphs=True)
    for _ in range(SETTLED):
        both()
    assert replayed(model, lambda: None) == 0
    assert same(right, both())
    assert gemma4_compat.statistics(model).training.replayed > 0


def test_4_bit_layers(workspace: Any, given: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    model = adapted(workspace.load("4bit"))
    right = step(model, given)
    assert same(right, step(settled(model, given), given))


def test_trainer(workspace: Any, model: Any, given: dict[str, Any], tmp_path: Path) -> None:
    """Losses, and the adapter after eight steps with accumulation, clipping and a schedule."""
    from transformers import Trainer, TrainingArguments

    data = [{name: value[0] for name, value in given.items()}] * 16

    def trained(model: Any) -> tuple[list[Any], list[Any]]:
        arguments = TrainingArguments(
            str(tmp_path / "trainer"),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            gradient_checkpointing=checkpointing.is_in_forward(),
            learning_rate=0.01,
            max_steps=8,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, [one.detach() for one in model.parameters() if one.requires_grad]

    other = only(copy.deepcopy(model), graphs=True)
    (right, weights), (found, other_weights) = trained(model), trained(other)
    counted = gemma4_compat.statistics(other).training
    assert counted.reasons == ()
    assert counted.replayed > counted.eager > 0
    assert found == right
    assert same(weights, other_weights)


def spied(ran: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which notes that it ran."""
    return lambda *args, **kwargs: ran.append(name) or function(*args, **kwargs)  # type: ignore[func-returns-value]


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, dict[str, Any], list[str]]:
    """A model with wide heads, a text of which sliding layers see windows and others products, and calls of both."""
    import torch
    import transformers

    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", windows.ID)
    for module, name in ((windows, "ROUNDED"), (windows, "UNIT"), (block_layout, "UNIT")):
        monkeypatch.setattr(module, name, 64)
    for name in ("_MOST", "_WINDOW", "UNIT"):
        monkeypatch.setattr(products, name, 64)
    monkeypatch.setattr(windows, "MULTIPLYING", ("cpu",))
    ran: list[str] = []
    for module, name in ((windows, "_by_windows"), (products, "attention")):
        monkeypatch.setattr(module, name, spied(ran, name, getattr(module, name)))
    folder = tiny_models.build_checkpoint(tmp_path, variant="E2B", full_width=512)
    model = adapted(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    ids = torch.randint(3, 90, (1, 320), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}, ran


def padded(given: dict[str, Any], tokens: int) -> dict[str, Any]:
    mask = given["attention_mask"].clone()
    mask[:, :tokens] = 0
    return {**given, "attention_mask": mask, "labels": given["labels"].masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("padding", [0, 70])
@pytest.mark.parametrize("used", ["_by_windows", "attention"], ids=["windows", "products"])
def test_windows_and_products(long: tuple[Any, dict[str, Any], list[str]], used: str, padding: int) -> None:
    """A graph serves texts of any padding, with the bits of a step without one."""
    model, given, ran = long
    text, another = (padded(given, tokens) if tokens else given for tokens in (padding, 130))
    only(model, graphs=True, windows=True, products=used == "attention")
    right, other = step(model, text), step(model, another)
    assert set(ran) == {used}
    assert all(same(right, step(model, text)) for _ in range(SETTLED + 1))
    found, before = layers.decoder_layers(model), gemma4_compat.statistics(model).training
    wide = sum(not layer.self_attn.is_sliding for layer in found)
    ran.clear()
    assert same(other, step(model, another))
    assert same(right, step(model, text))
    again = gemma4_compat.statistics(model).training
    assert (again.reasons, again.captured) == ((), len(found))
    assert again.replayed - before.replayed == 2 * len(found) - (0 if padding else wide)  # which get no mask without
    assert not (ran and padding)


@pytest.mark.parametrize("products", [False, True])
def test_the_same_whether_algorithms_are_deterministic(
    long: tuple[Any, dict[str, Any], list[str]], request: pytest.FixtureRequest, products: bool
) -> None:
    """Products need no switch for that. Without them windows are as PyTorch's kernels are."""
    model, given, ran = long
    only(model, windows=True, products=products)
    found = step(model, given)
    request.getfixturevalue("deterministic")
    assert same(found, step(model, given))
    assert set(ran) == {"attention" if products else "_by_windows"}


def test_parts_that_are_named_off(
    long: tuple[Any, dict[str, Any], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever GEMMA4_COMPAT_ENABLE says."""
    model, given, ran = long
    settled(model, given, windows=True, products=True)
    ran.clear()
    settled(model, given)
    found = step(model, given)
    gemma4_compat.train_fast(model, enabled=False)
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", "")
    assert same(step(model, given), found)
    assert ran == []


@pytest.mark.parametrize("parts", [{"loss": True}, {"mlp": 7}], ids=str)
def test_beside_other_parts(model: Any, given: dict[str, Any], parts: dict[str, Any]) -> None:
    right = step(only(model, **parts), given)
    assert same(right, step(settled(model, given, **parts), given))
    assert gemma4_compat.statistics(model).training.replayed


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another adapter": lambda model: (
        model.add_adapter("second", model.peft_config["default"]) or model.set_adapter("second")
    ),
    "a weight is replaced": lambda model: _replace_weight(model),
    "a hook changes a layer's inside": lambda model: layers.decoder_layers(model)[1].mlp.register_forward_hook(
        lambda _module, _inputs, output: output * 2
    ),
    "a scalar of PEFT": lambda model: _scale(model),
}


def _replace_weight(model: Any) -> None:
    import torch

    down = layers.decoder_layers(model)[1].mlp.down_proj.base_layer
    down.weight = torch.nn.Parameter(down.weight.detach() * 2, requires_grad=False)


def _scale(model: Any) -> None:
    for layer in layers.decoder_layers(model):
        layer.mlp.down_proj.scaling["default"] *= 3.0


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(model: Any, given: dict[str, Any], change: str) -> None:
    other = copy.deepcopy(model)
    settled(model, given)
    for one in (model, other):
        import torch

        torch.manual_seed(0)
        CHANGES[change](one)
    right = step(other, given)
    assert all(same(right, step(model, given)) for _ in range(SETTLED))


@pytest.mark.parametrize("wanted", [True, False])
def test_weights_that_are_trained_from_now_on(model: Any, given: dict[str, Any], wanted: bool) -> None:
    """And those that no longer are. Nothing is captured in vain where they stay as they are."""
    other = copy.deepcopy(model)
    for one in (model, other):
        trained(one, "lora_A", not wanted)
    settled(model, given)
    before = gemma4_compat.statistics(model).training
    for one in (model, other):
        trained(one, "lora_A", wanted)
    right = step(other, given)
    assert all(same(right, step(model, given)) for _ in range(SETTLED))
    counted = gemma4_compat.statistics(model).training
    assert counted.captured == 2 * before.captured
    assert counted.reasons == ()
    assert [weight.grad is None for weight in model.parameters()] == [one.grad is None for one in other.parameters()]


def trained(model: Any, part: str, wanted: bool) -> None:
    for name, weight in model.named_parameters():
        if part in name:
            weight.requires_grad_(wanted)


@pytest.mark.skipif("not checkpointing.is_in_forward()", reason="without checkpointing, autograd keeps the old weight")
def _penalty(model: Any, given: dict[str, Any]) -> list[Any]:
    """A gradient, and what comes of its square: loss and gradients, then gradients of gradients."""
    import torch

    weights = [one for one in model.parameters() if one.requires_grad]
    model.zero_grad()
    loss = model(**given, use_cache=False).loss
    found = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    sum(one.square().sum() for one in found if one is not None).backward()
    return [loss.detach(), *(one.detach() for one in found if one is not None), *gradients(model)]


def _twice(model: Any, given: dict[str, Any]) -> list[Any]:
    model.zero_grad()
    loss = model(**given, use_cache=False).loss
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    return [loss.detach(), *gradients(model)]


def _functional(model: Any, given: dict[str, Any]) -> list[Any]:
    import torch

    weights = {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}

    def loss(weights: dict[str, Any]) -> Any:
        return torch.func.functional_call(model, weights, (), {**given, "use_cache": False}).loss

    return list(torch.func.grad(loss)(weights).values())


@pytest.mark.parametrize("run", [_penalty, _twice, _functional])
def test_other_derivatives(
    workspace: Any, given: dict[str, Any], run: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients of gradients are upstream's up to rounding: a backward pass that is recorded runs without a graph."""
    base = workspace.load().float()
    base.set_attn_implementation("eager")
    model = adapted(base, checkpointed=False)
    right = run(copy.deepcopy(model), given)
    only(model, graphs=True)
    found = [run(model, given) for _ in range(SETTLED)]
    assert bool(gemma4_compat.statistics(model).training.replayed) == (run is not _functional)
    for each in found:
        assert len(each) == len(right)
        for one, other in zip(each, right, strict=True):
            assert one.equal(other) or (run is _penalty and (one - other).norm() < 1e-4 * other.norm())
    if run is _penalty:
        once = len(right) // 2  # the loss and first gradients
        assert same(right[:once], found[-1][:once])
        assert sum("create_graph=True" in one.getMessage() for one in caplog.records) == 1


def test_weights_that_two_layers_share(workspace: Any, given: dict[str, Any]) -> None:
    """Each use of a weight has its own gradient, also where the input of a layer depends on the same weight."""
    base = workspace.load().float()
    base.set_attn_implementation("eager")
    model = adapted(base, checkpointed=False)
    first, second, *_ = layers.decoder_layers(model)
    for name, one in first.mlp.down_proj.lora_A.items():
        second.mlp.down_proj.lora_A[name] = one
    right = _penalty(copy.deepcopy(model), given)
    only(model, graphs=True)
    found = [_penalty(model, given) for _ in range(SETTLED)][-1]
    assert gemma4_compat.statistics(model).training.replayed
    assert all((one - other).norm() <= 1e-4 * other.norm() for one, other in zip(found, right, strict=True))


def test_a_weight_that_moves_between_forward_and_backward(model: Any, given: dict[str, Any]) -> None:
    """Checkpointing computes the layer again with the weight that is there then, and so does this."""

    def interrupted(model: Any) -> list[Any]:
        model.zero_grad()
        loss = model(**given, use_cache=False).loss
        _replace_weight(model)
        loss.backward()
        return [loss.detach(), *gradients(model)]

    other = copy.deepcopy(model)
    settled(model, given)
    for _ in range(SETTLED):
        model(**given, use_cache=False)
    assert same(interrupted(other), interrupted(model))


def _hooked(model: Any) -> Any:
    for layer in layers.decoder_layers(model):
        layer.mlp.register_forward_hook(lambda _module, _inputs, output: output * 1)
    return model


def _left_to_accelerate(model: Any) -> Any:
    streaming.uninstall(model)
    return model


def _seen(model: Any) -> Any:
    for layer in layers.decoder_layers(model):
        layer.mlp.register_full_backward_hook(lambda _module, _inputs, _outputs: None)
    return model


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda workspace: adapted(workspace.load(), lora_dropout=0.5), "Dropout draws random numbers"),
        (lambda workspace: _left_to_accelerate(adapted(workspace.split())), "their weights are offloaded, and not"),
        (lambda workspace: adapted(workspace.load("8bit")), "8-bit layers of bitsandbytes synchronize"),
        pytest.param(
            lambda workspace: adapted(workspace.load(), checkpointed=True),
            "checkpointing is on, and needs transformers 5.23",
            marks=pytest.mark.skipif("checkpointing.is_in_forward()", reason="of older releases"),
        ),
        (lambda workspace: _hooked(adapted(workspace.load())), "a hook on Gemma4TextMLP has to run"),
        (lambda workspace: _seen(adapted(workspace.load())), "a hook on Gemma4TextMLP has to run"),
    ],
    ids=["dropout", "offloaded layers", "8 bits", "checkpointing", "a hook inside", "a backward hook inside"],
)
def test_layers_that_run_as_before(
    workspace: Any, given: dict[str, Any], made: Callable[[Any], Any], reason: str
) -> None:
    import torch

    model = made(workspace)
    torch.manual_seed(0)
    right = step(model, given)
    only(model, graphs=True)
    for _ in range(SETTLED):
        torch.manual_seed(0)
        assert same(right, step(model, given))
    counted = gemma4_compat.statistics(model).training
    assert re.search(reason, " ".join(counted.reasons))
    assert counted.replayed < counted.eager
    if "offloaded" in reason:  # some layers: the others are replayed
        assert counted.captured
        assert counted.replayed == 2 * counted.captured


def test_a_model_that_changes_every_few_steps(model: Any, given: dict[str, Any]) -> None:
    """It is given up, and answers as it would."""
    other = copy.deepcopy(model)
    only(model, graphs=True)
    for _ in range(layers._MAX_IN_VAIN + 1):
        for one in (model, other):
            _replace_weight(one)
        right = step(other, given)
        assert all(same(right, step(model, given)) for _ in range(SETTLED))
    counted = gemma4_compat.statistics(model).training
    assert counted.captured == layers._MAX_IN_VAIN * len(layers.decoder_layers(model))
    assert "changes every few steps" in " ".join(counted.reasons)


@pytest.mark.parametrize("kept", ["on the host", "nowhere"])
def test_activations_that_something_else_keeps(workspace: Any, given: dict[str, Any], kept: str) -> None:
    """Layers inside another checkpoint, or hooks on saved tensors, run as before: both would see other tensors."""
    import torch
    from torch.utils.checkpoint import checkpoint

    model = adapted(workspace.load(), checkpointed=False)

    def around() -> list[Any]:
        model.zero_grad()
        if kept == "nowhere":
            loss = checkpoint(lambda: model(**given, use_cache=False).loss, use_reentrant=False)
        else:
            with torch.autograd.graph.save_on_cpu():
                loss = model(**given, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *gradients(model)]

    right = around()
    settled(model, given)
    assert replayed(model, lambda: step(model, given))
    assert same(right, around())
    assert replayed(model, around) == 0
    assert "hooks on saved tensors are active" in " ".join(gemma4_compat.statistics(model).training.reasons)


def test_a_torch_that_does_not_say_whether_hooks_are_active(
    workspace: Any, model: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then something else may keep activations, so layers run as before."""
    monkeypatch.setattr("gemma4_compat._gemma4.state.checkpointing._TOP", "absent")
    only(model, graphs=True)
    for _ in range(layers.CAPTURED_AT + 1):
        step(model, given)
    counted = gemma4_compat.statistics(model).training
    assert counted.replayed == counted.captured == 0
    assert counted.reasons == ("this torch does not say whether hooks on saved tensors are active",)


def test_lengths_that_do_not_come_back(workspace: Any, model: Any, given: dict[str, Any]) -> None:
    """Only the first kinds that come often are captured; the log says what to do."""
    only(model, graphs=True)
    number = len(layers.decoder_layers(model))
    for length in range(9, 9 + calls.MAX_KINDS + 1):
        cut = {name: value[:, -length:] for name, value in given.items()}
        for _ in range(SETTLED):
            step(model, cut)
    counted = gemma4_compat.statistics(model).training
    assert counted.captured == calls.MAX_KINDS * number
    assert "pad to a few lengths" in " ".join(counted.reasons)


def test_long_calls_and_calls_without_gradients_are_left_alone(model: Any, given: dict[str, Any]) -> None:
    import torch

    settled(model, given)
    with torch.no_grad():
        assert replayed(model, lambda: model(**given, use_cache=False)) == 0
    model.eval()
    assert replayed(model, lambda: model(**given, use_cache=False).loss.backward()) == 0
    model.train()
    tokens = given["input_ids"].numel()
    for most in (tokens - 1, tokens):
        only(model, graphs=True, max_tokens=most)
        for _ in range(SETTLED):
            step(model, given)
        assert (replayed(model, lambda: step(model, given)) > 0) == (most == tokens)
        assert gemma4_compat.statistics(model).training.reasons == ()


def test_a_layer_that_cannot_be_captured_runs_as_before(
    monkeypatch: pytest.MonkeyPatch, model: Any, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    right = step(model, given)

    def short(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory\nfor this")

    monkeypatch.setattr(graphs, "Graph", short)
    only(model, graphs=True)
    assert all(same(right, step(model, given)) for _ in range(SETTLED))
    (reason,) = gemma4_compat.statistics(model).training.reasons
    assert reason == "a layer cannot be captured: RuntimeError: no memory"
    assert caplog.text.count(reason) == 1


def test_copies_and_pickles_train_without_replays(model: Any, given: dict[str, Any]) -> None:
    right = step(model, given)
    settled(model, given)
    other, layer = copy.deepcopy(model), layers.decoder_layers(model)[0]
    assert gemma4_compat.statistics(other).training == TrainingStatistics()
    assert same(right, step(other, given))
    assert vars(pickle.loads(pickle.dumps(layer)))[attached.TRAINING] is None
    assert replayed(model, lambda: step(model, given))


def test_undoing_it_releases_everything(model: Any, given: dict[str, Any]) -> None:
    import torch

    def living() -> int:
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    for _ in range(2):
        step(model, given)
    model.zero_grad()
    before = living()
    settled(model, given)
    model.zero_grad()
    assert living() > before
    training = weakref.ref(vars(layers.decoder_layers(model)[0])[attached.TRAINING])
    gemma4_compat.train_fast(model, enabled=False)
    assert living() == before
    assert training() is None
    assert all("forward" not in vars(layer) for layer in layers.decoder_layers(model))
    assert gemma4_compat.statistics(model).training == TrainingStatistics()


def test_a_model_that_is_deleted_is_released(workspace: Any, given: dict[str, Any]) -> None:
    model = settled(adapted(workspace.load()), given)
    layer = weakref.ref(layers.decoder_layers(model)[0])
    training = weakref.ref(vars(layer())[attached.TRAINING])
    del model
    gc.collect()
    assert layer() is None
    assert training() is None


def test_other_models_are_refused() -> None:
    import torch

    with pytest.raises(Gemma4CompatError, match="Linear"):
        gemma4_compat.train_fast(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("most", [0, -1, 2048.0, True, "2048", None])
def test_max_tokens_that_is_no_positive_integer(model: Any, most: Any) -> None:
    """The model stays as it is."""
    only(model, graphs=True)
    before = vars(layers.decoder_layers(model)[0])[attached.TRAINING]
    with pytest.raises(Gemma4CompatError, match=f"max_tokens .* got {most!r}"):
        gemma4_compat.train_fast(model, max_tokens=most)
    assert vars(layers.decoder_layers(model)[0])[attached.TRAINING] is before


def test_arguments_that_nobody_can_compare() -> None:
    with pytest.raises(graphs.UnknownArgumentError, match="object"):
        graphs.without_tensors({"x": (1, object())})
