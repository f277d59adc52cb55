"""A head in host memory, tied to an embedding there: it is read in place, also in two stages, and not copied."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

import gemma4_compat
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._graphs import fused_steps
from gemma4_compat._offload.transfer import row_lookup
from tests.unit.generation import calls
from tests.unit.generation.test_best_words import SAMPLED, SHORT, WAYS, Model, pytestmark, texts
from tests.unit.generation.test_best_words import made as made
from tests.unit.generation.test_best_words import plain as plain

TIED = ("model.embed_tokens", "lm_head")
COPIED = "lm_head is offloaded as a whole and copied by accelerate's hook for every token"
NOT_HERE = "the head is not on the model's device"
__all__ = ["pytestmark"]


def dispatched(
    model: Any, where: str = "cpu", *, main: str = "cpu", parts: Collection[str] = TIED, **options: Any
) -> Any:
    """The model with its embedding and its head, or other ``parts``, there; the rest is on a device that computes all
    of it.
    """
    from accelerate import dispatch_model

    device = torch.device(main)
    placement = {f"model.{name}": device for name, _ in model.model.named_children() if name != "layers"}
    placement |= {f"model.layers.{index}": device for index in range(len(model.model.layers))} | {"lm_head": device}
    skip = list(model._skip_keys_device_placement)
    placement |= dict.fromkeys(parts, where)
    return dispatch_model(model, placement, main_device=device, skip_keys=skip, **options)


def stored(model: Any) -> Any:
    """The head's weight in host memory."""
    return module_hooks.offload_hook(model.lm_head).weights_map["weight"]


@pytest.mark.full
@pytest.mark.parametrize("way", [way for way, asked in WAYS.items() if asked.get("batch", 1) <= row_lookup.MOST_ROWS])
def test_tokens_are_those_of_a_head_on_the_device(made: Model, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "greedy":
        monkeypatch.setattr(fused_steps.Progress, "after", 2)
    model = dispatched(made())
    found = texts(model, 2, **WAYS[way])
    counted = gemma4_compat.statistics(model).decoding
    assert (counted.heads_in_two_stages, counted.whole_heads, counted.reasons, counted.not_fused) == (2, {}, (), ())
    assert bool(counted.fused) == (way == "greedy")
    assert counted.replayed
    assert 0 < counted.head_words < counted.head_tokens * len(stored(model)) // 2
    assert model.lm_head.weight.device.type == "meta"
    assert found == texts(made(whole=True), 2, **WAYS[way])


LAYERS = [f"model.layers.{index}" for index in range(6)]
OTHERS: dict[str, Collection[str]] = {
    "per-layer embeddings": ["model.embed_tokens_per_layer"],
    "layers": LAYERS,
    "layers and head": [*LAYERS, *TIED],
}


@pytest.mark.parametrize(
    "parts", [one if one == "layers and head" else pytest.param(one, marks=pytest.mark.full) for one in OTHERS]
)
def test_two_stages_with_other_parts_on_the_host(made: Model, parts: str) -> None:
    """The hooks that this package puts on a dispatched model see no logits."""
    model = dispatched(made(), parts=OTHERS[parts])
    found = texts(model, **SAMPLED)
    counted = gemma4_compat.statistics(model).decoding
    assert (counted.heads_in_two_stages, counted.whole_heads, counted.reasons) == (1, {}, ())
    assert counted.replayed
    assert found == texts(made(whole=True), **SAMPLED)


def test_the_head_is_not_copied(made: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a prompt nor for a token, with the whole head as well; as it was before, accelerate brought it."""
    from accelerate.utils import OffloadedWeightsLoader

    read: list[str] = []
    original = OffloadedWeightsLoader.__getitem__

    def get(self: Any, key: str) -> Any:
        read.append(key)
        return original(self, key)

    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", get)
    found = []
    for rows, options in ((8, {}), (8, {"whole": True}), (0, {"whole": True})):
        monkeypatch.setattr(row_lookup, "MOST_ROWS", rows)
        model = dispatched(made(**options))
        read.clear()
        found.append((texts(model, **SHORT), read.count("lm_head.weight")))
        counted = gemma4_compat.statistics(model).decoding
        assert (bool(counted.replayed), counted.reasons) == ((True, ()) if rows else (False, (COPIED,)))
    tokens = found[0][0]
    assert found == [(tokens, 0), (tokens, 0), (tokens, SHORT["max_new_tokens"])]


@pytest.mark.full
def test_more_rows_than_are_read_in_place_are_as_before(made: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_lookup, "MOST_ROWS", 1)
    model, found = dispatched(made()), []
    counted = gemma4_compat.statistics(model).decoding
    for batch in (2, 1):
        found.append(texts(model, batch=batch, **SHORT))
        assert bool(counted.replayed) == (batch == 1)
    assert counted.reasons == (COPIED,)
    assert (counted.whole_heads, counted.heads_in_two_stages) == ({NOT_HERE: 1}, 1)
    whole = made(whole=True)
    assert found == [texts(whole, batch=batch, **SHORT) for batch in (2, 1)]


@pytest.mark.full
def test_the_next_text_is_in_place_after_a_copy(made: Model) -> None:
    """A backward pass has the head copied. The next prompt is replayed, which tells nothing about the head."""
    model = dispatched(made())
    counted = gemma4_compat.statistics(model).decoding
    *found, _ = texts(model, 3, **SHORT)  # the prompt is captured
    model(**calls.text(model)).logits.sum().backward()
    before = counted.prompts_replayed, counted.eager
    found += texts(model, **SHORT)[:1]
    assert (counted.prompts_replayed, counted.eager) == (before[0] + 1, before[1])
    assert (counted.heads_in_two_stages, counted.whole_heads, counted.reasons) == (4, {}, ())
    assert found[3] == found[0]


@pytest.mark.full
def test_who_wants_all_logits_gets_them(made: Model) -> None:
    asked = {**SHORT, "return_dict_in_generate": True, "output_logits": True}
    found = [model.generate(**calls.text(model), **asked) for model in (dispatched(made()), made())]
    calls.assert_equal(*found)


@pytest.mark.full
def test_on_disk_is_as_before(made: Model, tmp_path: Path) -> None:
    as_before(made, dispatched(made(), "disk", offload_dir=tmp_path))


@pytest.mark.full
def test_where_memory_cannot_be_read_in_place_is_as_before(made: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_lookup, "_ALIGNMENT", 1 << 62)
    as_before(made, dispatched(made()))


def as_before(made: Model, model: Any) -> None:
    """The head of this model is copied for each token, with the same tokens."""
    found = texts(model, **SHORT)
    counted = gemma4_compat.statistics(model).decoding
    assert (counted.whole_heads, counted.reasons, counted.replayed) == ({NOT_HERE: 1}, (COPIED,), 0)
    assert found == texts(made(whole=True), **SHORT)


def _written_to(model: Any, weight: Any) -> Any:
    weight.view(torch.int16).numpy()[:] = weight.view(torch.int16).numpy()[::-1].copy()
    return model


def _another_tensor_in_its_place(model: Any, weight: Any) -> Any:
    """What no counter of accelerate's hook tells of."""
    for name in TIED:
        hook = module_hooks.offload_hook(model.get_submodule(name))
        if hook is None:
            model.get_submodule(name).weight.data = weight.flip(0)
        else:
            where = row_lookup.host_memory.stored(hook.weights_map, "weight")
            where.holder[where.key] = weight.flip(0)
    return model


def _loaded(model: Any, weight: Any) -> Any:
    model.load_state_dict({f"{name}.weight": weight.flip(0) for name in TIED}, strict=False)
    return model


def _another_vocabulary(model: Any, weight: Any) -> Any:
    model.resize_token_embeddings(len(weight) - 70)
    return model


def _hooks_removed(model: Any, weight: Any) -> Any:
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)
    model.lm_head.weight.data.copy_(weight.flip(0))
    return model


def _dispatched_again(model: Any, weight: Any) -> Any:
    was = module_hooks.offload_hook(model.lm_head) is not None
    _hooks_removed(model, weight)
    return dispatched(model) if was else model


def _adapter_on_the_head(model: Any, _weight: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    return get_peft_model(model, config, autocast_adapter_dtype=False).eval()


CHANGES = (
    *(_written_to, _another_tensor_in_its_place, _loaded, _another_vocabulary, _hooks_removed, _dispatched_again),
    _adapter_on_the_head,
)


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__.strip("_").replace("_", " "))
def test_changes_between_two_calls(made: Model, change: Callable[[Any, Any], Any]) -> None:
    found, counted = [], None
    for whole in (False, True):
        model = made(whole=whole)
        if not whole:
            counted = gemma4_compat.statistics(dispatched(model)).decoding
        before = texts(model, 2, **SHORT)
        weight = model.lm_head.weight.data if whole else stored(model)
        changed = change(model, weight)
        found.append((before, texts(changed, **SHORT)))
    assert counted is not None
    assert counted.heads_in_two_stages == (2 if change in (_adapter_on_the_head, _hooks_removed) else 3)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def _another_map(model: Any, weight: Any) -> Any:
    for name in TIED:
        module_hooks.offload_hook(model.get_submodule(name)).weights_map = {"weight": weight.flip(0)}
    return model


@pytest.mark.parametrize(
    "change", [*CHANGES[:-1], _another_map], ids=lambda one: one.__name__.strip("_").replace("_", " ")
)
def test_graphs_of_the_whole_head_are_those_of_the_model_as_it_is(
    plain: Any, tapes: Any, change: Callable[[Any, Any], Any]
) -> None:
    """A replay reads the memory that it was captured with: each change is noticed."""
    model = gemma4_compat.decode_fast(dispatched(copy.deepcopy(plain)), exact=True)
    first = calls.compared(model, calls.ask(model))
    model = change(model, stored(model))
    assert calls.differ(first, calls.compared(model, calls.ask(model)))
    counted = gemma4_compat.statistics(model).decoding
    assert counted.reasons == ()
    assert (change is _written_to) == (not counted.recaptures)
