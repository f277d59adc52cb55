"""Gemma 4 decodes from tapes bit for bit, eager forwards in between, and a stale tape gives stale answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils import _pytree

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._graphs import static_caches
from gemma4_compat._lab.stand_ins.tape import Tape
from gemma4_compat._offload.transfer import streaming

PROMPT, TOKENS = 4, 12  # tiny models have a window of 8: it is not yet full, fills and is full


class Decoder:
    """What ``generate`` calls for a token: the second one of a kind is captured, the others are replayed."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps: dict[Any, Any] = {}
        self.counts = {"eager": 0, "captured": 0, "replayed": 0}
        self.before_replay: Callable[[], Any] = lambda: None

    def __call__(self, **inputs: Any) -> Any:
        name = cache_names.NEW if cache_names.NEW in inputs else cache_names.OLD
        past_key_values = inputs.pop(name)
        kind = tuple(static_caches.window_full(layer) for layer in static_caches.sliding(past_key_values))
        if kind not in self.steps:
            self.steps[kind] = None
            self.counts["eager"] += 1
            return self.model(past_key_values=past_key_values, **inputs)
        if self.steps[kind] is None:
            tape, static = Tape(), _pytree.tree_map_only(torch.Tensor, torch.clone, inputs)
            with static_caches.capturable(past_key_values), streaming.captured(streaming.streamers(self.model)):
                output = tape.capture(lambda: self.model(past_key_values=past_key_values, **static))
            self.steps[kind] = tape, static, output
            self.counts["captured"] += 1
        tape, static, output = self.steps[kind]
        for old, new in zip(_pytree.tree_leaves(static), _pytree.tree_leaves(inputs), strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new)
        self.before_replay()
        tape.replay()
        static_caches.advance(static_caches.sliding(past_key_values))
        self.counts["replayed"] += 1
        return output


def generate(model: Any, decoder: Decoder | None = None, **options: Any) -> Any:
    ids = torch.arange(3, 3 + PROMPT)[None]
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(base), "_valid_auto_compile_criteria", lambda *_: decoder is not None)
        patch.setattr(type(base), "get_compiled_call", lambda *_: decoder)
        return model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            cache_implementation="static",
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )


def assert_equal(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    assert all(torch.equal(*logits) for logits in zip(one.logits, other.logits, strict=True))


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
@pytest.mark.parametrize("adapter", [None, "language"])
@pytest.mark.parametrize("store", [None, "ram"])
def test_gemma(workspace: Any, store: str | None, quantization: str | None, adapter: str | None) -> None:
    from tests.unit.offload import threads

    if store is None:
        model = threads.adapted(workspace, workspace.load(quantization), adapter)
    else:
        model = threads.split(workspace, store, quantization, adapter)
    expected = generate(model)
    decoder = Decoder(model)
    assert_equal(generate(model, decoder), expected)
    assert decoder.counts == {"eager": 2, "captured": 2, "replayed": TOKENS - 3}
    assert_equal(generate(model), expected)
    # With forwards between the replays: a streamed group has its memory then, or does not have it.
    decoder = Decoder(model)
    decoder.before_replay = lambda: model(input_ids=torch.arange(7)[None])
    assert_equal(generate(model, decoder), expected)


def test_8_bit_linears_are_refused(workspace: Any) -> None:
    decoder = Decoder(workspace.load("8bit"))
    with pytest.raises(RuntimeError, match=r"not permitted when stream is capturing: bitsandbytes\.int8"):
        generate(decoder.model, decoder)
    assert decoder.counts == {"eager": 1, "captured": 0, "replayed": 0}


def test_a_capture_leaves_the_cache_as_it_was(workspace: Any) -> None:
    from transformers import StaticCache

    model = workspace.load()
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 7)[None], past_key_values=cache)
        before = {name: tensor.clone() for name, tensor in tensors(cache)}
        step = {"input_ids": torch.tensor([[9]]), "position_ids": torch.tensor([[4]])}
        output = Tape().capture(lambda: model(**step, past_key_values=cache))
    assert output.logits.isnan().all()
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(cache))
    assert {layer.cumulative_length_int for layer in cache.layers if hasattr(layer, "cumulative_length_int")} == {5}


def tensors(cache: Any) -> list[tuple[str, Any]]:
    return [
        (f"{index}.{name}", value)
        for index, layer in enumerate(cache.layers)
        for name, value in vars(layer).items()
        if isinstance(value, torch.Tensor)
    ]


def test_what_a_replay_of_gemma_sees(workspace: Any) -> None:
    """A weight changed in place; not an adapter that is off, a hook, nor another module."""
    from tests.unit.offload import threads

    model = threads.adapted(workspace, workspace.load(), "language")
    layer = model.get_base_model().model.language_model.layers[0]
    step = {"input_ids": torch.tensor([[9]]), "use_cache": False}
    with torch.no_grad():
        tape = Tape()
        output = tape.capture(lambda: model(**step))

        def replayed() -> Any:
            tape.replay()
            return output.logits.clone()

        before = model(**step).logits
        assert torch.equal(replayed(), before)
        with model.disable_adapter():
            assert not torch.equal(model(**step).logits, before)
            assert torch.equal(replayed(), before)
        handle = layer.register_forward_hook(lambda *_: pytest.fail("no Python runs in a replay"))
        assert torch.equal(replayed(), before)
        handle.remove()
        weight = layer.mlp.down_proj.base_layer.weight
        weight.mul_(2)
        changed = model(**step).logits
        assert not torch.equal(changed, before)
        assert torch.equal(replayed(), changed)
        layer.mlp.down_proj.base_layer.weight = nn.Parameter(weight / 2)
        assert torch.equal(model(**step).logits, before)
        assert torch.equal(replayed(), changed)
