"""Attention of many queries: errors no larger than PyTorch's, and bits that only the valid keys decide."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.specs import flash
from tests.unit.kernels.host_kernels import HostCompiler

CPU = torch.device("cpu")
sdpa = torch.nn.functional.scaled_dot_product_attention
pytestmark = pytest.mark.skipif(
    HostCompiler.unsupported_reason() is not None, reason=str(HostCompiler.unsupported_reason())
)
#: Each tiling, by the width of a head.
TILINGS = [(width, number) for width, several in flash._TILINGS.items() for number in range(len(several))]
#: Narrow heads are emulated sooner.
NARROW = flash.Tiling(128, 32, 4, 2, 1)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    monkeypatch.setitem(flash._TILINGS, 64, (NARROW,))


def drawn(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def attend(query: Any, key: Any, value: Any, mask: Any = None, how: Any = None, **options: Any) -> Any:
    call = flash.match(query, key, value, mask, enable_gqa=True, **options)
    assert call is not None
    found, result = flash.kernels(call, layout=flash.layout_of(call, how))
    known = kernels.of(CPU)
    known.prepare([kernel.text for kernel in found], [])
    for kernel in found:
        known.launch(kernel)
    return result


def causal(tokens: int, length: int, held: int, *, window: int = 1 << 30) -> Any:
    """(1, 1, tokens, length): what tokens attend to after so many that are held."""
    query, key = torch.arange(held, held + tokens)[:, None], torch.arange(length)
    return ((key <= query) & (query - key < window))[None, None]


def expected(query: Any, key: Any, value: Any, mask: Any) -> Any:
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1).double() for tensor in (key, value))
    scores = (query.double() @ key.mT * query.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


def errors(found: Any, right: Any) -> tuple[float, float]:
    difference = (found - right).abs()
    return float(difference.mean()), float(difference.max())


@pytest.mark.parametrize(("width", "number"), TILINGS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "held", "dtype"),
    [(8, 1, 12, 90, torch.bfloat16), pytest.param(32, 2, 20, 0, torch.float16, marks=pytest.mark.full)],
)
def test_errors(width: int, number: int, heads: int, kv_heads: int, tokens: int, held: int, dtype: Any) -> None:
    """With one block for a row and two, and room in the cache behind the last key."""
    how, length = flash._TILINGS[width][number], held + tokens + 9
    query = 3 * drawn(1, tokens, heads, width, dtype=dtype).transpose(1, 2)  # as a model has it
    key = drawn(1, kv_heads, length, width, dtype=dtype)
    value = drawn(1, kv_heads, length, width, dtype=dtype) - 1
    mask = causal(tokens, length, held)
    right = expected(query, key, value, mask)
    found = attend(query, key, value, mask, how)
    assert found.transpose(1, 2).is_contiguous()  # as PyTorch's
    copies = (tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (key, value))
    ours, theirs = errors(found, right), errors(sdpa(query, *copies, attn_mask=mask), right)
    assert ours[0] <= theirs[0]
    assert ours[1] <= theirs[1] * 1.01


@pytest.mark.parametrize("heads", [4, 12])
def test_only_valid_keys_decide_bits(heads: int) -> None:
    """Not the length of the cache, padding, the batch, or how a prompt was cut."""
    tokens, held = 40, 50
    length = tokens + held
    query, (key, value) = drawn(1, heads, tokens, 64), drawn(2, 1, 2, length, 64)
    mask = causal(tokens, length, held)
    whole = attend(query, key, value, mask)
    cut = [
        attend(query[:, :, part], key, value, mask[:, :, part]) for part in (slice(0, 7), slice(7, 33), slice(33, 40))
    ]
    assert torch.equal(torch.cat(cut, 2), whole)
    pad = torch.nn.functional.pad
    for before, after in ((0, 30), (17, 0), (64, 9000)):
        wide = [pad(tensor, (0, 0, before, after), value=torch.nan) for tensor in (key, value)]
        shown = pad(mask, (before, after))
        assert torch.equal(attend(query, *wide, shown), whole), (before, after)
    both = [torch.cat([drawn(*tensor.shape) + 1, tensor]) for tensor in (query, key, value)]
    masks = torch.cat([causal(tokens, length, held - 20), mask])
    assert torch.equal(attend(*both, masks)[1:], whole)


@pytest.mark.parametrize("heads", [4, 12])
def test_sums_of_many_keys_go_to_memory(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    query, (key, value) = 3 * drawn(1, heads, 20, 64), drawn(2, 1, 1, 500, 64)
    mask = causal(20, 500, 470)
    plain = attend(query, key, value, mask)
    monkeypatch.setattr(flash, "_SEGMENT", 64)
    monkeypatch.setattr(flash, "_AT_ONCE", 64)
    monkeypatch.setattr(flash, "_TOKENS", 8)
    found, right = attend(query, key, value, mask), expected(query, key, value, mask)
    assert errors(found, right)[0] < 1.02 * errors(plain, right)[0]
    torch.testing.assert_close(found, plain, rtol=0.01, atol=1e-3)


def test_masks() -> None:
    """Windows, keys that are left out, and a token that attends to nothing."""
    query, (key, value) = drawn(2, 6, 30, 64, dtype=torch.float16), drawn(2, 2, 3, 100, 64, dtype=torch.float16)
    mask = causal(30, 100, 60, window=25).repeat(2, 1, 1, 1)
    mask[1, ..., 40:44] = False
    mask[1, :, :, 93] = True  # later than all tokens
    found = attend(query, key, value, mask)
    torch.testing.assert_close(found, expected(query, key, value, mask).half(), rtol=2e-3, atol=2e-3)
    mask[0, :, 3] = False
    again = attend(query, key, value, mask)
    assert torch.equal(again[1], found[1])
    assert not again[0, :, 3].any()
    again[0, :, 3] = found[0, :, 3]
    assert torch.equal(again, found)


def test_without_a_mask() -> None:
    query, (key, value) = drawn(1, 16, 45, 64), drawn(2, 1, 2, 45, 64)
    found = attend(query, key, value, is_causal=True)
    assert torch.equal(found, attend(query, key, value, causal(45, 45, 0)))


def test_what_is_left_to_pytorch() -> None:
    query, key, mask = drawn(1, 8, 20, 256), drawn(1, 2, 40, 256), causal(20, 40, 20)
    known = {"attn_mask": mask, "enable_gqa": True}
    assert flash.match(query, key, key, **known) is not None
    for given, options in (
        ((query.float(), key.float(), key.float()), {}),
        ((query[..., :128], key[..., :128], key[..., :128]), {}),
        ((query, key, key), {"enable_gqa": False}),
        ((query, key, key), {"dropout_p": 0.1}),
        ((query, key, key), {"scale": -1.0}),
        ((query, key, key), {"is_causal": True}),
        ((query, key, key), {"attn_mask": None}),
        ((query, key, key), {"attn_mask": None, "is_causal": True}),
        ((query, key, key), {"attn_mask": torch.zeros(20, 40).bfloat16()}),
        ((query, key, key), {"attn_mask": mask.expand(1, 8, 20, 40).clone()}),
        ((query, key, key), {"attn_mask": mask.mT.contiguous().mT}),
        ((query, key[..., :256:2], key), {}),
    ):
        assert flash.match(*given, **(known | options)) is None, options


def test_shared_memory() -> None:
    """Of a block on 8.6 and 8.9, 8.0, and 9.0: 99, 163 and 227 KiB."""
    rows = {shared: [flash.tiling(width, shared << 10) for width in (256, 512)] for shared in (64, 99, 163, 227)}
    assert rows[64] == [None, None]
    assert [[how and (how.rows, how.keys) for how in found] for found in rows.values()][1:] == [
        [(64, 32), (32, 32)],
        [(128, 64), (64, 32)],
        [(128, 64), (64, 64)],
    ]
