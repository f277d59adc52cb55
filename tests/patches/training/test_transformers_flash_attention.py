"""F54: flash attention in the layers that it can run; every answer is that of sdpa, up to float32's rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.stand_ins import flash
from gemma4_compat.patches.training.transformers_flash_attention import BOUNDS, PATCH
from tests.patches.promise import Promise

LENGTHS = (7, 12, 5)  # of packed sequences: the window is 8 tokens
TOTAL = sum(LENGTHS)


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: FlashAttention forward only supports head dimension at most 256"
    exact = False


@pytest.fixture(scope="module")
def kernel() -> Iterator[tuple[str, Any]]:
    with flash.kernel() as found:
        yield found


@pytest.fixture(autouse=True)
def _no_calls_yet(kernel: tuple[str, Any]) -> None:
    """A test sees its own calls of the kernel, whichever tests ran before it."""
    flash.called.clear()


Pair = Callable[..., tuple[Any, Any]]


@pytest.fixture(scope="module")
def pair(workspace: Any, kernel: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """``pair(variant)``: the model with sdpa, and with flash attention."""
    name, dtype = kernel

    @functools.cache
    def models(variant: str = "E2B") -> tuple[Any, Any]:
        folder = tmp_path_factory.mktemp("wide")
        try:
            tiny_models.build_checkpoint(folder, variant=variant, full_width=512)
        except gemma4_compat.Gemma4CompatError as error:
            pytest.skip(str(error))
        options = {"device": workspace.main, "dtype": dtype}
        return tuple(
            tiny.load(folder, **options, attn_implementation={"text_config": each}) for each in ("sdpa", name)
        )

    return models


def ids(model: Any, batch: int = 1, length: int = TOTAL) -> Any:
    import torch

    return torch.randint(3, 240, (batch, length), generator=torch.Generator().manual_seed(3)).to(model.device)


def same(expected: Any, found: Any, kept: Any = None) -> None:
    """Up to rounding, where ``kept``; both kinds of layers ran as they should have, flash among them."""
    bound = BOUNDS[str(found.dtype)] * expected.abs().max()
    off = (expected - found).abs()
    assert (off if kept is None else off[kept.bool()]).max() <= bound
    assert flash.called
    assert set(flash.called) == {32}
    flash.called.clear()


def forward(model: Any, **options: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(**options).logits


@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_padding_in_a_batch(pair: Pair, side: str) -> None:
    import torch

    plain, model = pair()
    mask = torch.ones(3, TOTAL, dtype=torch.long, device=plain.device)
    for row, lost in ((0, 5), (2, 11)):
        mask[row, : lost if side == "left" else 0] = 0
        mask[row, TOTAL - lost if side == "right" else TOTAL :] = 0
    batch = {"input_ids": ids(plain, 3), "attention_mask": mask}
    same(forward(plain, **batch), forward(model, **batch), mask)


def _positions(device: Any) -> Any:
    import torch

    return torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)


def _alone(model: Any, tokens: Any) -> Any:
    """Each of the packed sequences by itself."""
    import torch

    return torch.cat([forward(model, input_ids=part) for part in tokens.split(LENGTHS, dim=1)], dim=1)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_packing_by_positions(pair: Pair, mask: bool, cache: bool) -> None:
    import torch

    plain, model = pair()
    tokens = ids(plain)
    batch = {"input_ids": tokens, "position_ids": _positions(plain.device), "use_cache": cache}
    if mask:
        batch["attention_mask"] = torch.ones_like(tokens)
    same(_alone(plain, tokens), forward(model, **batch))


@pytest.mark.parametrize(("rows", "mask"), [(2, False), (2, True), (1, True)], ids=str)
def test_packing_by_positions_in_several_rows_or_with_padding(pair: Pair, rows: int, mask: bool) -> None:
    import torch

    plain, model = pair()
    tokens = ids(plain, rows)
    positions = _positions(plain.device).expand(rows, -1)
    given = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    if mask:
        given = {name: torch.nn.functional.pad(each, (0, 3)) for name, each in given.items() if name != "use_cache"}
        given["attention_mask"] = torch.nn.functional.pad(torch.ones_like(tokens), (0, 3))
    found = forward(model, **given)[:, :TOTAL]
    assert not flash.called  # a flash kernel would not separate them
    assert (_alone(plain, tokens) - found).abs().max() <= BOUNDS[str(found.dtype)] * found.abs().max()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("positions", [False, True])
def test_packing_by_lengths(pair: Pair, positions: bool, rows: int) -> None:
    import torch

    plain, model = pair()
    tokens = ids(plain, rows)
    lengths = torch.tensor([0, *LENGTHS * rows], device=plain.device).cumsum(0).to(torch.int32)
    packed = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 12, "max_length_k": 12}
    if positions and rows == 1:
        packed["position_ids"] = _positions(plain.device)
    same(_alone(plain, tokens), forward(model, input_ids=tokens, use_cache=False, **packed))


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_in_parts(pair: Pair, kind: str, mask: bool) -> None:
    import torch
    from transformers import DynamicCache, StaticCache

    plain, model = pair()
    tokens = ids(plain)
    whole = forward(plain, input_ids=tokens, use_cache=False)
    config = model.config.get_text_config()
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=32)
    at, parts = 0, []
    for length in (5, 1, 1, 6, 9, 1, 1):
        more = {"attention_mask": torch.ones_like(tokens[:, : at + length])} if mask else {}
        part = tokens[:, at : at + length]
        parts.append(forward(model, input_ids=part, past_key_values=cache, **more))
        at += length
    same(whole, torch.cat(parts, dim=1))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("variant", ["E2B", "31B", "12B"])
def test_generate_with_padding(pair: Pair, variant: str, cache: str | None) -> None:
    import torch

    plain, model = pair(variant)
    tokens = ids(plain, 2)
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    expected, found = (
        each.generate(input_ids=tokens, attention_mask=mask, disable_compile=True, **options)
        for each in (plain, model)
    )
    assert torch.equal(expected, found)
    assert set(flash.called) == {32}
    flash.called.clear()


@pytest.mark.parametrize("variant", ["E2B", "E4B", "12B", "26B-A4B", "31B"])
def test_an_image(workspace: Any, pair: Pair, variant: str) -> None:
    import torch

    plain, model = pair(variant)
    batch = tiny.inputs(workspace.main, variant=variant)
    dtype = next(plain.parameters()).dtype
    for name in ("pixel_values", "input_features"):
        if name in batch:
            batch[name] = batch[name].to(dtype)
    expected, found = forward(plain, **batch), forward(model, **batch)
    assert (expected - found).abs().max() <= BOUNDS[str(dtype)] * expected.abs().max()
    tokens = [each.generate(**batch, max_new_tokens=5, do_sample=False) for each in (plain, model)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(pair: Pair, checkpointing: bool) -> None:
    import torch

    gradients = []
    for model in pair():
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        try:
            tokens = ids(model, 2)
            mask = torch.ones_like(tokens)
            mask[1, -4:] = 0
            labels = tokens.masked_fill(mask == 0, -100)
            model(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
            gradients.append({name: weight.grad for name, weight in model.named_parameters() if "layers" in name})
            model.zero_grad(set_to_none=True)
        finally:
            model.eval()
            model.gradient_checkpointing_disable()
    flash.called.clear()
    norm = sum(each.norm() ** 2 for each in gradients[0].values() if each is not None) ** 0.5
    assert norm > 0
    off = sum((each - gradients[1][name]).norm() ** 2 for name, each in gradients[0].items() if each is not None)
    assert off**0.5 <= 1e-4 * norm


def test_a_mask_of_the_users_own(pair: Pair) -> None:
    import torch

    plain, model = pair()
    tokens = ids(plain)
    mask = torch.ones(TOTAL, TOTAL, dtype=torch.bool, device=plain.device).tril()[None, None]
    assert torch.equal(*(forward(each, input_ids=tokens, attention_mask=mask) for each in (plain, model)))


def test_switched_on_a_loaded_model(pair: Pair, kernel: tuple[str, Any]) -> None:
    plain, model = pair()
    tokens = ids(plain)
    expected = forward(plain, input_ids=tokens)
    text = model.config.get_text_config()
    model.set_attn_implementation({"text_config": "sdpa"})
    try:
        assert text._attn_implementation == "sdpa"
        assert (forward(model, input_ids=tokens) == expected).all()
        assert not flash.called
    finally:
        model.set_attn_implementation({"text_config": kernel[0]})
    same(expected, forward(model, input_ids=tokens))


def test_the_attention_of_others_is_theirs(kernel: tuple[str, Any]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 1024, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=64, attn_implementation=kernel[0])
    with pytest.raises(RuntimeError, match="head dimension at most 256"):
        LlamaForCausalLM(config)(torch.ones(1, 4, dtype=torch.long))


def test_undone_it_raises_again(pair: Pair) -> None:
    _, model = pair()
    gemma4_compat.revert(PATCH.id)
    try:
        with pytest.raises(RuntimeError, match="head dimension at most 256"):
            forward(model, input_ids=ids(model))
    finally:
        gemma4_compat.install()
        flash.called.clear()
