"""The statistics say why a graph is captured again: every cause, from the user's side."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._graphs import decoder
from gemma4_compat._graphs.statistics import LAST, Cause, Recapture
from tests.helpers import ROOT
from tests.unit.generation.calls import WINDOW, Models, base, generate, layers, static_cache, steps, text
from tests.unit.generation.test_changes import Rolled

pytestmark = pytest.mark.usefixtures("tapes")
Found = tuple[Recapture, ...]
#: What a user does with a model that has a graph.
CASES: dict[Cause, tuple[Callable[[Models, pytest.MonkeyPatch], Any], str]] = {}


def case(cause: Cause, detail: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[cause] = function, detail
        return function

    return decorate


def ready(models: Models, *, adapter: str | None = None, where: str = "device", **options: Any) -> Any:
    """A model whose first graph is captured, which needs no cause."""
    model = models.fresh(None, adapter, where)
    if adapter is not None:
        model.load_adapter(models.workspace.adapter("all"), "second")
        model.eval()
    generate(model, text(model), **options)
    assert steps(model).captured == 1
    assert (steps(model).recaptures, steps(model).last_recaptures) == ({}, ())
    return model


@case(Cause.WEIGHT, "language_model.layers.1.post_attention_layernorm.weight")
def _weight(models: Models, _: Any) -> Any:
    import torch

    model = ready(models)
    norm = layers(model)[1].post_attention_layernorm
    norm.weight = torch.nn.Parameter(-norm.weight.detach(), requires_grad=False)
    generate(model, text(model))
    return model


@case(Cause.ADAPTER, "_active_adapter: ['default'] -> ['second'], ")
def _adapter(models: Models, _: Any) -> Any:
    model = ready(models, adapter="language")
    model.set_adapter("second")
    generate(model, text(model))
    model.set_adapter("default")
    generate(model, text(model))  # its graph is still there
    return model


@case(Cause.MODULE, "language_model.layers.1.mlp, model.language_model.layers.2.mlp")
def _module(models: Models, _: Any) -> Any:
    model = ready(models)
    layers(model)[1].mlp, layers(model)[2].mlp = layers(model)[2].mlp, layers(model)[1].mlp
    generate(model, text(model))
    return model


@case(Cause.ATTRIBUTE, "language_model.layers.1.self_attn.scaling: 1.0 -> 0.5")
def _attribute(models: Models, _: Any) -> Any:
    model = ready(models)
    layers(model)[1].self_attn.scaling *= 0.5
    generate(model, text(model))
    return model


@case(Cause.CODE, "Gemma4TextMLP.forward")
def _code(models: Models, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = ready(models)
    kind = type(layers(model)[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, states: -forward(self, states))
    generate(model, text(model))
    return model


@case(Cause.CONFIGURATION, "config.text_config._attn_implementation_internal: sdpa -> eager")
def _configuration(models: Models, _: Any) -> Any:
    model = ready(models)
    model.set_attn_implementation("eager")
    generate(model, text(model))
    return model


@case(Cause.TRAINING, "ForConditionalGeneration.training: False -> True")
def _training(models: Models, _: Any) -> Any:
    model = ready(models)
    model.train()
    generate(model, text(model))
    return model


@case(Cause.HOOK_ADDED, "a forward hook of model.language_model.layers.1.mlp: Rolled")
def _hook_added(models: Models, _: Any) -> Any:
    model = ready(models)
    layers(model)[1].mlp.register_forward_hook(Rolled(1))
    generate(model, text(model))
    return model


@case(Cause.HOOK_REMOVED, "a forward hook of model.language_model.layers.1.mlp")
def _hook_removed(models: Models, _: Any) -> Any:
    model = models.fresh(None)
    handle = layers(model)[1].mlp.register_forward_hook(Rolled(1))
    generate(model, text(model))
    handle.remove()
    generate(model, text(model))
    return model


@case(Cause.OFFLOADING, "Gemma4ForConditionalGeneration, model.language_model.embed_tokens, ")
def _offloading(models: Models, _: Any) -> Any:
    model = ready(models)
    models._dispatched(model, streamed=True)
    generate(model, text(model))
    return model


@case(Cause.OPTION, "output_hidden_states=True")
def _option(models: Models, _: Any) -> Any:
    model = ready(models, output_hidden_states=True)  # transformers adds hooks for them, which stay
    generate(model, text(model))
    return model


@case(Cause.SHAPE, "input_ids: torch.int64 [1, 1] -> torch.int64 [2, 1]")
def _shape(models: Models, _: Any) -> Any:
    model = ready(models)
    generate(model, text(model, batch=2))
    return model


@case(Cause.CACHE_LENGTH, " -> ")
def _cache_length(models: Models, _: Any) -> Any:
    model = ready(models)
    generate(model, text(model, 40))
    return model


@case(Cause.CACHE, "the one before is held")
def _cache(models: Models, _: Any) -> Any:
    model = models.fresh(None)
    caches = [static_cache(model) for _ in range(2)]
    for cache in caches:
        generate(model, text(model), past_key_values=cache)
    return model


@case(Cause.WINDOW, "0 -> ")
def _window(models: Models, _: Any) -> Any:
    model = models.fresh(None)
    generate(model, text(model, 3), new=WINDOW + 4)
    return model


@case(Cause.SETTING, "deterministic algorithms: False -> True")
def _setting(models: Models, _: Any) -> Any:
    import torch

    model = ready(models)
    torch.use_deterministic_algorithms(True)
    try:
        generate(model, text(model))
    finally:
        torch.use_deterministic_algorithms(False)
    return model


@case(Cause.EVICTED, "at most 1 of a model")
def _evicted(models: Models, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(decoder, "MAX_GRAPHS", 1)
    model = models.fresh(None)
    cache = static_cache(model)
    for shown in (True, False, True):
        generate(model, text(model), past_key_values=cache, output_hidden_states=shown)
        cache.reset()
    return model


@case(Cause.MEMORY, "a prompt needed what they take")
def _memory(models: Models, _: Any) -> Any:
    model = ready(models)
    decoder.of(model).give_back()
    generate(model, text(model))
    return model


@case(Cause.TURNED_OFF, "")
def _turned_off(models: Models, _: Any) -> Any:
    model = ready(models)
    gemma4_compat.decode_fast(model, enabled=False)
    gemma4_compat.decode_fast(model)
    generate(model, text(model))
    return model


def test_every_cause_has_a_case_and_a_line_in_the_documentation() -> None:
    assert CASES.keys() == set(Cause)
    page = (ROOT / "docs" / "DECODING.md").read_text(encoding="utf-8")
    table = page.partition("| cause | what to do |")[2].partition("\n\n")[0]
    assert [cause for cause in Cause if cause.value not in table] == []


@pytest.mark.parametrize("cause", Cause)
def test_the_statistics_name_it(models: Models, monkeypatch: pytest.MonkeyPatch, cause: Cause) -> None:
    reach, detail = CASES[cause]
    found = steps(reach(models, monkeypatch))
    assert found.recaptures.get(cause) == 1, found
    named = [one.detail for one in found.last_recaptures if one.cause is cause]
    assert len(named) == 1
    assert detail in named[0]
    shown = json.loads(json.dumps(dataclasses.asdict(found)))
    assert shown["recaptures"][cause.value] == 1
    assert {"cause": cause.value, "detail": named[0]}.items() <= shown["last_recaptures"][-1].items()


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 5}, {"output_logits": False}])
def test_what_replays_the_same_graph_is_not_counted(models: Models, options: dict[str, Any]) -> None:
    model = ready(models)
    for seed in range(3):
        generate(model, text(model, seed=seed), **options)
    layers(model)[1].input_layernorm.weight.data.mul_(-1.5)
    generate(model, text(model))
    assert (steps(model).captured, steps(model).recaptures) == (1, {})


def test_more_sets_of_adapters_than_are_kept(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "MAX_STATES", 1)
    model = ready(models, adapter="language")
    for name in ("second", "default"):
        model.set_adapter(name)
        generate(model, text(model))
    assert steps(model).recaptures == {Cause.ADAPTER: 1, Cause.EVICTED: 1}
    assert steps(model).last_recaptures[-1].detail == "at most 1 sets of adapters keep theirs"


def test_a_graph_of_other_adapters_is_checked_in_full(models: Models) -> None:
    """Only the variant of the last step was looked at then, so no share of it is enough."""
    import torch

    model = ready(models, adapter="language")
    for name in ("second", "default"):
        model.set_adapter(name)
        generate(model, text(model))
    decoding = decoder.of(base(model))
    other = decoding._states.states[1]
    norm = layers(model)[1].post_attention_layernorm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone(), requires_grad=False)
    model.set_adapter("second")
    assert decoding._states.check(SimpleNamespace(model=base(model)), no_user_code=True) is not other


def test_a_deleted_module_is_named(models: Models) -> None:
    import torch

    model = ready(models)
    layers(model)[1].mlp = torch.nn.Identity().eval()
    gc.collect()
    generate(model, text(model))
    assert steps(model).recaptures == {Cause.MODULE: 1}
    assert steps(model).last_recaptures[0].detail.endswith("layers.1.mlp was deleted")


def test_the_last_ones_are_kept_and_all_are_counted(models: Models) -> None:
    model = ready(models)
    attention = layers(model)[1].self_attn
    for turn in range(LAST + 2):
        attention.scaling = float(turn + 1)
        generate(model, text(model))
    assert steps(model).recaptures == {Cause.ATTRIBUTE: LAST + 2}
    assert len(steps(model).last_recaptures) == LAST


def test_a_detail_is_short_and_keeps_nothing_alive(models: Models) -> None:
    class Option:
        def __str__(self) -> str:
            return 1000 * "long "

    model = ready(models)
    layers(model)[1].self_attn.own = option = Option()
    generate(model, text(model))
    layers(model)[1].self_attn.own = None
    known = weakref.ref(option)
    del option
    generate(model, text(model))
    gc.collect()
    assert known() is None
    assert steps(model).recaptures == {Cause.ATTRIBUTE: 2}
    long = Recapture.of([(Cause.OPTION, 500 * "x"), (Cause.OPTION, "y"), (Cause.SHAPE, "z")])
    assert long == Recapture(Cause.OPTION, 189 * "x" + " and 1 more", ("the shapes of the inputs changed: z",))
    many = Recapture.of([(Cause.OPTION, f"{place}") for place in (1, 1, 2, 3, 4, 5)])
    assert many == Recapture(Cause.OPTION, "1, 2, 3 and 2 more")


def test_all_that_has_changed_is_named(models: Models) -> None:
    model = ready(models)
    text_config = model.config.get_text_config()
    text_config.final_logit_softcapping, text_config.rope_parameters["sliding_attention"]["rope_theta"] = 11.0, 3.0
    layers(model)[0].mlp.added = 1
    layers(model)[1].mlp.register_forward_hook(Rolled(1))
    generate(model, text(model))
    (found,) = steps(model).last_recaptures
    hook, configuration, attribute = str(found).split("; ")
    assert hook == "a hook was added: a forward hook of model.language_model.layers.1.mlp: Rolled"
    assert configuration.startswith("the configuration changed: config.text_config.")
    assert "config.text_config.final_logit_softcapping: 30.0 -> 11.0" in configuration
    assert "config.text_config.rope_parameters.sliding_attention.rope_theta: 10000.0 -> 3.0" in configuration
    assert attribute == "an attribute changed: model.language_model.layers.0.mlp.added"
    assert steps(model).recaptures == {Cause.HOOK_ADDED: 1}
    assert (str(Recapture(Cause.TURNED_OFF, "")), len(found.also)) == ("decode_fast was turned off", 2)


def test_a_hook_in_place_of_another_is_named(models: Models) -> None:
    model = models.fresh(None)
    hooks = layers(model)[1].mlp._forward_hooks
    layers(model)[1].mlp.register_forward_hook(first := Rolled(1))
    generate(model, text(model))
    hooks[next(iter(hooks))] = Rolled(2)
    generate(model, text(model))
    assert isinstance(first, Rolled)
    detail = "a forward hook of model.language_model.layers.1.mlp, in place of another"
    assert steps(model).last_recaptures[-1:] == (Recapture(Cause.HOOK_ADDED, detail),)


def test_another_model_has_statistics_of_its_own(models: Models) -> None:
    one, other = ready(models), ready(models)
    layers(one)[1].self_attn.scaling *= 0.5
    for model in (one, other):
        generate(model, text(model))
    assert steps(one).recaptures == {Cause.ATTRIBUTE: 1}
    assert steps(other).recaptures == {}
    assert base(one) is not base(other)
