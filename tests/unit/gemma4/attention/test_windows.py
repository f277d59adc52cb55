"""Attention by windows beside one call of transformers' function: bits, gradients, and when it is left to one call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from gemma4_compat._gemma4.attention import packing, windows

WINDOW = 512
#: Length of the queries, and keys before them: of a cache that is full, of a static one, of none.
SHAPES = [(2048, 0), (2500, 0), (2049, 0), (2500, 511), (2500, 512), (4501, 300)]


class Gemma4TextAttention:
    """What the functions read of a layer."""

    num_key_value_groups, sliding_window, is_causal, training = 2, WINDOW, True, False


Call = Callable[..., Any]


@pytest.fixture
def whole() -> Call:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    windows._tests.passed.clear()
    return sdpa_attention_forward


@pytest.fixture
def by_windows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layouts of all calls that are computed by windows, those that are only compared included."""
    seen: list[Any] = []
    kept = windows._by_windows

    def spied(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[1])
        return kept(*args, **kwargs)

    monkeypatch.setattr(windows, "_by_windows", spied)
    return seen


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    with mock.patch.dict(os.environ, GEMMA4_COMPAT_ENABLE=windows.ID):
        yield


def tensors(queries: int, before: int = 0, dtype: Any = torch.float32, rows: int = 1) -> list[Any]:
    """Queries, keys and values with the strides that a layer gives them."""
    torch.manual_seed(queries)
    keys = queries + before
    shapes = ((queries, 4), (keys, 2), (keys, 2))
    found = [torch.randn(rows, length, heads, 32).to(dtype).transpose(1, 2) for length, heads in shapes]
    return [found[0] * 0.3, *found[1:]]


def band(queries: int, before: int = 0, window: int = WINDOW) -> Any:
    """(1, 1, queries, keys)"""
    at, key = torch.arange(queries)[:, None] + before, torch.arange(queries + before)
    return ((key <= at) & (key > at - window))[None, None]


def padded(queries: int, before: int = 0) -> Any:
    """Two rows, one with padding on the left, longer than a window, and one on the right."""
    seen = torch.ones(2, 1, 1, queries + before, dtype=torch.bool)
    seen[0, ..., :700], seen[1, ..., -900:] = False, False
    return band(queries, before) & seen


def packed(queries: int, before: int = 0) -> Any:
    number = torch.arange(queries + before).div(615, rounding_mode="floor")
    return band(queries, before) & (number[before:, None] == number)


def images(queries: int, before: int = 0) -> Any:
    """Two images of 280 tokens, both across the edge of a block."""
    number = torch.full((queries + before,), -1)
    number[400:680], number[1500:1780] = 0, 1
    at, key = torch.arange(queries)[:, None] + before, torch.arange(queries + before)
    inside = (number[before:, None] == number) & (number >= 0)
    return (((key <= at) | inside) & (key > at - WINDOW))[None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_of_one_call(whole: Call, by_windows: list[Any], shape: tuple[int, int], dtype: Any) -> None:
    given, mask = tensors(*shape, dtype), band(*shape)
    with torch.no_grad():
        expected = whole(Gemma4TextAttention(), *given, mask, scaling=1.0)[0]
        for _ in range(2):
            found = windows.attention(whole, Gemma4TextAttention(), *given, mask, scaling=1.0)[0]
            assert torch.equal(found, expected)
    assert list(windows._tests.passed.values()) == [True]
    assert len(by_windows) == 3  # one of them to compare


@pytest.mark.parametrize("mask", [padded, packed, images])
@pytest.mark.parametrize("shape", [(3700, 0), (3700, 511)], ids=str)
def test_masks_of_every_kind(whole: Call, by_windows: list[Any], mask: Call, shape: tuple[int, int]) -> None:
    """The rows of padded queries, which see no key, included."""
    given, seen = tensors(*shape, rows=2), mask(*shape)
    with torch.no_grad():
        expected = whole(Gemma4TextAttention(), *given, seen, scaling=1.0)[0]
        for each in (seen, torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)):
            found = windows.attention(whole, Gemma4TextAttention(), *given, each, scaling=1.0)[0]
            assert torch.equal(found, expected)
    assert len(by_windows) == 4
    assert not expected.isnan().any()


def step(function: Call, given: list[Any], mask: Any, dtype: Any) -> list[Any]:
    """The output and the three gradients, in float64."""
    leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in given]
    found = function(Gemma4TextAttention(), *leaves, mask, scaling=1.0)[0]
    found.backward(torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    return [found.detach().double(), *(leaf.grad.double() for leaf in leaves)]


@pytest.mark.parametrize(
    "mask, dtype",
    [(band, torch.float32), (padded, torch.float32), (band, torch.bfloat16), (images, torch.bfloat16)],
    ids=["band-float32", "padded-float32", "band-bfloat16", "images-bfloat16"],
)
def test_gradients_are_as_exact(whole: Call, by_windows: list[Any], mask: Call, dtype: Any) -> None:
    """The bound of docs/TRAINING.md, against float64. Outputs and gradients of queries have the bits of one call."""
    seen = mask(4500)
    given = tensors(4500, dtype=dtype, rows=len(seen))
    exact = step(whole, given, seen, torch.float64)
    plain = step(whole, given, seen, dtype)
    with enabled():
        found = step(lambda *args, **kwargs: windows.attention(whole, *args, **kwargs), given, seen, dtype)
    assert len(by_windows) == 1
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])
    for right, usual, ours in zip(exact[2:], plain[2:], found[2:]):
        assert (ours - right).abs().mean() <= 1.01 * (usual - right).abs().mean()
        assert (ours - right).abs().max() <= 1.1 * (usual - right).abs().max()


@pytest.mark.parametrize("padding", [slice(0), slice(700), slice(-900, None)], ids=["none", "left", "right"])
@pytest.mark.parametrize("length", [4500, 4608])
def test_numbers_of_texts_have_the_bits_of_their_mask(
    whole: Call, by_windows: list[Any], length: int, padding: slice
) -> None:
    """In two rows of other texts, by windows and, without the opt-in, by one call."""
    texts = torch.stack([torch.arange(length) // 615, torch.arange(length) // 1400])
    tokens = torch.ones(2, length, dtype=torch.bool)
    tokens[0, padding] = False
    seen = band(length) & (texts[:, None, :, None] == texts[:, None, None]) & tokens[:, None, None]
    numbers = packing.by_text(texts, tokens)
    assert torch.equal(packing.whole(numbers, length, WINDOW), seen)
    assert torch.equal(packing.whole(numbers, 90, WINDOW), seen[:, :, -90:])
    given = tensors(length, dtype=torch.bfloat16, rows=2)
    with enabled():
        right, found = (
            step(lambda *args, **kwargs: windows.attention(whole, *args, **kwargs), given, mask, torch.bfloat16)
            for mask in (seen, numbers)
        )
    assert all(map(torch.equal, right, found))
    assert len(by_windows) == 2
    by_one_call = step(
        lambda *args, **kwargs: windows.attention(whole, *args, **kwargs), given, numbers, torch.bfloat16
    )
    assert all(map(torch.equal, by_one_call, step(whole, given, seen, torch.bfloat16)))
    assert len(by_windows) == 2


def test_gradients_without_the_opt_in_are_those_of_one_call(whole: Call, by_windows: list[Any]) -> None:
    given, mask = tensors(4096), band(4096)
    plain = step(whole, given, mask, torch.float32)
    found = step(lambda *args, **kwargs: windows.attention(whole, *args, **kwargs), given, mask, torch.float32)
    assert all(map(torch.equal, plain, found))
    assert by_windows == []


def test_the_backward_pass_keeps_a_fraction(whole: Call) -> None:
    given, mask = tensors(8192), band(8192)

    def kept(function: Call) -> int:
        seen: dict[int, int] = {}

        def note(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        leaves = [tensor.requires_grad_() for tensor in given]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            function(Gemma4TextAttention(), *leaves, mask, scaling=1.0)
        return sum(seen.values())

    plain = kept(whole)
    with enabled():
        assert 3 * kept(lambda *args, **kwargs: windows.attention(whole, *args, **kwargs)) < plain


def test_other_bits_are_left_to_one_call(whole: Call, by_windows: list[Any]) -> None:
    """The math kernel adds the keys of a row in another order."""
    given, mask = tensors(2500), band(2500)
    kernel = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.no_grad(), kernel:
        expected = whole(Gemma4TextAttention(), *given, mask, scaling=1.0)[0]
        for _ in range(2):
            assert torch.equal(windows.attention(whole, Gemma4TextAttention(), *given, mask, scaling=1.0)[0], expected)
        assert list(windows._tests.passed.values()) == [False]
        assert len(by_windows) == 1
        with enabled():
            found = windows.attention(whole, Gemma4TextAttention(), *given, mask, scaling=1.0)[0]
        exact = whole(Gemma4TextAttention(), *(each.double() for each in given), mask, scaling=1.0)[0]
    assert (found - exact).abs().mean() <= 1.01 * (expected - exact).abs().mean()


def _wider(mask: Any, query: int, key: int) -> Any:
    mask[..., query, key] = True
    return mask


@pytest.mark.parametrize(
    "options",
    [
        {"mask": None},
        {"mask": _wider(band(2048), 2047, 0)},
        {"mask": _wider(band(2048), 0, 2047)},
        {"mask": torch.zeros(1, 1, 2048, 2048).masked_fill(~band(2048), torch.finfo(torch.float32).min)},
        {"mask": torch.zeros(1, 1, 2048, 2048).masked_fill(~band(2048), -torch.inf).requires_grad_()},
        {"length": 1500},
        {"dropout": 0.1},
        {"window": None},
    ],
    ids=[
        "no mask",
        "an early key",
        "a late key",
        "a mask of numbers",
        "a mask that is trained",
        "short",
        "dropout",
        "full",
    ],
)
def test_what_is_left_to_one_call(by_windows: list[Any], options: dict[str, Any]) -> None:
    length = options.pop("length", 2048)
    given, mask = tensors(length), options.pop("mask", band(length))
    layer = Gemma4TextAttention()
    layer.sliding_window = options.pop("window", WINDOW)
    calls: list[Any] = []

    def whole(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return args[1], None

    with enabled():
        windows.attention(whole, layer, *given, mask, scaling=1.0, **options)
    assert by_windows == []
    assert len(calls) == 1
    assert calls[0][4] is mask


def test_a_mask_that_is_written_to_is_looked_at_again(whole: Call, by_windows: list[Any]) -> None:
    given, mask = tensors(2048), band(2048)
    with torch.no_grad(), enabled():
        windows.attention(whole, Gemma4TextAttention(), *given, mask, scaling=1.0)
        _wider(mask, 2047, 0)
        found = windows.attention(whole, Gemma4TextAttention(), *given, mask, scaling=1.0)[0]
        assert torch.equal(found, whole(Gemma4TextAttention(), *given, mask, scaling=1.0)[0])
    assert len(by_windows) == 1


def test_layers_share_the_look_at_a_mask(whole: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    kept = windows._sees_outside
    monkeypatch.setattr(windows, "_sees_outside", lambda *args: looks.append(args) or kept(*args))
    given, mask = tensors(2048), band(2048)
    with torch.no_grad(), enabled():
        for _ in range(3):
            windows.attention(whole, Gemma4TextAttention(), *given, mask, scaling=1.0)
    assert len(looks) == 1


def test_inference_mode(whole: Call, by_windows: list[Any]) -> None:
    """Its tensors do not count what is written to them."""
    with torch.inference_mode(), enabled():
        given, mask = tensors(2048), band(2048)
        expected = whole(Gemma4TextAttention(), *given, mask, scaling=1.0)[0]
        assert torch.equal(windows.attention(whole, Gemma4TextAttention(), *given, mask, scaling=1.0)[0], expected)
        _wider(mask, 2047, 0)
        windows.attention(whole, Gemma4TextAttention(), *given, mask, scaling=1.0)
    assert len(by_windows) == 1


def test_the_generator_of_the_user_is_left_alone(whole: Call) -> None:
    given, mask = tensors(2048), band(2048)
    torch.manual_seed(5)
    with torch.no_grad():
        windows.attention(whole, Gemma4TextAttention(), *given, mask, scaling=1.0)
    found = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(found, torch.rand(1))


@pytest.mark.parametrize("before", [0, 1, 511, 512, 513, 1023, 1024, 3000])
@pytest.mark.parametrize("window", [512, 1024])
def test_layouts(window: int, before: int) -> None:
    """Every query is in one block, with all keys of its window, and blocks are cut where the tiles of kernels are."""
    checked = 0
    for queries in range(4 * window, 12 * window, 297):
        for after in (0, 512):
            layout = windows.Layout.of(window, window, queries, queries + before, after)
            if layout is None:
                continue
            parts = list(layout)
            assert [at for query, _ in parts for at in range(queries)[query]] == list(range(queries))
            for query, key in parts:
                if query.stop > query.start:
                    assert key.start == 0 or key.start <= query.start + before - window + 1
                    assert 0 <= key.start < key.stop <= queries + before
                    assert key.stop >= min(queries + before, query.stop + before + after)
                    assert key.start % windows.UNIT == 0
                    assert query.start % windows.UNIT == 0
                    assert query.stop - query.start >= window
            checked += 1
    assert checked > 10


def test_a_prompt_that_is_read_while_another_one_is() -> None:
    """A hook may call another model; the rest of the first prompt is read as it began."""
    outer, inner = contextlib.nullcontext(), contextlib.nullcontext()
    with windows.each_inside(outer):
        with windows.each_inside(inner):
            assert windows._inside.manager is inner
        assert windows._inside.manager is outer
    assert not vars(windows._inside)
