"""Which adapters compute, and how strongly, is looked at before every replay."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._graphs import decoder
from gemma4_compat._graphs.guards.model import ModelGuards
from tests.generated.search import replay_tuners
from tests.helpers import holders
from tests.unit.generation.calls import (
    Models,
    ask,
    assert_equal,
    base,
    compared,
    differ,
    generate,
    layers,
    steps,
    switched,
    text,
)

pytestmark = pytest.mark.usefixtures("tapes")


def with_two(models: Models, quantization: str | None = None) -> Any:
    model = models.fresh(quantization, "language")
    model.load_adapter(models.workspace.adapter("all"), "second")
    return model.eval()


@pytest.mark.parametrize("quantization", [None, pytest.param("4bit-double", marks=pytest.mark.full)])
def test_switched_disabled_merged_scaled_and_deleted(models: Models, quantization: str | None) -> None:
    model = with_two(models, quantization)
    first, plain = switched(model)
    linear = layers(model)[1].mlp.up_proj
    linear.set_scale("default", 3.0)
    scaled = compared(model, ask(model))
    assert differ(scaled, first)
    linear.set_scale("default", 1.0)
    assert not differ(compared(model, ask(model)), first)
    model.merge_adapter()
    merged = compared(model, ask(model))
    assert differ(merged, plain)
    model.unmerge_adapter()
    compared(model, ask(model))
    model.delete_adapter("second")
    compared(model, ask(model))
    assert steps(model).reasons == ()


def test_of_an_owned_model_what_changes_rarely_is_not_looked_at(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_two(models)
    gemma4_compat.decode_fast(model)
    switched(model)
    looks: list[Any] = []
    look = ModelGuards.check_all
    monkeypatch.setattr(ModelGuards, "check_all", lambda self: looks.append(self) or look(self))
    decoder.of(base(model)).owned = True
    replayed = steps(model).replayed
    switched(model)
    assert steps(model).replayed > replayed
    assert looks == []
    gemma4_compat.decode_fast(model)
    switched(model)
    assert looks


#: What is tried of every tuner, in this order. One that PEFT refuses changes what it has changed before it raised.
SWITCHES: dict[str, Callable[[Any], Any]] = {
    "disable_adapter_layers": lambda model: model.base_model.disable_adapter_layers(),
    "enable_adapter_layers": lambda model: model.base_model.enable_adapter_layers(),
    "set_adapter": lambda model: model.set_adapter("default"),
    "merge_adapter": lambda model: model.merge_adapter(),
    "unmerge_adapter": lambda model: model.unmerge_adapter(),
    "add_weighted_adapter": lambda model: model.add_weighted_adapter(["default", "second"], [0.7, 0.6], "sum", "cat"),
    "the sum": lambda model: model.set_adapter("sum"),
    "default again": lambda model: model.set_adapter("default"),
    "delete_adapter": lambda model: model.delete_adapter("second"),
}
#: Those whose forward is refused: PEFT's own, or a capture's.
NOT_REPLAYED = ("alora", "frod", "lora-dropout", "poly", "prompt", "p-tuning", "prefix", "cartridge", "cpt", "shira")
FEW = ("ln", "lora", "lora-norms")


@pytest.mark.parametrize(
    "tuner",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in replay_tuners.TUNERS],
)
def test_every_tuner_and_every_way_to_switch(models: Models, tuner: str) -> None:
    import peft

    model = models.fresh(None)
    try:
        model = peft.get_peft_model(model, replay_tuners.config(tuner))
    except (AttributeError, ValueError) as error:
        pytest.skip(f"PEFT {peft.__version__}: {error}")
    replay_tuners.drawn(model, 1)

    def asked(way: dict[str, Any]) -> Any:
        try:
            return generate(model, text(model), way)
        except (RuntimeError, ValueError) as error:
            return str(error)

    def held() -> None:
        found, expected = asked({}), asked({"disable_compile": True})
        if isinstance(expected, str):
            assert found == expected
        else:
            assert_equal(found, expected)

    held()
    with model.disable_adapter():
        held()
    held()
    with contextlib.suppress(ValueError):
        model.add_adapter("second", replay_tuners.config(tuner))
        model.set_adapter("second")
        replay_tuners.drawn(model, 2)
        held()
    for switch in SWITCHES.values():
        with contextlib.suppress(AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
            switch(model)
        held()
    assert steps(model).replayed > 0 or tuner in NOT_REPLAYED


def test_ln_tuning_switched_off_between_two_tokens(models: Models) -> None:
    """Its layers have no flag of their own before they are switched."""
    import peft
    from transformers import LogitsProcessor, LogitsProcessorList

    model = peft.get_peft_model(models.fresh(None), replay_tuners.config("ln"))
    replay_tuners.drawn(model, 1)

    class Switches(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            on = input_ids.shape[1] % 5 > 2
            model.base_model.enable_adapter_layers() if on else model.base_model.disable_adapter_layers()
            return scores

    def asked(way: dict[str, Any]) -> Any:
        model.base_model.enable_adapter_layers()
        return ask(model, new=12, logits_processor=LogitsProcessorList([Switches()]))(way)

    plain = compared(model, ask(model, new=12))
    assert differ(plain, compared(model, asked))


def test_one_that_was_active_before_is_not_captured_again(models: Models) -> None:
    model = with_two(models)
    answers: dict[Any, Any] = {}
    for turn in range(3):
        for name in ("default", "second", None):
            if name is None:
                with model.disable_adapter():
                    answer = generate(model, text(model))
            else:
                model.set_adapter(name)
                answer = generate(model, text(model))
            assert turn == 0 or not differ([answers[name]], [answer])
            answers[name] = answer
    assert (steps(model).captured, steps(model).eager) == (3, 3)


def test_switched_between_two_tokens(models: Models) -> None:
    from transformers import LogitsProcessor, LogitsProcessorList

    model = with_two(models)

    class Switches(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            model.set_adapter("second" if input_ids.shape[1] % 5 > 2 else "default")
            return scores

    model.set_adapter("default")
    plain = compared(model, ask(model, new=12))
    switched = compared(model, ask(model, new=12, logits_processor=LogitsProcessorList([Switches()])))
    assert differ(plain, switched)
    assert steps(model).captured <= 3


def test_the_adapters_of_transformers_itself(models: Models) -> None:
    model = models.fresh(None)
    plain = compared(model, ask(model))
    model.load_adapter(models.workspace.adapter("language"), adapter_name="one")
    model.eval()
    one = compared(model, ask(model))
    assert differ(plain, one)
    model.disable_adapters()
    assert not differ(compared(model, ask(model)), plain)
    model.enable_adapters()
    assert not differ(compared(model, ask(model)), one)


def test_an_adapter_for_each_row_is_not_captured(models: Models) -> None:
    """PEFT hooks its linears for one call, and picks rows by lists, which the host copies."""
    model = with_two(models)
    answers = []
    for names in (["default", "second"], ["second", "__base__"], ["default", "second"]):
        asked = {**text(model, batch=2), "adapter_names": names}
        answers.append(compared(model, lambda way, asked=asked: [generate(model, asked, way)], replays=False))
    assert differ(answers[0], answers[1])
    assert not differ(answers[0], answers[2])
    (reason,) = steps(model).reasons
    assert "a capture failed" in reason
    compared(model, ask(model))


def test_weights_of_an_adapter(models: Models) -> None:
    model = with_two(models)
    before = compared(model, ask(model))
    layers(model)[1].mlp.up_proj.lora_B["default"].weight.data.mul_(4)
    captured = steps(model).captured
    changed = compared(model, ask(model))
    assert differ(before, changed)
    assert steps(model).captured == captured
    weight = layers(model)[1].mlp.up_proj.lora_B["default"].weight
    weight.data = weight.data / 4
    assert not differ(compared(model, ask(model)), before)


@pytest.mark.parametrize("quantization", [None, pytest.param("4bit-double", marks=pytest.mark.full)])
def test_merged_for_good_its_weights_are_let_go(models: Models, quantization: str | None) -> None:
    model = models.fresh(quantization, "language")
    compared(model, ask(model))
    lora = weakref.ref(layers(model)[1].mlp.up_proj.lora_A["default"].weight)
    model = model.merge_and_unload()
    assert holders([lora]) == []
    compared(model, ask(model))
    assert "lora" not in str(base(model))
