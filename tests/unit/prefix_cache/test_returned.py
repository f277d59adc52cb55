"""The cache that ``generate`` returns after ``decode_fast`` is the one that it returns without."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

import gemma4_compat
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation.prefix_cache import rows
from gemma4_compat._graphs import decoder
from tests.patches.training.test_transformers_chunked_loss import built
from tests.unit.generation.calls import Models, steps, text
from tests.unit.prefix_cache.chats import reused
from tests.unit.prefix_cache.chats import text as tokens

pytestmark = pytest.mark.usefixtures("tapes")
NEW = 5
WAYS: dict[str, dict[str, bool]] = {"own": {}, "exact": {"exact": True}, "any length": {"any_length": True}}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 5},
    "sequences": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 2},
    "chunks": {"prefill_chunk_size": 6},
}


@pytest.fixture
def plain(models: Models) -> Any:
    return gemma4_compat.decode_fast(models.fresh(None).float(), enabled=False)


def fast(plain: Any, **way: bool) -> Any:
    return gemma4_compat.decode_fast(copy.deepcopy(plain), **way)


def ask(model: Any, given: dict[str, Any], **options: Any) -> Any:
    import torch

    torch.manual_seed(0)
    asked = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(**{**given, **asked, **options})


def cache_of(output: Any) -> Any:
    return cache_names.cache_in(output)


def later(output: Any, mask: Any = None, seed: int = 3) -> dict[str, Any]:
    """The prompt of the next turn."""
    import torch

    ids = output.sequences
    ids = torch.cat([ids, torch.cat([tokens(4, seed + row) for row in range(len(ids))])], dim=1)
    found = torch.ones_like(ids)
    if mask is not None:
        found[:, : mask.shape[1]] = mask
    return {"input_ids": ids, "attention_mask": found}


def assert_same(found: Any, expected: Any) -> None:
    """Two caches of one kind that hold the same; upstream's counters too."""
    import torch

    assert type(found) is type(expected)
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert type(one) is type(other)
        for name, value in vars(other).items():
            if name in ("keys", "values") and value is not None:
                torch.testing.assert_close(getattr(one, name), value, rtol=1e-4, atol=1e-4)
                assert getattr(one, name).is_inference() == value.is_inference()
            elif not isinstance(value, torch.Tensor):
                assert getattr(one, name) == value, name


@pytest.mark.parametrize(("length", "way"), [(3, WAYS["own"]), *((24, way) for way in WAYS.values())])
def test_next_turns(plain: Any, length: int, way: dict[str, bool]) -> None:
    """Three turns, the later ones longer than the window, in one cache."""
    model, turns = fast(plain, **way), []
    for one in (plain, model):
        given, cache, found = text(one, length), None, []
        for turn in range(3):
            options = {} if cache is None else {"past_key_values": cache}
            output = ask(one, given, **options)
            assert cache is None or cache_of(output) is cache
            given, cache = later(output, seed=turn), cache_of(output)
            found.append(output.sequences.tolist())
        turns.append((found, cache))
    (expected, whole), (found, cache) = turns
    assert found == expected
    assert_same(cache, whole)
    assert steps(model).replayed
    assert any("after decode_fast(model, reuse_prefix=True)" in reason for reason in steps(model).reasons), (
        "of later turns"
    )


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_what_the_first_turn_returns(plain: Any, options: dict[str, Any]) -> None:
    model, given = fast(plain), text(plain, batch=2)
    found, expected = ask(model, given, **options), ask(plain, given, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert_same(cache_of(found), cache_of(expected))
    if "num_beams" not in options and "num_return_sequences" not in options:  # of these, the cache has other rows
        next_one = later(expected, given["attention_mask"])
        again = [
            ask(one, next_one, past_key_values=cache_of(made)) for one, made in ((model, found), (plain, expected))
        ]
        assert again[0].sequences.tolist() == again[1].sequences.tolist()


def test_it_is_the_callers(plain: Any) -> None:
    """Other calls do not write to it, nor does a graph lose its memory. It can be copied, saved and read."""
    import torch

    model, given = fast(plain), text(plain)
    for _ in range(2):
        first = ask(model, given)
    captured = steps(model).captured
    held = copy.deepcopy(cache_of(first))
    others = [ask(model, text(model, seed=seed)) for seed in (1, 2)]
    assert steps(model).captured == captured
    assert len({id(cache_of(one)) for one in (first, *others)}) == 3
    assert_same(cache_of(first), held)
    cache_of(first).layers[0].keys.zero_()
    expected = ask(plain, given)
    assert_same(cache_of(ask(model, given)), cache_of(expected))
    file, full = io.BytesIO(), io.BytesIO()
    torch.save(held, file)
    torch.save(cache_of(expected), full)
    assert abs(file.tell() - full.tell()) < 1000, "nothing of a longer cache"
    newest = {"input_ids": first.sequences[:, -1:], "attention_mask": torch.ones_like(first.sequences)}
    with torch.no_grad():
        found, right = (
            one(**newest, past_key_values=cache).logits for one, cache in ((model, held), (plain, cache_of(expected)))
        )
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_caches_that_the_caller_chose(plain: Any) -> None:
    import torch
    from transformers import DynamicCache

    model, given = fast(plain), text(plain)
    assert type(cache_of(ask(model, given, cache_implementation="static"))).__name__ == "StaticCache"
    assert cache_of(ask(model, given, use_cache=False)) is None
    own = DynamicCache(config=model.config.get_text_config())
    assert cache_of(ask(model, given, past_key_values=own)) is own
    assert isinstance(model.generate(**given, max_new_tokens=2), torch.Tensor)
    with torch.inference_mode():
        assert_same(cache_of(ask(model, given)), cache_of(ask(plain, given)))


def test_a_loop_of_the_callers(plain: Any) -> None:
    """``custom_generate`` decodes with the cache that it has without ``decode_fast``."""
    seen: list[str] = []

    def loop(_model: Any, input_ids: Any, **given: Any) -> Any:
        seen.append(type(cache_names.cache_in(given)).__name__)
        return input_ids

    for one in (plain, fast(plain)):
        one.generate(**text(one), max_new_tokens=2, custom_generate=loop)
    assert seen == ["DynamicCache"] * 2


def test_where_both_caches_do_not_fit(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The static one goes, a layer at a time, and the next call captures again."""
    import torch

    model, given = fast(plain), text(plain)
    ask(model, given)
    fill, filled = rows.fill, list[int]()

    def fails_once(cache: Any, index: int, *args: Any) -> None:
        filled.append(index)
        if len(filled) == 3:
            cache.layers[index].keys = None
            raise torch.OutOfMemoryError
        fill(cache, index, *args)

    monkeypatch.setattr(rows, "fill", fails_once)
    found, expected = ask(model, given), ask(plain, given)
    assert_same(cache_of(found), cache_of(expected))
    assert decoder.of(model).memories == []
    monkeypatch.undo()
    assert_same(cache_of(ask(model, given)), cache_of(expected))


def test_reuse_prefix_keeps_the_text_as_well(plain: Any) -> None:
    """The static cache stays the model's, whatever the caller does with the one that is returned."""
    model = fast(plain, reuse_prefix=True)
    given = {"input_ids": tokens(24, 0)}
    found, expected = ask(model, given), ask(plain, given)
    assert_same(cache_of(found), cache_of(expected))
    cache_of(found).layers[0].keys.zero_()
    ids = later(expected)["input_ids"]
    output, held = reused(model, ids, new=NEW)
    assert held == ids.shape[1] - 5
    assert output.sequences.tolist() == ask(plain, {"input_ids": ids}).sequences.tolist()


@pytest.mark.parametrize("variant", [None, "26B-A4B"])
def test_with_prompt_lookup(workspace: Any, variant: str | None, tmp_path: Path) -> None:
    """Undrafted texts (experts) too, and the caller's cache stays the one that is filled."""
    base, _, _ = built(workspace, variant, tmp_path)
    plain = base.float().eval()
    model, options = fast(plain, assistants=True), {"prompt_lookup_num_tokens": 2}
    turns = []
    for one in (plain, model):
        first = ask(one, text(one), **options)
        second = ask(one, later(first), past_key_values=cache_of(first), **options)
        assert cache_of(second) is cache_of(first)
        turns.append([first.sequences.tolist(), second.sequences.tolist(), type(cache_of(second))])
    assert turns[0] == turns[1]
