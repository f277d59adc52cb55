"""What a user changes between two calls, or two tokens, is noticed before a replay."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.state import snapshots
from gemma4_compat._graphs import statistics
from tests.unit.generation.calls import (
    ATTRIBUTES,
    CHANGES,
    CHANGES_OF_QUANTIZED,
    TABLE,
    Models,
    ask,
    base,
    compared,
    differ,
    generate,
    layers,
    reads_attributes,
    static_cache,
    steps,
    text,
)

pytestmark = pytest.mark.usefixtures("tapes")
Change = Callable[[Any], Any]


def noticed(model: Any, change: Change) -> None:
    before = compared(model, ask(model))
    change(model)
    assert differ(before, compared(model, ask(model)))
    assert steps(model).reasons == ()


@pytest.mark.parametrize("what", CHANGES)
def test_a_change(models: Models, what: str) -> None:
    noticed(models.fresh(None), CHANGES[what])


@pytest.mark.parametrize("what", ATTRIBUTES)
def test_an_attribute_that_a_forward_reads(models: Models, what: str) -> None:
    model = models.fresh(None)
    mlp = layers(model)[1].mlp
    reads_attributes(mlp)
    noticed(model, lambda _: ATTRIBUTES[what](mlp))


@pytest.mark.full
@pytest.mark.parametrize("what", CHANGES_OF_QUANTIZED)
def test_a_change_of_a_quantized_model(models: Models, what: str) -> None:
    noticed(models.fresh(), CHANGES_OF_QUANTIZED[what])


def test_a_forward_of_a_class(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.fresh(None)
    kind = type(layers(model)[0].mlp)
    forward = kind.forward

    def change(_model: Any) -> None:
        monkeypatch.setattr(kind, "forward", lambda self, states: -forward(self, states))

    noticed(model, change)


def test_a_function_that_forwards_call(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.fresh(None)
    module = sys.modules[type(layers(model)[0].self_attn).__module__]
    rotary = module.apply_rotary_pos_emb

    def change(_model: Any) -> None:
        monkeypatch.setattr(
            module, "apply_rotary_pos_emb", lambda states, *args, **kwargs: 2 * rotary(states, *args, **kwargs)
        )

    noticed(model, change)


def test_a_registered_attention(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    model = models.fresh(None)
    sdpa = FUNCTIONS["sdpa"]

    def change(_model: Any) -> None:
        def halved(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            return sdpa(module, query / 2, *args, **kwargs)

        monkeypatch.setitem(FUNCTIONS, "sdpa", halved)

    noticed(model, change)


def test_a_cast(models: Models) -> None:
    import torch

    def cast(model: Any) -> None:
        model.to(torch.float32)
        vars(model).pop("_cache", None)  # of bf16, which transformers keeps (before 5.15) and does not look at

    noticed(models.fresh(None), cast)


def test_a_move_to_where_it_is(models: Models) -> None:
    model = models.fresh(None)
    compared(model, ask(model))
    before = steps(model)
    generate(model.to("cpu"), text(model))
    assert (steps(model).captured, steps(model).eager) == (before.captured, before.eager)


def test_resized_embeddings(models: Models) -> None:
    model = models.fresh(None)
    compared(model, ask(model))
    model.resize_token_embeddings(320)
    (found,) = compared(model, ask(model))
    assert found.logits[-1].shape[-1] == 320


def test_another_attention_and_back(models: Models) -> None:
    model = models.fresh()
    compared(model, ask(model))
    captured = steps(model).captured
    model.set_attn_implementation("eager")
    compared(model, ask(model))
    assert steps(model).captured == captured + 1
    model.set_attn_implementation("sdpa")
    compared(model, ask(model))


def test_another_cache(models: Models) -> None:
    model = models.fresh()
    for length in (64, 48, 64):
        cache = static_cache(model, length)
        for seed in (7, 8):
            one, other = [
                generate(model, text(model, 9, seed=seed), way, past_key_values=given)
                for way, given in (({}, cache), ({"disable_compile": True}, static_cache(model, length)))
            ]
            assert one.sequences.equal(other.sequences)
            cache.reset()
    assert steps(model).reasons == ()
    assert steps(model).replayed > 0


@pytest.mark.parametrize(
    ("kind", "where"),
    [("register_forward_hook", "model"), ("register_forward_pre_hook", "layer"), ("register_forward_hook", "inside")],
)
def test_a_hook_of_the_user_runs_for_every_token_until_it_is_removed(models: Models, kind: str, where: str) -> None:
    model = models.fresh()
    (before,) = compared(model, ask(model))
    layer = layers(model)[1]
    module = {"model": model, "layer": layer, "inside": layer.mlp.act_fn}[where]
    seen: list[int] = []
    handle = getattr(module, kind)(lambda *_: seen.append(1))
    compared(model, ask(model), replays=False)
    assert len(seen) == 2 * len(before.logits)
    assert any("a hook on" in reason for reason in steps(model).reasons)
    handle.remove()
    compared(model, ask(model))


def test_a_hook_on_every_module_runs_for_every_token_until_it_is_removed(models: Models) -> None:
    import torch

    model = models.fresh(None)
    norm = layers(model)[1].input_layernorm
    (before,) = compared(model, ask(model))
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _given, output: -output if module is norm else None
    )
    try:
        (hooked,) = compared(model, ask(model), replays=False)
    finally:
        handle.remove()
    assert differ([before], [hooked])
    assert any("a hook on every module" in reason for reason in steps(model).reasons)
    assert not differ([before], compared(model, ask(model)))


def test_a_method_that_a_class_had_not(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.fresh(None)
    kind = type(layers(model)[0].mlp)
    call = kind.__call__

    def change(_model: Any) -> None:
        monkeypatch.setattr(kind, "__call__", lambda self, states: -call(self, states))

    noticed(model, change)


def test_a_class_of_no_module_that_can_be_imported(models: Models) -> None:
    model = models.fresh(None)
    kind = type(layers(model)[1].mlp)
    layers(model)[1].mlp.__class__ = type("Elsewhere", (kind,), {"__module__": "not.there"})
    compared(model, ask(model))


def test_a_hook_on_a_tower_is_not_in_the_way(models: Models) -> None:
    model, seen = models.fresh(), []
    base(model).model.vision_tower.register_forward_hook(lambda *_: seen.append(1))
    compared(model, lambda way: [generate(model, models.workspace.inputs(), way)])
    assert len(seen) == 2


class Rolled:
    """As a library's: it does the same for every token. (A factor would be undone by the norm that comes next.)"""

    __module__ = "peft.hooks"

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __call__(self, _module: Any, _given: Any, output: Any) -> Any:
        return output.roll(self.shift, -1)


def test_a_hook_of_a_library_in_place_of_another(models: Models) -> None:
    model = models.fresh()
    handle = layers(model)[1].mlp.register_forward_hook(Rolled(1))
    first = compared(model, ask(model))
    handle.remove()
    handle = layers(model)[1].mlp.register_forward_hook(Rolled(2))
    second = compared(model, ask(model))
    assert differ(first, second)
    handle.remove()
    assert differ(second, compared(model, ask(model)))


def test_a_weight_set_to_none(models: Models) -> None:
    import torch

    model = models.fresh(None)
    linear = layers(model)[1].mlp.down_proj
    linear.bias = torch.nn.Parameter(torch.ones(linear.out_features, dtype=torch.bfloat16), requires_grad=False)
    noticed(model, lambda _: setattr(linear, "bias", None))


def test_an_object_set_to_none(models: Models) -> None:
    model = models.fresh()
    mlp = layers(model)[1].mlp

    class Factor:
        value = -3

    mlp.factor, forward = Factor(), mlp.forward
    mlp.forward = lambda states: forward(states) * (1 if mlp.factor is None else mlp.factor.value)
    noticed(model, lambda _: setattr(mlp, "factor", None))


def test_a_streamed_weight_changed_on_the_host(models: Models) -> None:
    def changed(model: Any) -> None:
        norm = layers(model)[1].input_layernorm
        with module_hooks.weights_brought_in(norm):
            norm.weight.data = norm.weight.data * -1.5

    noticed(models.fresh(where="streamed"), changed)


@pytest.mark.parametrize(("part", "in_place"), [("layer", False), ("layer", True), ("table", True)])
def test_a_weight_changed_on_the_host(models: Models, part: str, in_place: bool) -> None:
    def changed(model: Any) -> None:
        module = layers(model)[1].input_layernorm if part == "layer" else model.get_submodule(TABLE)
        weights = module_hooks.offload_hook(module).weights_map
        if in_place:
            weights["weight"].mul_(-1.5)
        else:
            key = f"{weights.prefix}weight"
            weights.dataset.state_dict[key] = weights.dataset.state_dict[key] * -1.5

    noticed(models.fresh("4bit-double", where="streamed"), changed)


def test_another_object_at_the_same_address_is_noticed() -> None:
    class Weight:
        pass

    for _ in range(100):
        parameters = {"weight": Weight()}
        entries = snapshots.Entries()
        entries.add(parameters, "weight", (statistics.Cause.WEIGHT, "module"))
        address = id(parameters["weight"])
        assert entries.check()
        parameters["weight"] = None  # type: ignore[assignment]
        assert not entries.check()
        parameters["weight"] = Weight()
        assert not entries.check()
        if id(parameters["weight"]) == address:
            return
    pytest.skip("this interpreter uses no address twice in a row")
