"""When a step is captured and replayed, and when nothing of ours happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._generation import call
from tests.unit.generation.calls import (
    NEW,
    PATCH,
    Models,
    ask,
    assert_equal,
    base,
    compared,
    generate,
    layers,
    static_cache,
    steps,
    text,
    whole,
)

pytestmark = pytest.mark.usefixtures("tapes")
EAGER = {"disable_compile": True}


def keeps_its_cache() -> bool:
    """Whether transformers keeps one static cache for all calls of a model."""
    import transformers

    return versions.admits("<5.15", transformers.__version__)


def counts(model: Any) -> tuple[int, int, int]:
    found = steps(model)
    return found.eager, found.captured, found.replayed


@pytest.mark.parametrize(
    ("quantization", "adapter", "where"),
    [(None, None, "device"), ("4bit-double", "language", "device"), ("4bit", None, "streamed"), (None, "all", "host")],
)
def test_the_first_step_is_eager_the_second_is_captured_and_later_calls_replay(
    models: Models, quantization: str | None, adapter: str | None, where: str
) -> None:
    model = models.fresh(quantization, adapter, where)
    (found,) = compared(model, ask(model))
    assert counts(model) == (1, 1, NEW - 2)
    assert steps(model).capture_seconds > 0
    for seed in (8, 9):
        generate(model, text(model, seed=seed))
    assert_equal(generate(model, text(model)), found)
    assert counts(model) == (1, 1, 4 * (NEW - 1) - 1)
    assert steps(model).reasons == ()


def test_python_of_the_model_does_not_run_in_a_replay(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs = models(), []
    mlp = type(layers(model)[0].mlp)
    original = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: runs.append(1) or original(self, x))
    generate(model, text(model))
    runs.clear()
    generate(model, text(model, seed=8))
    assert len(runs) == len(layers(model))  # of the prompt


def test_what_a_call_returns_is_the_users_own(models: Models) -> None:
    """The tensors of a graph are not handed out: the next replay would change them."""
    model = models()
    first = generate(model, text(model), output_hidden_states=True)
    kept = [tensor.clone() for tensor in (*first.logits, *first.hidden_states[-1])]
    generate(model, text(model, seed=8), output_hidden_states=True)
    assert all(one.equal(other) for one, other in zip(kept, (*first.logits, *first.hidden_states[-1]), strict=True))
    assert len({tensor.data_ptr() for tensor in first.logits}) == NEW


@pytest.mark.parametrize(
    "hold",
    [
        lambda cache: cache,
        lambda cache: cache.layers[0],
        lambda cache: cache.layers[2].values,
        lambda cache: cache.layers[1].keys[:, :, :3],
        lambda cache: cache.layers[1].keys.view(-1).untyped_storage(),
        lambda cache: cache.layers[2].cumulative_length,
    ],
)
@pytest.mark.skipif(keeps_its_cache(), reason="transformers resets the cache that it keeps")
def test_what_somebody_holds_of_a_cache_is_not_lent(models: Models, hold: Callable[[Any], Any]) -> None:
    model = models.fresh()
    held = hold(whole(model, text(model)).past_key_values)
    parts = tensors(held)
    before = [part.clone() for part in parts]
    captured = steps(model).captured
    for seed in (8, 9):
        generate(model, text(model, seed=seed))
    assert steps(model).captured == captured + 1
    assert all(one.equal(other) for one, other in zip(before, parts, strict=True))
    del held, parts
    for seed in (8, 9):
        generate(model, text(model, seed=seed))
    assert steps(model).captured == captured + 1


def tensors(held: Any) -> list[Any]:
    import torch

    if isinstance(held, torch.UntypedStorage):
        return [torch.empty(0, dtype=torch.uint8).set_(held)]
    if isinstance(held, torch.Tensor):
        return [held]
    return [part for layer in getattr(held, "layers", [held])[:3] for part in (layer.keys, layer.values)]


@pytest.mark.skipif(keeps_its_cache(), reason="transformers has one cache for a model")
def test_an_array_of_numpy_holds_a_cache_too(models: Models) -> None:
    import torch

    model = models.fresh()
    array = whole(model, text(model)).past_key_values.layers[0].keys.view(torch.int16).numpy()
    before = array.copy()
    generate(model, text(model, seed=8))
    assert (array == before).all()


def test_a_larger_batch_and_back(models: Models) -> None:
    """Caches become longer only, and the length of a cache is in the bits: the longest comes first."""
    model = models.fresh()
    batches = [text(model, 40), text(model, batch=2), text(model, 9), text(model, batch=2), text(model)]
    for _ in range(2):
        compared(model, lambda way: [generate(model, batch, way) for batch in batches])
    assert steps(model).reasons == ()


class Untouched:
    """Inside, no step of a call is ours."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.before = counts(self.model)

    def __exit__(self, *raised: Any) -> None:
        assert raised[0] or counts(self.model) == self.before


def test_disable_compile_turns_it_off(models: Models) -> None:
    model = models()
    expected = generate(model, text(model))
    with Untouched(model):
        assert_equal(generate(model, text(model), EAGER), expected)
        model.generation_config.disable_compile = True
        try:
            assert_equal(generate(model, text(model)), expected)
            assert_equal(generate(model, text(model), num_beams=2), generate(model, text(model), EAGER, num_beams=2))
        finally:
            model.generation_config.disable_compile = False


def test_reverting_the_patch_turns_it_off(models: Models) -> None:
    model = models()
    expected = compared(model, ask(model))
    gemma4_compat.revert(PATCH)
    try:
        assert_equal(*compared(model, ask(model), replays=False), *expected)
    finally:
        gemma4_compat.install()
    compared(model, ask(model))


@pytest.mark.parametrize("options", [{"cache_implementation": "dynamic"}, {"use_cache": False}])
def test_other_caches_are_left_alone(models: Models, options: dict[str, Any]) -> None:
    model = models()
    with Untouched(model):
        compared(model, ask(model, **{"cache_implementation": None, **options}), replays=False)


def test_a_static_cache_that_is_offloaded_is_left_alone(models: Models) -> None:
    model, cache = models(), static_cache(models())
    assert call.decoder_for(model, cache) is not None
    cache.offloading = True  # to fill one takes a GPU
    assert call.decoder_for(model, cache) is None
    assert call.decoder_for(model, None) is None


def test_training_mode_replays_where_nothing_is_drawn(models: Models) -> None:
    model = models.fresh()
    compared(model, ask(model))
    model.train()
    compared(model, ask(model))
    layers(model)[1].self_attn.attention_dropout = 0.1
    compared(model, ask(model), replays=False)
    reason = steps(model).reasons[-1]
    assert "self_attn is in training mode (model.eval() ends it), and attention_dropout is 0.1" in reason
    model.eval()
    compared(model, ask(model))
    layers(model)[1].self_attn.train()
    compared(model, ask(model), replays=False)


def test_gradients_and_autocast_say_so(models: Models) -> None:
    import torch

    model = models.fresh()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compared(model, ask(model), replays=False)
    (reason,) = steps(model).reasons
    assert "autocast" in reason
    compared(model, ask(model))
    step = call.decoder_for(model, static_cache(model))
    assert step is not None
    before = counts(model)
    cache = static_cache(model)
    model(**text(model), past_key_values=cache)
    assert step(input_ids=text(model, 1)["input_ids"], past_key_values=cache).logits.grad_fn is not None
    assert counts(model) == (before[0] + 1, *before[1:])
    assert "gradients are enabled" in steps(model).reasons


def test_another_family_is_left_alone() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval()
    assert_equal(generate(model, text(model)), generate(model, text(model), EAGER))
    assert_equal(generate(model, text(model), num_beams=2), generate(model, text(model), EAGER, num_beams=2))
    assert not [name for name in vars(model) if "gemma4" in name]


def test_what_transformers_compiles_is_left_to_it(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import CompileConfig

    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda call, **_: compiled.append(call) or call)
    everywhere = CompileConfig()
    everywhere._compile_all_devices = True
    model = models.workspace.load()
    with Untouched(model):
        expected = generate(model, text(model), compile_config=everywhere)
    assert len(compiled) == 1
    gemma4_compat.decode_fast(model)
    assert_equal(generate(model, text(model), compile_config=everywhere), expected)
    assert len(compiled) == 1
    assert steps(model).captured == 1
    gemma4_compat.decode_fast(model, enabled=False)
    with Untouched(model):
        assert_equal(generate(model, text(model), compile_config=everywhere), expected)


def test_a_forward_of_the_users_own_is_left_alone(models: Models) -> None:
    import torch

    model, cache = models(), static_cache(models())
    with Untouched(model), torch.no_grad():
        model(**text(model, 4), past_key_values=cache)
        model(input_ids=text(model, 1)["input_ids"], past_key_values=cache)
    assert "forward" not in vars(base(model))
