"""transformers-sliced-prompts: KV-shared layers and prompts under a static cache."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._graphs import decoder
from gemma4_compat._graphs.recording import RECORDERS
from gemma4_compat._lab import tiny_configs
from gemma4_compat._lab.stand_ins import tape
from gemma4_compat.patches.generation.transformers_sliced_prompts import PATCH
from tests.conftest import is_affected
from tests.helpers import child, pairwise
from tests.patches.generation.shared_layers import OPTIONS, assert_same, computed, media, prompt
from tests.patches.promise import Promise

SLICES = pytest.mark.skipif(not is_affected(PATCH), reason="before 5.23 no prompt is sliced, with any cache")
STATIC = {"cache_implementation": "static"}
WINDOW = tiny_configs.TEXT["sliding_window"]


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"KV-shared layers compute \d\d positions of a prompt with a static cache, 1 without"


def compare(model: Any, **options: Any) -> Any:
    """With a static cache the prompt has the bits of the default one, from one position; returns its output."""
    import torch

    with computed(model) as rows:
        expected, found = model.generate(**options), model.generate(**options, **STATIC)
    assert set(rows) == {1}
    assert torch.equal(expected.sequences, found.sequences)
    tokens = options["input_ids"].shape[1]
    assert tokens < WINDOW or torch.equal(expected.logits[0], found.logits[0])  # below it other masks, in all layers
    for one, other in zip(expected.logits, found.logits, strict=True):  # a step's mask, and so its kernel, differs
        assert torch.allclose(one.float(), other.float(), atol=1e-5 if one.dtype == torch.float32 else 0.1)
    return found


@SLICES
@pytest.mark.parametrize(
    ("tokens", "kind", "dtype"),
    pairwise([2, WINDOW - 1, WINDOW, WINDOW + 1, 40], ["one", "batch"], ["float32", "bfloat16"]),
)
def test_bits_of_the_default_cache(workspace: Any, tokens: int, kind: str, dtype: str) -> None:
    import torch

    model = workspace.load().to(getattr(torch, dtype))
    compare(model, **prompt(kind, model.device, tokens=tokens), **OPTIONS)


@SLICES
@pytest.mark.parametrize("tokens", [2, WINDOW - 1, WINDOW, 40])
def test_shared_layers_are_called_as_with_the_default_cache(workspace: Any, tokens: int) -> None:
    """Though a static cache masks sliding layers where the default one need not."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = workspace.load()
    calls, attention = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def noted(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        if getattr(module, "is_kv_shared_layer", False):
            calls.append((query.shape, key.shape, value.shape, None if mask is None else mask.tolist()))
        return attention(module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = noted
    try:
        for options in ({}, STATIC):
            model.generate(**prompt("one", model.device, tokens=tokens), **OPTIONS, **options)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    default, static = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    assert default[:2] == static[:2]  # of the prompt, one for each layer
    assert [query[2] for query, *_ in default] == [1] * 2 * OPTIONS["max_new_tokens"]


@SLICES
@pytest.mark.parametrize("kind", ["left", "right"])
def test_padding(workspace: Any, kind: str) -> None:
    """With a mask transformers slices a static cache by itself."""
    model = workspace.load().float()
    compare(model, **prompt(kind, model.device), **OPTIONS)


@SLICES
@pytest.mark.parametrize("kind", ["image", "sound", "both"])
def test_media_in_the_prompt(workspace: Any, kind: str) -> None:
    compare(workspace.load().float(), **media(kind, workspace), **OPTIONS)


@SLICES
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prefill_chunk_size": 24}, {"prefill_chunk_size": 7}], ids=str)
def test_beams_and_chunks(workspace: Any, options: dict[str, Any]) -> None:
    model = workspace.load()
    compare(model, **prompt("batch", model.device), **OPTIONS, **options)


@SLICES
@pytest.mark.parametrize("quantization", [None, "4bit"])
@pytest.mark.parametrize("adapter", [None, "language"])
def test_a_split_model_has_the_bits_of_one_device(
    workspace: Any, quantization: str | None, adapter: str | None
) -> None:
    from peft import PeftModel

    outputs = []
    for build in (workspace.load, workspace.split):
        model = build(quantization)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, workspace.adapter(adapter))
        outputs.append(compare(model, **prompt("one", workspace.main), **OPTIONS))
    assert_same(*outputs)


def forward_of(model: Any, batch: dict[str, Any], **options: Any) -> Any:
    """A forward with a static cache that has room for much more."""
    import torch
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=60)
    with torch.no_grad():
        return model(**batch, **{cache_names.of(type(model).forward): cache}, **options)


@SLICES
@pytest.mark.parametrize(
    ("options", "positions"),
    [
        ({"logits_to_keep": 1}, 1),
        ({"logits_to_keep": 1, "output_hidden_states": True}, 24),
        ({"logits_to_keep": 3}, 24),
        ({}, 24),
    ],
    ids=str,
)
def test_a_forward(workspace: Any, options: dict[str, Any], positions: int) -> None:
    """What the default cache would compute is computed; several positions are not sliced there without a mask."""
    import torch

    model, batch = workspace.load(), prompt("one", workspace.main)
    with computed(model) as rows, torch.no_grad():
        found = forward_of(model, batch, **options)
        expected = model(**batch, **options)
    assert rows == [positions] * 2
    assert torch.equal(expected.logits, found.logits)
    assert (found.hidden_states is None) == ("output_hidden_states" not in options)
    for one, other in zip(expected.hidden_states or (), found.hidden_states or ()):
        assert torch.equal(one, other)


@SLICES
def test_shared_states_that_are_returned_are_those_of_the_default_cache(workspace: Any) -> None:
    import torch

    model, batch = workspace.load(), prompt("one", workspace.main)
    asked = {"logits_to_keep": 1, "return_shared_kv_states": True}
    with torch.no_grad():
        expected = model(**batch, **asked).shared_kv_states
    found = forward_of(model, batch, **asked).shared_kv_states
    assert set(found) == set(expected)
    for kind, states in expected.items():
        assert all(map(torch.equal, states, found[kind]))


@SLICES
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_second_turn(workspace: Any, attention: str) -> None:
    """Its mask is there, as that of eager attention is: transformers slices by itself."""
    import torch
    from transformers import StaticCache

    model = workspace.load().float()
    model.set_attn_implementation(attention)
    name, ids, outputs = cache_names.of(type(model).forward), prompt("one", model.device)["input_ids"], []
    for make in (lambda: None, lambda: StaticCache(config=model.config, max_cache_len=60)):
        cache = model.generate(ids[:, :10], **{name: make()}, **OPTIONS)[name]
        outputs.append(model.generate(ids, attention_mask=torch.ones_like(ids), **{name: cache}, **OPTIONS))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for one, other in zip(outputs[0].logits, outputs[1].logits, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@SLICES
def test_steps_that_are_replayed(workspace: Any) -> None:
    model = workspace.load("4bit")
    asked = {**prompt("one", model.device), **OPTIONS, "max_new_tokens": 6, "min_new_tokens": 6}
    expected = model.generate(**asked)
    with tape.standing_in(RECORDERS), computed(model) as rows:
        for _ in range(2):
            assert_same(expected, model.generate(**asked | STATIC | {"disable_compile": False}))
    assert decoder.of(model).statistics.replayed >= 8
    assert set(rows) == {1}


@SLICES
def test_a_compiled_model(workspace: Any) -> None:
    """``generate`` prepares the masks before it calls the model, so a prompt has none there, either."""
    import torch

    model = workspace.load()
    asked = {**prompt("one", model.device), **OPTIONS}
    expected = model.generate(**asked)
    model.forward = torch.compile(model.forward, backend="eager")
    assert_same(expected, model.generate(**asked, **STATIC))
    torch._dynamo.reset()


@SLICES
def test_layers_have_nothing_of_it_before_the_first_static_cache() -> None:
    finished = child(
        "-c",
        "import gemma4_compat\n"
        "from transformers import Gemma4TextConfig, StaticCache\n"
        "from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer as Layer\n"
        "before = '__call__' in vars(Layer)\n"
        "StaticCache(config=Gemma4TextConfig(), max_cache_len=8)\n"
        "print(before, '__call__' in vars(Layer))\n",
    )
    assert finished.stdout.split() == ["False", "True"], finished
