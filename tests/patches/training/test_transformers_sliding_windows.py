"""F104: long texts window by window: the same bits, with padding, packing, images and caches; gradients on request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine.runtime.selftest import SelfTests
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.training.transformers_sliding_windows import PATCH
from tests.helpers import Finished
from tests.patches.promise import Promise

LENGTH = 2500  # the window of these models is 8 tokens, a block 512


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"sliding layers compute 100% of the scores"
    exact = False


@pytest.fixture(autouse=True)
def by_windows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layouts of all calls that are computed by windows."""
    seen: list[Any] = []
    kept = windows._by_windows

    def spied(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[1])
        return kept(*args, **kwargs)

    monkeypatch.setattr(windows, "_by_windows", spied)
    monkeypatch.setattr(windows, "_tests", SelfTests(limit=1024))
    return seen


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", PATCH.id)


Load = Callable[..., Any]


@pytest.fixture
def load(variant_checkpoint: Callable[[str], Path]) -> Load:
    def model(variant: str = "E2B", **options: Any) -> Any:
        found = tiny.load(variant_checkpoint(variant), **options)
        found.config.get_text_config().max_position_embeddings = 2 * LENGTH
        return found

    return model


def tokens(rows: int = 1, length: int = LENGTH) -> Any:
    import torch

    return torch.randint(3, 240, (rows, length), generator=torch.Generator().manual_seed(3))


def without(compute: Callable[[], Any]) -> Any:
    gemma4_compat.revert(PATCH.id)
    try:
        return compute()
    finally:
        gemma4_compat.install()


def logits(model: Any, **inputs: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(**inputs).logits


def same(compute: Callable[[], Any], by_windows: list[Any], called: bool = True) -> None:
    import torch

    found = compute()
    assert bool(by_windows) is called
    del by_windows[:]
    assert torch.equal(found, without(compute))
    assert by_windows == []


@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("variant", ["E2B", "12B", "31B"])
def test_padding_in_a_batch(load: Load, by_windows: list[Any], variant: str, side: str) -> None:
    import torch

    model, ids = load(variant), tokens(2)
    mask = torch.ones_like(ids)
    if side != "none":
        mask[0, slice(900) if side == "left" else slice(-900, None)] = 0
    same(lambda: logits(model, input_ids=ids, attention_mask=mask), by_windows)


def test_packing_by_positions(load: Load, by_windows: list[Any]) -> None:
    import torch

    model = load()
    positions = torch.cat([torch.arange(700), torch.arange(LENGTH - 700)])[None]
    same(lambda: logits(model, input_ids=tokens(), position_ids=positions, use_cache=False), by_windows)


@pytest.mark.parametrize("variant", ["12B", "26B-A4B", "31B"])
def test_images_whose_tokens_attend_to_each_other(load: Load, by_windows: list[Any], variant: str) -> None:
    """Their tokens are marked, which is what masks are made of; one image is across the edge of a block."""
    import torch

    model, ids = load(variant), tokens(length=2 * LENGTH)
    kinds = torch.zeros_like(ids)
    kinds[:, 40:60] = kinds[:, 1000:1048] = 1
    same(lambda: logits(model, input_ids=ids, mm_token_type_ids=kinds), by_windows)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_a_second_part_with_a_cache(load: Load, by_windows: list[Any], variant: str, kind: str) -> None:
    import torch
    from transformers import DynamicCache, StaticCache

    model, ids = load(variant), tokens()
    config = model.config.get_text_config()

    def parts() -> Any:
        cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=LENGTH)
        first = logits(model, input_ids=ids[:, :100], past_key_values=cache)
        return torch.cat([first, logits(model, input_ids=ids[:, 100:], past_key_values=cache)], dim=1)

    same(parts, by_windows)


def test_generate(load: Load, by_windows: list[Any]) -> None:
    model = load()
    options = {"max_new_tokens": 4, "do_sample": False}
    same(lambda: model.generate(tokens(), **options), by_windows)
    same(lambda: model.generate(tokens(), prefill_chunk_size=2100, **options), by_windows)


def test_the_masks_of_the_user(load: Load, by_windows: list[Any]) -> None:
    """One that shows more than the window is left to one call."""
    import torch

    model = load().model.language_model
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]

    def states(sliding: Any) -> Any:
        with torch.no_grad():
            kinds = {"full_attention": causal, "sliding_attention": sliding}
            return model(input_ids=tokens(), attention_mask=kinds, use_cache=False).last_hidden_state

    same(lambda: states(causal.triu(-7)), by_windows)
    same(lambda: states(causal), by_windows, called=False)


@pytest.mark.parametrize("length, implementation", [(1500, "sdpa"), (LENGTH, "eager")])
def test_what_is_left_alone(load: Load, by_windows: list[Any], length: int, implementation: str) -> None:
    model = load(attn_implementation={"text_config": implementation})
    same(lambda: logits(model, input_ids=tokens(length=length)), by_windows, called=False)


def test_other_models_are_left_alone(load: Load, by_windows: list[Any], enabled: None) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    load()
    config = Gemma3TextConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8,
    )  # fmt: skip
    logits(Gemma3ForCausalLM(config), input_ids=tokens())
    assert by_windows == []


Step = tuple[Any, dict[str, Any]]


def step(model: Any, ids: Any, mask: Any = None) -> Step:
    """The logits of the last tokens, and every gradient of the loss."""
    found = model(input_ids=ids, attention_mask=mask, labels=ids)
    found.loss.backward()
    gradients = {name: weight.grad.double() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found.logits[:, -8:].detach(), gradients


def test_training_without_the_opt_in_is_upstreams(load: Load, by_windows: list[Any]) -> None:
    model = load().train()
    same(lambda: step(model, tokens())[0], by_windows, called=False)


@pytest.mark.parametrize("variant, reentrant", [("E2B", None), ("E2B", False), ("31B", True)])
def test_training(
    load: Load,
    by_windows: list[Any],
    enabled: None,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    reentrant: bool | None,
) -> None:
    """As far from float64 as a step of upstream's, with padding."""
    import torch

    monkeypatch.setattr(windows, "ROUNDED", windows.UNIT)  # half the length is enough
    model, ids = load(variant, dtype=torch.float32).train(), tokens()
    mask = torch.ones_like(ids)
    mask[0, :700] = 0
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    found, gradients = step(model, ids, mask)
    assert by_windows
    expected, plain = without(lambda: step(model, ids, mask))
    assert torch.equal(found, expected)
    _, exact = without(lambda: step(model.double(), ids, mask))
    assert gradients.keys() == plain.keys() == exact.keys()
    assert off(gradients, exact) <= 1.05 * off(plain, exact)


def off(gradients: dict[str, Any], exact: dict[str, Any]) -> float:
    """The norm of all differences."""
    return sum(float((gradients[name] - right).norm()) ** 2 for name, right in exact.items()) ** 0.5


@pytest.mark.parametrize("variant", ["E2B", "12B", "31B"])
def test_training_by_products(
    tmp_path: Path, load: Load, enabled: None, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """As far from float64 as a step of upstream's in bf16, with padding. A CPU is lent what a GPU has."""
    import torch

    from gemma4_compat._gemma4.attention import products

    load(variant)  # or this release has none
    multiplied, kept = [], products.attention

    def spied(query: Any, *args: Any, **kwargs: Any) -> Any:
        multiplied.append(query.shape[3])
        return kept(query, *args, **kwargs)

    monkeypatch.setattr(products, "attention", spied)
    monkeypatch.setattr(windows, "MULTIPLYING", ("cpu",))
    model = tiny.load(tiny_models.build_checkpoint(tmp_path, variant=variant, full_width=512)).train()
    model.config.get_text_config().max_position_embeddings = 2 * LENGTH
    ids = tokens(rows=2, length=LENGTH // 2)
    mask = torch.ones_like(ids)
    mask[0, :400] = mask[1, -100:] = 0
    _, gradients = step(model, ids, mask)
    text = model.config.get_text_config()
    assert multiplied == [512 if kind == "full_attention" else text.head_dim for kind in text.layer_types]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, checkpointed = step(model, ids, mask)
    assert all(torch.equal(checkpointed[name], one) for name, one in gradients.items())
    model.gradient_checkpointing_disable()
    multiplied.clear()
    _, plain = without(lambda: step(model, ids, mask))
    _, exact = without(lambda: step(model.double(), ids, mask))
    assert not multiplied
    assert gradients.keys() == plain.keys() == exact.keys()
    assert off(gradients, exact) <= 1.2 * off(plain, exact)


def test_it_breaks_no_graph(load: Load, by_windows: list[Any], enabled: None) -> None:
    import torch

    model = load().model.language_model

    def graphs() -> int:
        found = []

        def backend(graph: Any, _inputs: Any) -> Any:
            found.append(graph)
            return graph.forward

        torch.compiler.reset()
        try:
            with torch.no_grad():
                torch.compile(model, backend=backend)(input_ids=tokens(), use_cache=False)
        finally:
            torch.compiler.reset()
        return len(found)

    assert graphs() == without(graphs)


@pytest.fixture
def split(load: Load) -> Any:
    from accelerate import dispatch_model

    model = load()
    kinds = {name: "cpu" for name, _ in model.named_children()}
    return dispatch_model(model, {**kinds, "model": "cpu"}, main_device="cpu", force_hooks=True)


def test_a_split_model(load: Load, split: Any, by_windows: list[Any]) -> None:
    import torch

    expected = logits(load(), input_ids=tokens())
    del by_windows[:]
    assert torch.equal(logits(split, input_ids=tokens()), expected)
    assert by_windows


AWAKE = """
import json, pathlib, sys
import gemma4_compat
import torch
from gemma4_compat._engine import changes
from gemma4_compat._lab import tiny

model, awake = tiny.load(pathlib.Path(sys.argv[1])), []
for length, options in [(1000, {}), (1200, {"prefill_chunk_size": 400})]:
    ids = torch.arange(length)[None] % 200 + 3
    model.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False, **options)
    awake.append("transformers-sliding-windows" in changes._activated)
print(json.dumps(awake))
"""


def test_layers_look_up_upstreams_function_until_a_text_is_long(
    warm_child: Callable[..., Finished], variant_checkpoint: Callable[[str], Path]
) -> None:
    """A chunk of 400 tokens is long where the cache already has 800."""
    assert warm_child("-c", AWAKE, str(variant_checkpoint("E2B"))).data == [False, True]
