"""train_fast: streamed layers are replayed, with the bits of steps in which they are streamed and computed eagerly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers.modeling_layers")
import gemma4_compat
from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._gemma4.state import checkpointing
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.stand_ins import tape
from gemma4_compat._offload.transfer import copy_stream, module_groups, streaming
from gemma4_compat._training.captured import graphs, layers
from tests.helpers import pairwise
from tests.patches.training.parts import only
from tests.patches.training.test_transformers_chunked_loss import CLASSES, batch, built
from tests.unit.training.test_train_fast import (
    CHANGES,
    SETTLED,
    _penalty,
    _twice,
    adapted,
    gradients,
    replayed,
    same,
    settled,
    step,
    tapes,
)

__all__ = ["tapes"]
#: Decoder layers that are streamed, by place.
PLACES: dict[str, Callable[[int], bool]] = {"all": lambda _: True, "some": lambda place: place % 2 == 1}
STORES = ["memory", "disk"]
KINDS = ["without", "again", "reentrant"]  # of checkpointing


def streamed(
    workspace: Any, base: Any, *, places: str = "all", store: str = "memory", kind: str = "", **options: Any
) -> Any:
    """With these decoder layers off the device, and an adapter, the same each time.

    ``kind``: of checkpointing; the default is without reentry where layers are replayed beside it.
    """
    import torch
    from accelerate import dispatch_model

    placed = workspace.device_map(base, "none")
    names = [name for name in placed if ".layers." in name]
    away = {name for place, name in enumerate(names) if PLACES[places](place)}
    if store == "disk":
        model = workspace.dispatch_map(base, placed | dict.fromkeys(away, "disk"))
    else:  # a name of the CPU that accelerate does not take for the host
        main = torch.device(workspace.main)
        placed = {name: "cpu" if name in away else main for name in placed}
        model = dispatch_model(base, placed, main_device=main, skip_keys=tiny.skip_keys(base))
    torch.manual_seed(0)
    model = adapted(model, checkpointed=False, **options)
    kind = kind or ("again" if checkpointing.is_in_forward() else "without")
    if kind != "without":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind == "reentrant"})
        model.enable_input_require_grads()
    return model


def loaded(workspace: Any, quantization: str | None, kind: str) -> Any:
    """A model whose layers may be checkpointed in this way: not with reentry if they share keys and values."""
    if kind != "reentrant":
        return workspace.load(quantization)
    checkpoint = workspace.cached(tiny_models.build_checkpoint, text_variant="31B")
    return tiny.load(checkpoint, quantization, device=workspace.main)


def trained(model: Any, batches: list[dict[str, Any]], steps: int) -> list[Any]:
    """Losses of so many batches, taken round and round, and the adapter: two batches a step, of one optimizer."""
    import torch

    weights = [one for one in model.parameters() if one.requires_grad and one.device.type != "meta"]
    optimizer, losses = torch.optim.AdamW(weights, lr=0.1), []
    for number in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batches[number % len(batches)], use_cache=False).loss
        (loss / 2).backward()
        losses.append(loss.detach())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(one.detach().clone() for one in weights)]


def groups(model: Any) -> list[module_groups.ModuleGroup]:
    return [group for streamer in streaming.streamers(model) for group in streamer.groups()]


@pytest.fixture
def given(workspace: Any) -> dict[str, Any]:
    return batch(workspace, text_only=True)


@pytest.mark.parametrize(
    ("quantization", "places", "store", "kind"), pairwise([None, "4bit"], list(PLACES), STORES, KINDS)
)
def test_losses_and_adapters(
    monkeypatch: pytest.MonkeyPatch,
    workspace: Any,
    given: dict[str, Any],
    quantization: str | None,
    places: str,
    store: str,
    kind: str,
) -> None:
    """After optimizer steps with accumulation, on texts of two lengths."""
    if quantization:
        pytest.importorskip("bitsandbytes")
    if kind != "without" and not checkpointing.is_in_forward():
        pytest.skip("layers are replayed beside checkpointing from transformers 5.23 on")
    batches = [given, {name: value[:, 2:] for name, value in given.items()}]
    eager, model = (
        streamed(workspace, loaded(workspace, quantization, kind), places=places, store=store, kind=kind)
        for _ in range(2)
    )
    right = trained(eager, batches, 12)
    only(model, graphs=True)
    monkeypatch.setattr(graphs.Graph, "gradients_without", None)  # no backward pass needs it
    assert same(right, trained(model, batches, 12))
    number, counted = len(layers.decoder_layers(model)), gemma4_compat.statistics(model).training
    assert counted.reasons == ()
    assert (counted.captured, counted.replayed) == (2 * number, 2 * number * (6 + 1 - layers.CAPTURED_AT))
    assert [group.on_device for group in groups(model)] == [group.on_device for group in groups(eager)]
    assert not any(group.onloaded for group in groups(model))


@pytest.mark.parametrize("name", [one for one in CLASSES if "text" not in str(one)])
def test_every_class(workspace: Any, tmp_path: Path, name: str | None) -> None:
    base, text_only, variant = built(workspace, name, tmp_path)
    given = batch(workspace, text_only=text_only, variant=variant)
    model = streamed(workspace, base, kind="without")
    right = step(model, given)
    only(model, graphs=True)
    assert all(same(right, step(model, given)) for _ in range(SETTLED + 1))
    counted, number = gemma4_compat.statistics(model).training, len(layers.decoder_layers(model))
    assert counted.reasons == ()
    assert (counted.captured, counted.replayed) == (number, (SETTLED + 2 - layers.CAPTURED_AT) * number)


def _several(model: Any, given: dict[str, Any]) -> list[Any]:
    """Two forwards before their backward passes, the first of which comes last, and an answer between them."""
    import torch

    model.zero_grad()
    other = {**given, "input_ids": given["input_ids"].flip(1)}
    losses = [model(**one, use_cache=False).loss for one in (given, other)]
    model.eval()
    with torch.no_grad():
        logits = model(**given).logits
    model.train()
    for loss in reversed(losses):
        loss.backward()
    return [*(loss.detach() for loss in losses), logits, *gradients(model)]


@pytest.mark.parametrize("run", [_several, _twice, _penalty])
def test_other_passes(workspace: Any, given: dict[str, Any], run: Callable[..., list[Any]]) -> None:
    """Gradients of gradients are those of streamed layers up to rounding, as in layers that stay."""

    def model() -> Any:
        base = workspace.load().float()
        base.set_attn_implementation("eager")
        return streamed(workspace, base, places="some", kind="without")

    eager, fast = model(), only(model(), graphs=True)
    for _ in range(SETTLED):
        right, found = run(eager, given), run(fast, given)
        for one, other in zip(right, found, strict=True):
            assert one.equal(other) or (run is _penalty and (one - other).norm() < 1e-4 * other.norm())
    assert gemma4_compat.statistics(fast).training.replayed
    assert [group.on_device for group in groups(fast)] == [group.on_device for group in groups(eager)]


def _down(model: Any) -> Any:
    return layers.decoder_layers(model)[1].mlp.down_proj.base_layer


def _load_another(model: Any) -> None:
    module_hooks.offload_hook(_down(model)).weights_map["weight"].mul_(2)


def _store_another(model: Any) -> None:
    weights = module_hooks.offload_hook(_down(model)).weights_map
    weights.dataset.state_dict[f"{weights.prefix}weight"] = weights["weight"] * 2


def _scale_module(model: Any) -> None:
    _down(model).register_forward_hook(lambda _module, _inputs, output: output * 2)


OF_STREAMED = {"host memory is written": _load_another, "and replaced": _store_another, "a hook inside": _scale_module}
OTHERS = {name: change for name, change in CHANGES.items() if name != "a weight is replaced"}


@pytest.mark.parametrize("change", (found := OF_STREAMED | OTHERS).values(), ids=found)
def test_changes_are_noticed(workspace: Any, given: dict[str, Any], change: Callable[[Any], None]) -> None:
    import torch

    eager, model = (streamed(workspace, workspace.load()) for _ in range(2))
    settled(model, given)
    before = step(eager, given)
    for one in (eager, model):
        torch.manual_seed(1)  # another adapter is not the first again
        change(one)
    right = step(eager, given)
    assert not same(right, before)
    assert all(same(right, step(model, given)) for _ in range(SETTLED))
    assert gemma4_compat.statistics(model).training.replayed


def test_copies_are_as_many_and_begin_as_early(
    monkeypatch: pytest.MonkeyPatch, workspace: Any, given: dict[str, Any]
) -> None:
    """The copy of a layer's weights is issued before the layer before it is replayed."""
    done: list[tuple[str, Any]] = []
    start, copy_to = copy_stream.CopyStream.start_copy, module_groups.ModuleGroup.copy_to
    monkeypatch.setattr(
        copy_stream.CopyStream,
        "start_copy",
        lambda self, group, size: (done.append(("copy", group)), start(self, group, size)),
    )
    monkeypatch.setattr(
        module_groups.ModuleGroup, "copy_to", lambda self, memory: (done.append(("use", self)), copy_to(self, memory))
    )
    eager, model = (streamed(workspace, workspace.load()) for _ in range(2))
    settled(model, given)
    step(eager, given)
    place = {group: place for one in (eager, model) for place, group in enumerate(groups(one))}
    seen = {}
    for one in (eager, model):
        done.clear()
        step(one, given)
        seen[one] = [(what, place[group]) for what, group in done]
    last = len(groups(model)) - 1
    forward = [("copy", 0), *(two for one in range(last) for two in (("copy", one + 1), ("use", one))), ("use", last)]
    backward = [*(two for one in range(last, 0, -1) for two in (("copy", one - 1), ("use", one))), ("use", 0)]
    assert seen[model] == [*forward, *backward]
    assert seen[eager] == [(what, one) for what, one in seen[model] if what == "copy"]


def test_undoing_it(workspace: Any, given: dict[str, Any]) -> None:
    model = streamed(workspace, workspace.load())
    right = step(model, given)
    settled(model, given)
    gemma4_compat.train_fast(model, enabled=False)
    assert same(right, step(model, given))
    assert all(attached.TRAINING not in vars(layer) for layer in layers.decoder_layers(model))
    assert gemma4_compat.statistics(model).training.replayed == 0


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_layer_that_cannot_be_captured(
    monkeypatch: pytest.MonkeyPatch,
    workspace: Any,
    given: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    failing: int,
) -> None:
    """It is streamed as before, also where its forward was captured and its backward pass was not."""
    eager, model = (streamed(workspace, workspace.load()) for _ in range(2))
    capture, count = tape.Tape.capture, itertools.count(1)

    def short(self: Any, run: Callable[[], Any]) -> Any:
        found = capture(self, run)
        if next(count) == failing:
            raise RuntimeError("no memory\nfor this")
        return found

    monkeypatch.setattr(tape.Tape, "capture", short)
    only(model, graphs=True)
    right = step(eager, given)
    assert all(same(right, step(model, given)) for _ in range(SETTLED + 1))
    counted, number = gemma4_compat.statistics(model).training, len(layers.decoder_layers(model))
    assert counted.reasons == ("a layer cannot be captured: RuntimeError: no memory",)
    assert caplog.text.count(counted.reasons[0]) == 1
    assert counted.captured == number - 1
    assert [group.on_device for group in groups(model)] == [group.on_device for group in groups(eager)]


@pytest.mark.parametrize("parts", [{"loss": True}, {"mlp": 7}], ids=str)
def test_beside_other_parts(workspace: Any, given: dict[str, Any], parts: dict[str, Any]) -> None:
    eager, model = (only(streamed(workspace, workspace.load()), **parts) for _ in range(2))
    right = step(eager, given)
    assert same(right, step(settled(model, given, **parts), given))
    assert gemma4_compat.statistics(model).training.replayed


@pytest.mark.parametrize("where", ["experts", "nested"])
def test_experts_off_the_device(workspace: Any, tmp_path: Path, where: str) -> None:
    """All of a layer's experts are copied for a step, and the rest of the layer stays."""
    pytest.importorskip("bitsandbytes")
    import torch

    from tests.unit.offload.test_expert_lookup import placed

    def model() -> Any:
        base = tiny.load(tiny_models.build_checkpoint(tmp_path, variant="26B-A4B"), device=workspace.main)
        torch.manual_seed(0)
        return adapted(placed(workspace, base, where, "memory"), checkpointed=False)

    given = batch(workspace, text_only=True, variant="26B-A4B")
    eager, fast = model(), only(model(), graphs=True)
    right = step(eager, given)
    assert all(same(right, step(fast, given)) for _ in range(SETTLED))
    assert groups(fast)
    assert gemma4_compat.statistics(fast).training.reasons == ()
    assert gemma4_compat.statistics(fast).training.replayed


def test_a_forward_without_hooks(workspace: Any, given: dict[str, Any]) -> None:
    """Nothing streams its weights: accelerate's hooks inside bring them, and leave others to be streamed from then on,
    which is noticed within the next step.
    """
    import torch

    model = streamed(workspace, workspace.load(), kind="without")
    layer, seen = layers.decoder_layers(model)[1], []
    layer.register_forward_hook(lambda _, *call: seen.append(call), with_kwargs=True)
    settled(model, given)
    args, named, right = seen[-1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.forward(*args, **named).equal(right)
    assert "called without the hooks" in " ".join(gemma4_compat.statistics(model).training.reasons)
    expected = step(streamed(workspace, workspace.load(), kind="without"), given)
    assert all(same(expected, step(model, given)) for _ in range(SETTLED))
    assert replayed(model, lambda: step(model, given)) == len(layers.decoder_layers(model))


def test_hooks_that_go_before_the_backward_pass(workspace: Any, given: dict[str, Any]) -> None:
    """A model is dispatched anew between forward and backward pass: the weights are those of the forward."""

    def interrupted(model: Any) -> list[Any]:
        model.zero_grad()
        loss = model(**given, use_cache=False).loss
        streaming.uninstall(model)
        loss.backward()
        return [loss.detach(), *gradients(model)]

    eager, model = (streamed(workspace, workspace.load()) for _ in range(2))
    settled(model, given)
    assert same(interrupted(eager), interrupted(model))
