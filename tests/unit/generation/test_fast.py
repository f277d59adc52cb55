"""``gemma4_compat.decode_fast``."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._generation.prefix_cache import session
from tests.generated.search import replay_tuners
from tests.unit.generation.calls import PATCH, Models, assert_equal, base, generate, static_cache, steps, text
from tests.unit.offload import threads

EAGER = {"disable_compile": True}
NO_CACHE_NAMED = {"cache_implementation": None}


def answer(model: Any, **options: Any) -> Any:
    return generate(model, text(model), **{**NO_CACHE_NAMED, **options})


def replays(model: Any, **options: Any) -> bool:
    before = steps(model).replayed
    answer(model, **options)
    return bool(steps(model).replayed > before)


@pytest.mark.parametrize("adapter", [None, "language"])
def test_generate_replays_without_further_arguments(models: Models, tapes: Any, adapter: str | None) -> None:
    model = models.fresh("4bit-double", adapter)
    settings = base(model).generation_config.to_dict()
    dynamic = answer(model)
    assert steps(model).replayed == 0
    for _ in range(2):
        assert gemma4_compat.decode_fast(model) is model
    assert replays(model)
    static = generate(model, text(model), EAGER)
    assert_equal(answer(model), static)
    assert_equal(answer(model, **EAGER), static)
    assert base(model).generation_config.to_dict() == settings
    for _ in range(2):
        assert gemma4_compat.decode_fast(model, enabled=False) is model
    assert not replays(model)
    assert_equal(answer(model), dynamic)
    assert base(model).generation_config.to_dict() == settings


def test_each_call_states_everything(models: Models, tapes: Any) -> None:
    """Prefixes without graphs, with graphs, and graphs without prefixes."""
    model = models.fresh(None)
    gemma4_compat.decode_fast(model, reuse_prefix=True, graphs=False)
    assert session.of(base(model)) is not None
    assert not replays(model)
    assert steps(model).reasons == ()
    gemma4_compat.decode_fast(model, reuse_prefix=True)
    kept = session.of(base(model))
    assert kept is not None
    assert any(replays(model) for _ in range(3))
    gemma4_compat.decode_fast(model, reuse_prefix=True)
    assert session.of(base(model)) is not kept, "the conversation is forgotten"
    gemma4_compat.decode_fast(model)
    assert session.of(base(model)) is None
    assert any(replays(model) for _ in range(3))
    gemma4_compat.decode_fast(model, graphs=False)
    assert not replays(model)


@pytest.mark.parametrize("option", ["any_length", "assistants"])
def test_options_that_need_graphs(models: Models, option: str) -> None:
    model = models.fresh(None)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=f"graphs=False and {option}=True"):
        gemma4_compat.decode_fast(model, reuse_prefix=True, graphs=False, **{option: True})
    assert session.of(base(model)) is None


def test_what_a_call_says_counts(models: Models, tapes: Any) -> None:
    model = gemma4_compat.decode_fast(models.fresh(None))
    assert not replays(model, cache_implementation="dynamic")
    assert not replays(model, use_cache=False)
    assert not replays(model, disable_compile=True)
    from transformers import DynamicCache

    assert not replays(model, past_key_values=DynamicCache(config=model.config.get_text_config()))
    assert replays(model, past_key_values=static_cache(model))
    assert replays(model, num_beams=2)
    assert replays(model, do_sample=True)


@pytest.mark.parametrize(("sized", "captured"), [(None, 3), (48, 1)])
def test_a_cache_for_the_longest_call_needs_one_graph(
    models: Models, tapes: Any, sized: int | None, captured: int
) -> None:
    """docs/DECODING.md: a longer call makes a longer cache, whose step is captured anew."""
    from transformers import GenerationConfig

    if not hasattr(GenerationConfig(), "max_cache_len"):
        pytest.skip("this transformers has no max_cache_len")
    model = gemma4_compat.decode_fast(models.fresh(None))
    model.generation_config.max_cache_len = sized
    for new in (4, 8, 12):
        assert_equal(answer(model, new=new), answer(model, new=new, **EAGER))
    assert steps(model).captured == captured


def test_with_an_assistant_it_decodes_as_ever(models: Models, tapes: Any) -> None:
    model, assistant = models.fresh(None), models.workspace.load()
    options = {"assistant_model": assistant, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**text(model), **options)
    assert model is gemma4_compat.decode_fast(model)
    assert model.generate(**text(model), **options).equal(expected)
    assert steps(model).replayed == 0


def test_with_a_prompt_to_look_up_it_decodes_as_ever(models: Models, tapes: Any) -> None:
    model = gemma4_compat.decode_fast(models.fresh(None))
    model.generate(**text(model), prompt_lookup_num_tokens=3, max_new_tokens=8)
    assert steps(model).replayed == 0


@pytest.mark.parametrize("tuner", ["prefix", "cartridge", "cpt"])
def test_with_virtual_tokens_it_decodes_as_ever(
    models: Models, tapes: Any, caplog: pytest.LogCaptureFixture, tuner: str
) -> None:
    """PEFT refuses static caches for them."""
    import peft

    if not hasattr(peft, replay_tuners.TUNERS[tuner][0]):
        pytest.skip(f"PEFT {peft.__version__} has no such tuner")
    model = models.fresh(None)
    gemma4_compat.decode_fast(model, enabled=False)
    model = peft.get_peft_model(model, replay_tuners.config(tuner)).eval()
    try:
        expected = answer(model)
    except RuntimeError as error:  # PEFT 0.19: layers whose heads have other widths
        pytest.skip(f"PEFT {peft.__version__} cannot do it: {error}")
    gemma4_compat.decode_fast(model)
    with caplog.at_level(logging.WARNING, "gemma4_compat"):
        for _ in range(2):
            assert_equal(answer(model), expected)
    (said,) = [record.getMessage() for record in caplog.records if "eagerly" in record.getMessage()]
    assert "PEFT takes no static cache with virtual tokens" in said
    assert steps(model).replayed == 0
    with model.disable_adapter():
        assert replays(model)
    assert not replays(model)


def test_a_copy_decodes_as_ever(models: Models, tapes: Any) -> None:
    model = gemma4_compat.decode_fast(models.fresh(None))
    other = copy.deepcopy(model)
    assert not replays(other)
    assert replays(model)


def test_without_the_patch_it_decodes_as_ever(models: Models, tapes: Any) -> None:
    model = models.fresh(None)
    gemma4_compat.decode_fast(model, enabled=False)
    dynamic = answer(model)
    gemma4_compat.decode_fast(model)
    gemma4_compat.revert(PATCH)
    try:
        assert_equal(answer(model), dynamic)
    finally:
        gemma4_compat.install()
    assert replays(model)


@pytest.mark.parametrize("refused", ["8bit", "disk", "no recorder"])
def test_a_refusal_says_why_and_changes_nothing(
    models: Models, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest, refused: str
) -> None:
    words = {"8bit": "8-bit", "disk": "on disk", "no recorder": "the model is on cpu"}[refused]
    if refused != "no recorder":
        request.getfixturevalue("tapes")
    model = threads.split(models.workspace, "disk") if refused == "disk" else None
    model = model or models.workspace.load("8bit" if refused == "8bit" else None)
    expected = answer(model)
    with caplog.at_level(logging.WARNING, "gemma4_compat"):
        for _ in range(2):
            assert gemma4_compat.decode_fast(model) is model
    (said,) = [record.getMessage() for record in caplog.records if "eagerly" in record.getMessage()]
    assert words in said
    assert steps(model).reasons == (said.partition("eagerly: ")[2],)
    assert_equal(answer(model), expected)
    assert steps(model).replayed == 0


def test_another_model_is_an_error(models: Models) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    llama = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2))
    inside = models(None).model
    for model in (llama, inside, inside.language_model):
        with pytest.raises(gemma4_compat.Gemma4CompatError, match=f"; got {type(model).__name__}\\."):
            gemma4_compat.decode_fast(model)
