"""transformers-absent-per-layer: KV-shared layers in a model without per-layer inputs (F108)."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._lab import tiny_configs, tiny_models
from gemma4_compat.patches.generation.transformers_absent_per_layer import PATCH
from tests.conftest import is_affected
from tests.helpers import child, pairwise, without
from tests.patches.generation.shared_layers import OPTIONS, assert_same, computed, prompt
from tests.patches.promise import Promise

SLICES = pytest.mark.skipif(not is_affected(PATCH), reason="before 5.23 no prompt is sliced")
#: What a position by itself may differ by from the same one among others, in logits of up to 30 in float32.
ROUNDING = 1e-4


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"^TypeError: 'NoneType' object is not subscriptable"


@pytest.fixture
def model(workspace: Any) -> Any:
    return tiny_models.without_per_layer_inputs(workspace.checkpoint).to(workspace.main)


@pytest.mark.parametrize(
    ("kind", "tokens", "dtype", "attention"),
    pairwise(["one", "left", "right"], [2, 8, 24], ["float32", "bfloat16"], ["sdpa", "eager"]),
)
def test_logits_are_those_of_all_positions_in_every_layer(
    model: Any, kind: str, tokens: int, dtype: str, attention: str
) -> None:
    import torch

    model.to(getattr(torch, dtype)).set_attn_implementation(attention)
    batch = prompt(kind, model.device, tokens=tokens)
    with torch.no_grad():
        found, expected = model(**batch), model(**batch, output_hidden_states=True)
    assert found.logits.shape[1] == tokens
    assert torch.equal(found.logits, expected.logits)


@SLICES
@pytest.mark.parametrize("kind", ["one", "left", "right"])
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_positions_are_sliced_as_with_empty_per_layer_inputs(model: Any, kind: str, kept: int) -> None:
    """Which upstream accepts beside embeddings: its own slices, and so its bits."""
    import torch

    batch = prompt(kind, model.device)
    mask, embeddings = batch["attention_mask"], model.get_input_embeddings()(batch["input_ids"])
    layers = model.config.num_hidden_layers
    given = {"inputs_embeds": embeddings, "per_layer_inputs": embeddings.new_empty(*mask.shape, layers, 0)}
    with computed(model) as rows, torch.no_grad():
        found = model(**batch, logits_to_keep=kept).logits
        upstreams = model(**given, attention_mask=mask, logits_to_keep=kept).logits
        everything = model(**batch, output_hidden_states=True).logits
    assert torch.equal(found, upstreams)
    assert found.shape[1] == (kept or mask.shape[1])
    assert torch.allclose(found, everything[:, -found.shape[1] :], atol=ROUNDING)
    # Several positions without a mask are not sliced: they would lose causality.
    sliced = kept == 1 or (kept == 3 and kind != "one")
    assert rows == [kept if sliced else mask.shape[1]] * 2 + [mask.shape[1]]


@pytest.mark.parametrize(("kind", "cache"), pairwise(["one", "batch", "left", "right"], [None, "static", "none"]))
def test_generate(model: Any, kind: str, cache: str | None) -> None:
    import torch

    batch = prompt(kind, model.device)
    options = OPTIONS | ({"use_cache": False} if cache == "none" else {"cache_implementation": cache})
    found, expected = (model.generate(**batch, **options, output_hidden_states=every) for every in (False, True))
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert torch.allclose(one, other, atol=ROUNDING)


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 7}, {"num_beams": 3}], ids=str)
def test_chunks_and_beams(model: Any, options: dict[str, Any]) -> None:
    import torch

    options = {**prompt("batch", model.device), **OPTIONS, **options}
    found, expected = (model.generate(**options, output_hidden_states=every) for every in (False, True))
    assert torch.equal(found.sequences, expected.sequences)


@SLICES
def test_a_static_cache_has_the_bits_of_the_default_one(model: Any) -> None:
    """transformers-sliced-prompts is below this patch."""
    import torch

    batch = prompt("one", model.device)
    with computed(model) as rows:
        expected, found = (model.generate(**batch, **OPTIONS, cache_implementation=kind) for kind in (None, "static"))
    assert set(rows) == {1}
    assert torch.equal(expected.sequences, found.sequences)
    assert torch.equal(expected.logits[0], found.logits[0])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_of_training(model: Any, checkpointing: bool) -> None:
    import torch

    other = copy.deepcopy(model)
    batch = prompt("right", model.device)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    losses = []
    for one, options in ((model, {}), (other, {"output_hidden_states": True})):
        if checkpointing:
            one.gradient_checkpointing_enable()
        losses.append(one.train()(**batch, labels=labels, use_cache=False, **options).loss)
        losses[-1].backward()
    assert torch.equal(*losses)
    gradients = [dict(one.named_parameters()) for one in (model, other)]
    assert sum(value.grad is not None for value in gradients[0].values()) > 20
    for name, value in gradients[0].items():
        expected = gradients[1][name].grad
        assert (value.grad is None) == (expected is None)
        assert value.grad is None or torch.equal(value.grad, expected), name


def test_a_split_model_has_the_bits_of_one_device(workspace: Any, model: Any) -> None:
    batch = prompt("left", workspace.main)
    expected = model.generate(**batch, **OPTIONS)
    layers = len(model.model.layers)
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), workspace.main)
    places |= {f"model.layers.{i}": workspace.offloaded if i % 2 else workspace.main for i in range(layers)}
    assert_same(workspace.dispatch_map(model, places).generate(**batch, **OPTIONS), expected)


def test_a_second_turn(model: Any) -> None:
    import torch

    name, ids = cache_names.of(type(model).forward), prompt("batch", model.device)["input_ids"]
    with torch.no_grad():
        found, expected = [], model(ids, output_hidden_states=True).logits
        cache = None
        for part in (ids[:, :10], ids[:, 10:]):
            output = model(part, use_cache=True, **{name: cache})
            cache = output[name]
            found.append(output.logits)
    assert torch.allclose(torch.cat(found, dim=1), expected, atol=ROUNDING)


@pytest.mark.parametrize("unified", [False, True])
def test_an_assistant_reads_several_tokens(workspace: Any, unified: bool) -> None:
    """Training does. The 12B's assistants (``gemma4_unified``) have no per-layer inputs to slice."""
    import torch

    if not is_affected(PATCH):
        pytest.skip("before 5.23 no prompt is sliced")
    space = workspace.unified() if unified else workspace
    main, assistant = space.load().float(), space.load_assistant().float()
    batch = space.inputs(text_only=True)
    with torch.no_grad():
        read = main(**batch, output_hidden_states=True, return_shared_kv_states=True)
        token = main.get_input_embeddings()(batch["input_ids"])
        given = {
            "inputs_embeds": torch.cat((token, read.hidden_states[-1]), dim=-1),
            "position_ids": torch.arange(token.shape[1], device=token.device)[None],
            "shared_kv_states": read.shared_kv_states,
        }
        found, expected = assistant(**given), assistant(**given, output_hidden_states=True)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)


_MADE = f"""
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig
def made(width, shared):
    sizes = {{"hidden_size_per_layer_input": width, "num_kv_shared_layers": shared}}
    sizes["vocab_size_per_layer_input"] = {tiny_configs.VOCABULARY}
    return Gemma4ForCausalLM(Gemma4TextConfig(**{tiny_configs.text_shape()!r} | sizes)).eval()
def tokens(model):
    return model(torch.arange(5, 12)[None]).logits.shape[1]
"""
_SLEEPS = """
from gemma4_compat._engine import changes
for width, shared in ((64, 2), (0, 0), (0, 2)):
    print(tokens(made(width, shared)), ID in changes._activated)
"""
_LATE = """
model = made(0, 2)
import gemma4_compat
print(tokens(model))
"""


@SLICES
def test_it_sleeps_until_a_model_needs_it() -> None:
    done = child("-c", f"import gemma4_compat\nID = {PATCH.id!r}{_MADE}{_SLEEPS}")
    assert done.stdout.split() == ["7", "False", "7", "False", "7", "True"], done.stderr


@SLICES
def test_a_model_that_is_older_than_the_import() -> None:
    done = child("-c", _MADE + _LATE)
    assert done.stdout.split() == ["7"], done.stderr


@SLICES
def test_undone_it_raises_the_original_error(model: Any) -> None:
    import torch

    ids = torch.arange(5, 12, device=model.device)[None]
    expected = model(ids).logits
    with without(PATCH.id), pytest.raises(TypeError, match="'NoneType' object is not subscriptable"):
        model(ids)
    assert torch.equal(model(ids).logits, expected)
