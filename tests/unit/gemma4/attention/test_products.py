"""Attention of wide heads by products: its error, queries that see no key, and what is left to one call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gemma4_compat._gemma4.attention import packing, products, windows
from tests.helpers import pairwise
from tests.unit.gemma4.attention.test_windows import enabled, whole

__all__ = ["whole"]
WIDTH, QUERIES, BEFORE = 512, 300, 40
#: Their distance from float64, of that of one call on a CPU.
TIMES = 1.4


class Gemma4TextAttention:
    """What the functions read of a full layer."""

    num_key_value_groups, sliding_window, is_causal, training = 2, None, True, True


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MULTIPLYING", ("cpu",))
    monkeypatch.setattr(products, "_MOST", 64)  # several blocks


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many scores are computed at once by products, by head."""
    seen, kept = [], products._Block.shares

    def spied(block: Any) -> Any:
        rows, heads, *_ = block._query.shape
        seen.append(math.prod(block.shape) // (rows * heads))
        return kept(block)

    monkeypatch.setattr(products._Block, "shares", spied)
    return seen


def tensors(before: int = 0, dtype: Any = torch.bfloat16) -> list[Any]:
    """Two rows of queries, keys and values with the strides that a layer gives them, and a gradient of the outputs."""
    torch.manual_seed(before)
    shapes = ((QUERIES, 4), (QUERIES + before, 2), (QUERIES + before, 2))
    found = [torch.randn(2, length, heads, WIDTH).to(dtype).transpose(1, 2) for length, heads in shapes]
    return [found[0] * 0.2, *found[1:], torch.randn(2, QUERIES, 4, WIDTH).to(dtype)]


def causal(before: int = 0) -> Any:
    """(1, 1, queries, keys)"""
    return torch.ones(QUERIES, QUERIES + before, dtype=torch.bool).tril(before)[None, None]


def padded() -> Any:
    """One row on the left, the other on the right."""
    seen = torch.ones(2, 1, 1, QUERIES, dtype=torch.bool)
    seen[0, ..., :100], seen[1, ..., -100:] = False, False
    return causal() & seen


def packed() -> Any:
    text = torch.arange(QUERIES) // 64
    return causal() & (text[:, None] == text)


def with_image() -> Any:
    mask = causal().clone()
    mask[..., 30:90, 30:90] = True
    return mask


MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "padded": padded,
    "packed": packed,
    "image": with_image,
    "cached": lambda: causal(BEFORE),
}


def step(attention: Any, given: list[Any], mask: Any, dtype: Any, scaling: float = 1.0) -> list[Any]:
    """Outputs, and the gradients of queries, keys and values, in float64."""
    *states, incoming = [one.to(dtype) for one in given]
    states = [one.detach().requires_grad_() for one in states]
    found = attention(Gemma4TextAttention(), *states, mask, scaling=scaling, dropout=0.0)[0]
    found.backward(incoming)
    return [found.detach().double(), *(one.grad.double() for one in states)]


def error(found: Any, right: Any) -> float:
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_that_of_one_call(whole: Any, multiplied: list[int], kind: str, dtype: Any) -> None:
    is_exact(whole, kind, dtype, "cpu")
    assert multiplied


def is_exact(whole: Any, kind: str, dtype: Any, device: str) -> None:
    mask, scaling = MASKS[kind](), 0.7 if kind == "image" else 1.0
    mask = None if mask is None else mask.to(device)
    given = [one.to(device) for one in tensors(BEFORE if kind == "cached" else 0, dtype)]
    right = step(whole, given, mask, torch.float64, scaling)
    plain = step(whole, given, mask, dtype, scaling)
    with enabled():
        found = step(lambda *args, **kwargs: windows.attention(whole, *args, **kwargs), given, mask, dtype, scaling)
    for one, other, exact in zip(found, plain, right, strict=True):
        assert error(one, exact) <= TIMES * error(other, exact)
    if mask is not None:
        unseen = ~mask.any(dim=-1)[:, 0]  # (rows, queries)
        assert not found[0][unseen.expand(2, -1)].any()
        assert not found[1].transpose(1, 2)[unseen.expand(2, -1)].any()


def numbered() -> Any:
    """What stands for the mask of :func:`packed`, of both rows."""
    return packing.by_text((torch.arange(QUERIES) // 64).expand(2, -1), None)


def test_numbers_of_texts(whole: Any, multiplied: list[int]) -> None:
    """The bits of their mask; and as exact with the keys of earlier texts, which a graph cannot leave out."""
    given = tensors()
    with enabled():
        by_mask, found = (
            step(lambda *args, **kwargs: windows.attention(whole, *args, **kwargs), given, mask, torch.bfloat16)
            for mask in (packed(), numbered())
        )
    assert multiplied
    assert all(map(torch.equal, by_mask, found))

    def with_every_key(_module: Any, *states: Any, **kwargs: Any) -> Any:
        return (products.attention(*states, kwargs["scaling"], every=True),)

    multiplied.clear()
    found = step(with_every_key, given, numbered(), torch.bfloat16)
    assert sum(multiplied) > QUERIES * QUERIES
    right, plain = (step(whole, given, packed(), dtype) for dtype in (torch.float64, torch.bfloat16))
    for one, other, exact in zip(found, plain, right, strict=True):
        assert error(one, exact) <= TIMES * error(other, exact)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


WINDOW = 100


class Sliding(Gemma4TextAttention):
    """What the functions read of a sliding layer."""

    sliding_window = WINDOW


Sliding.__name__ = Gemma4TextAttention.__name__


def in_window(mask: Any) -> Any:
    queries, keys = mask.shape[-2:]
    return mask & torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1 - WINDOW)


def by_head() -> Any:
    """Each head has its own mask, which shows less than the window."""
    return causal() & (torch.rand(2, 4, QUERIES, QUERIES, generator=torch.Generator().manual_seed(0)) < 0.5)


def narrowed(before: int, groups: int) -> list[Any]:
    """:func:`tensors` of narrow heads, so many of which share one of the keys."""
    query, key, value, incoming = (one[..., :256] for one in tensors(before))
    return [query, *(one[:, : 4 // groups] for one in (key, value)), incoming]


KINDS = [*(kind for kind in MASKS if kind != "none"), "by head", "numbers"]


@pytest.mark.parametrize(
    "kind, groups, block, scores",
    [*pairwise(KINDS, [2, 4], [16, 32, 100], [1, 2**17, 2**26]), ("numbers", 4, QUERIES, 2**26)],
)
def test_narrow_heads(
    whole: Any,
    multiplied: list[int],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    groups: int,
    block: int,
    scores: int,
) -> None:
    """As exact as one call, with the same bits each time, and many windows at once, as far as memory allows."""
    for name, value in (("_WINDOW", block), ("UNIT", block), ("_SCORES", scores)):
        monkeypatch.setattr(products, name, value)
    windows_are_exact(whole, kind, groups, "cpu")
    if block < QUERIES:
        window = block * (block + math.ceil((WINDOW - 1) / block) * block)  # scores of one, without an image
        assert max(multiplied) <= max(scores / 8, window * (1 + (kind == "image")))
        assert len(multiplied) <= 2 * 2 * 2 or scores < 2**26  # runs, passes, windows and a rest


def windows_are_exact(whole: Any, kind: str, groups: int, device: str) -> None:
    mask = in_window({**MASKS, "by head": by_head}.get(kind, packed)()).to(device)
    given = [one.to(device) for one in narrowed(BEFORE if kind == "cached" else 0, groups)]

    def shared(_module: Any, *states: Any, **kwargs: Any) -> Any:
        module = Sliding()
        module.num_key_value_groups = groups
        return whole(module, *states, **kwargs)

    def multiply(_module: Any, *states: Any, **kwargs: Any) -> Any:
        return windows.attention(shared, Sliding(), *states, **kwargs)

    right, plain = (step(shared, given, mask, dtype) for dtype in (torch.float64, torch.bfloat16))
    shown = numbered().to(device) if kind == "numbers" else mask
    with enabled():
        found, again = (step(multiply, given, shown, torch.bfloat16) for _ in range(2))
    assert all(map(torch.equal, found, again))
    for one, other, exact in zip(found, plain, right, strict=True):
        assert error(one, exact) <= TIMES * error(other, exact)
    unseen = ~mask.any(dim=-1).expand(2, 4, -1).transpose(1, 2)  # (rows, queries, heads)
    assert not found[0][unseen].any()
    assert not found[1].transpose(1, 2)[unseen].any()


def test_images_at_other_places_have_the_same_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one graph serves them."""
    monkeypatch.setattr(products, "UNIT", 64)
    masks = [in_window(causal()) for _ in range(3)]
    for mask, first in zip(masks, (None, 30, 100), strict=True):
        if first is not None:
            mask[..., first : first + 60, first : first + 60] = True
    plain, image, another = (products._layout(mask, WINDOW, 16) for mask in masks)
    assert image == another
    assert [one.width for one in (plain, image) if one is not None] == [16 + 128, 16 + 128 + 64]


def test_masks_that_show_more_than_windows(whole: Any, multiplied: list[int]) -> None:
    """Are computed a block at a time, with the keys that it sees."""
    given = narrowed(0, 2)
    with enabled():
        found = step(
            lambda _, *args, **kwargs: windows.attention(whole, Sliding(), *args, **kwargs),
            given,
            causal(),
            torch.bfloat16,
        )
    right, plain = (step(whole, given, causal(), dtype) for dtype in (torch.float64, torch.bfloat16))
    assert len(multiplied) == 2 * math.ceil(QUERIES / 64)
    for one, other, exact in zip(found, plain, right, strict=True):
        assert error(one, exact) <= TIMES * error(other, exact)


def test_keys_that_no_query_of_a_block_sees_are_left_out(whole: Any, multiplied: list[int]) -> None:
    given = tensors()
    with enabled():
        for mask, part in ((None, 0.65), (packed(), 0.25)):
            multiplied.clear()
            step(lambda *args, **kwargs: windows.attention(whole, *args, **kwargs), given, mask, torch.bfloat16)
            assert sum(multiplied) <= 2 * part * QUERIES * QUERIES  # once more in the backward pass


def test_a_mask_is_looked_at_again_when_it_is_written_to(whole: Any, multiplied: list[int]) -> None:
    given, mask = tensors(), packed()
    with enabled():
        step(lambda *args, **kwargs: windows.attention(whole, *args, **kwargs), given, mask, torch.bfloat16)
        mask[..., -1, 0] = True
        right = step(whole, given, mask, torch.float64)
        found = step(lambda *args, **kwargs: windows.attention(whole, *args, **kwargs), given, mask, torch.bfloat16)
    assert error(found[0], right[0]) < 0.01


@pytest.mark.parametrize("reason", ["no switch", "eval", "float32", "a float mask", "dropout", "torch.func"])
def test_what_is_left_to_one_call(
    whole: Any, multiplied: list[int], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    given, mask = tensors(dtype=torch.float32 if reason == "float32" else torch.bfloat16), None
    if reason == "a float mask":
        mask = torch.zeros(1, 1, QUERIES, QUERIES).masked_fill(~causal(), float("-inf")).to(given[0].dtype)
    module = Gemma4TextAttention()
    module.training = reason != "eval"
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", "" if reason == "no switch" else windows.ID)

    def attention(query: Any) -> Any:
        options = {"scaling": 1.0, "dropout": 0.5 if reason == "dropout" else 0.0}
        return windows.attention(whole, module, query, *given[1:3], mask, **options)[0]

    found = torch.func.vmap(attention)(given[0][None]) if reason == "torch.func" else attention(given[0])
    assert found.isfinite().all()
    assert not multiplied


@pytest.mark.parametrize("error", [TypeError("unexpected keyword"), RuntimeError("out_dtype\nneeds CUDA"), None])
def test_a_device_without_such_products(
    whole: Any,
    multiplied: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
) -> None:
    """As ROCm's and torch's before 2.8. It is asked once, and its layers are left to one call."""
    asked: list[bool] = []

    def multiply(_left: Any, _right: Any, found: Any, *, add: bool = False) -> Any:
        asked.append(add)
        if error is not None:
            raise error
        return found

    monkeypatch.setattr(products, "work", functools.cache(products.work.__wrapped__))
    monkeypatch.setattr(products, "_multiply", multiply)
    given = tensors()
    plain = step(whole, given, None, torch.bfloat16)
    with enabled():
        for _ in range(2):
            found = step(
                lambda *args, **kwargs: windows.attention(whole, *args, **kwargs), given, None, torch.bfloat16
            )
            assert all(map(torch.equal, found, plain))
    assert asked == ([False, True] if error is None else [False])
    assert not multiplied
    (said,) = [record.getMessage() for record in caplog.records]
    reason = "they are wrong" if error is None else " ".join(str(error).split())
    assert said == f"no products of torch.bfloat16 in float32 on cpu, so sdpa computes full layers: {reason}"


def test_a_second_derivative_is_an_error(whole: Any) -> None:
    query, key, value, _ = tensors()
    query.requires_grad_()
    with enabled():
        found = windows.attention(whole, Gemma4TextAttention(), query, key, value, None, scaling=1.0)[0]
    (gradient,) = torch.autograd.grad(found.float().square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
