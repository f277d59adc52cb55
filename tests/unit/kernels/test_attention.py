"""Attention of one query: errors below PyTorch's, and bits that only the valid keys decide."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._kernels import kernels, programs
from gemma4_compat._kernels.specs import attention
from tests.unit.kernels.host_kernels import HostCompiler

CPU = torch.device("cpu")
sdpa = torch.nn.functional.scaled_dot_product_attention
pytestmark = pytest.mark.skipif(
    HostCompiler.unsupported_reason() is not None, reason=str(HostCompiler.unsupported_reason())
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)


def drawn(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def launched(found: list[Any]) -> None:
    known = kernels.of(CPU)
    known.prepare([kernel.text for kernel in found], [])
    for kernel in found:
        known.launch(kernel)


def attend(query: Any, key: Any, value: Any, mask: Any = None, **settings: Any) -> Any:
    call = attention.match(query, key, value, attn_mask=mask, **settings)
    assert call is not None
    found, result = attention.kernels(call)
    launched(found)
    return result


def valid(length: int, begin: int, end: int, *, batch: int = 1) -> Any:
    mask = torch.zeros(batch, 1, 1, length, dtype=torch.bool)
    mask[..., begin:end] = True
    return mask


@pytest.mark.parametrize(
    ("width", "kv_heads", "heads", "keys", "dtype"),
    [
        (512, 1, 8, 200, torch.bfloat16),
        (256, 2, 4, 130, torch.bfloat16),
        (256, 1, 2, 40, torch.float16),
        (512, 1, 16, 64, torch.float16),
        (32, 2, 1, 300, torch.bfloat16),
        (128, 1, 3, 90, torch.bfloat16),
    ],
)
def test_errors(width: int, kv_heads: int, heads: int, keys: int, dtype: Any) -> None:
    query = 3 * drawn(1, kv_heads, heads, width, dtype=dtype)  # packed, as transformers does
    key, value = drawn(1, kv_heads, keys + 9, width, dtype=dtype), drawn(1, kv_heads, keys + 9, width, dtype=dtype) - 1
    mask, scale = valid(keys + 9, 5, keys + 5), width**-0.5
    scores = (query.double() @ key.double().mT * scale).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1) @ value.double()
    ours = (attend(query, key, value, mask) - expected).abs()
    theirs = (sdpa(query, key, value, attn_mask=mask) - expected).abs()
    assert ours.mean() <= theirs.mean()
    assert ours.max() <= theirs.max()


def test_float32() -> None:
    query, key, value = (drawn(1, 2, rows, 256, dtype=torch.float32) for rows in (4, 77, 77))
    torch.testing.assert_close(attend(query, key, value), sdpa(query, key, value), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [256, 512])
def test_only_valid_keys_decide_bits(width: int) -> None:
    query, key, value = drawn(1, 8, 1, width), drawn(1, 1, 150, width), drawn(1, 1, 150, width)
    expected = attend(query, key, value, valid(150, 0, 150), enable_gqa=True)
    assert torch.equal(attend(query, key, value, enable_gqa=True), expected)  # two kernels
    assert torch.equal(attend(query.view(1, 1, 8, width), key, value).view(query.shape), expected)
    for before, after in ((0, 50), (31, 0), (64, 2000)):
        length = before + 150 + after
        mask = valid(length, before, before + 150)
        wide_key, wide_value = (torch.full((1, 1, length, width), torch.nan).bfloat16() for _ in range(2))
        wide_key[:, :, before : before + 150], wide_value[:, :, before : before + 150] = key, value
        assert torch.equal(attend(query, wide_key, wide_value, mask, enable_gqa=True), expected)
        others = torch.cat([mask, valid(length, 0, 70), mask])
        batch = [torch.cat([one, drawn(*one.shape), one]) for one in (query, wide_key, wide_value)]
        found = attend(batch[0], batch[1], batch[2], others, enable_gqa=True)
        assert torch.equal(found[:1], expected)
        assert torch.equal(found[2:], expected)


def test_queries_are_computed_as_if_alone() -> None:
    query, key, value = drawn(2, 8, 4, 256), drawn(2, 2, 90, 256), drawn(2, 2, 90, 256)
    mask = torch.ones(90, 90, dtype=torch.bool).tril()[None, None, 80:84].repeat(2, 1, 1, 1)
    mask[1, ..., :50] = False
    together = attend(query, key, value, mask, enable_gqa=True)
    assert together.shape == query.shape
    assert together.transpose(1, 2).is_contiguous()  # as PyTorch's
    for row in range(4):
        alone = attend(query[:, :, row : row + 1], key, value, mask[:, :, row : row + 1], enable_gqa=True)
        assert torch.equal(together[:, :, row : row + 1], alone)
    repeated = (tensor.repeat_interleave(4, 1) for tensor in (key, value))
    torch.testing.assert_close(together, sdpa(query, *repeated, attn_mask=mask), rtol=0.02, atol=0.01)


def test_masks_of_each_kind() -> None:
    query, key, value = drawn(2, 2, 4, 256), drawn(2, 2, 70, 256), drawn(2, 2, 70, 256)
    lets = torch.rand(2, 1, 1, 70, generator=torch.Generator().manual_seed(1)) > 0.3
    lets[1, ..., :40] = False
    expected = sdpa(query, key, value, attn_mask=lets)
    found = attend(query, key, value, lets)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)
    for lowest in (-torch.inf, torch.finfo(torch.bfloat16).min):
        adds = torch.zeros(2, 1, 1, 70, dtype=torch.bfloat16).masked_fill(~lets, lowest)
        assert torch.equal(attend(query, key, value, adds), found)
        assert torch.equal(attend(query, key, value, adds.expand(2, 1, 4, 70)), found)
    for strided in (
        lets.repeat(1, 1, 1, 2)[..., :70],
        lets.repeat_interleave(3, 3)[..., ::3],
        lets.mT.contiguous().mT,
    ):
        assert torch.equal(attend(query, key, value, strided), found)
    first = attend(query, key, value, lets[0, 0])  # the same for both sequences
    assert torch.equal(first[0], found[0])
    bias = drawn(1, 1, 1, 70)
    expected = sdpa(query, key, value, attn_mask=bias)
    torch.testing.assert_close(attend(query, key, value, bias), expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_a_valid_key(dtype: Any) -> None:
    query, key, value = (drawn(1, 1, rows, 256, dtype=dtype) for rows in (8, 70, 70))
    for mask in (valid(70, 0, 0), torch.full((1, 1, 1, 70), -torch.inf, dtype=dtype)):
        assert torch.equal(attend(query, key, value, mask), sdpa(query, key, value, attn_mask=mask))
    lowest = torch.full((1, 1, 1, 70), torch.finfo(dtype).min, dtype=dtype)  # as PyTorch: no key is better
    expected = sdpa(query, key, value, attn_mask=lowest)
    torch.testing.assert_close(attend(query, key, value, lowest), expected, rtol=0.02, atol=0.01)


def test_a_split_without_a_valid_key() -> None:
    query, key, value = (drawn(1, 1, rows, 256) for rows in (8, 140, 140))
    mask = valid(140, 0, 10) | valid(140, 120, 140)
    for length in (140, 3000):  # added up by the last block, and by a kernel
        wide = [torch.cat([one, one.new_zeros(1, 1, length - 140, 256)], 2) for one in (key, value)]
        found = attend(query, wide[0], wide[1], torch.nn.functional.pad(mask, (0, length - 140)))
        kept = [torch.cat([one[:, :, :10], one[:, :, 120:]], 2) for one in (key, value)]
        torch.testing.assert_close(found, sdpa(query, *kept), rtol=0.02, atol=0.01)


def test_views() -> None:
    query, key, value = drawn(2, 1, 8, 256), drawn(2, 2, 60, 256), drawn(2, 2, 60, 256)
    expected = attend(query.transpose(1, 2), key, value, enable_gqa=True)
    key, value = (torch.cat([one, one], 3).transpose(1, 2).contiguous() for one in (key, value))
    key, value = key.transpose(1, 2)[..., :256], value.transpose(1, 2)[..., 256:]
    assert not key.is_contiguous()
    assert torch.equal(attend(query.transpose(1, 2), key, value, enable_gqa=True), expected)


def test_bounds_are_found_once() -> None:
    query, key, value, mask = drawn(1, 1, 8, 256), drawn(1, 1, 70, 256), drawn(1, 1, 70, 256), valid(70, 3, 69)
    call = attention.match(query, key, value, attn_mask=mask)
    assert call is not None
    found = attention.bounds(call)
    assert found is not None
    launched([found[0]])
    assert found[1][0, 0, :2].tolist() == [3, 66]
    results = []
    for _ in range(2):
        made, result = attention.kernels(call, found[1])
        assert len(made) == 1
        launched(made)
        results.append(result)
    assert torch.equal(*results)
    assert torch.equal(results[0], attend(query, key, value, mask))


def splits(count: int, kv_heads: int, width: int, by_tensor_cores: bool) -> int:
    """How many there are for so many keys: as ``Splits`` in ``attention.cuh``."""
    if count <= attention._alone(width):
        return 1
    blocks, fewest = attention._BLOCKS, attention._FEWEST
    per = -(-count * kv_heads // (blocks * 4)) * 4
    per = max(per, fewest if count * kv_heads <= blocks // 2 * fewest else attention._FEWER)
    return -(-count // (per if by_tensor_cores else min(per, attention._MOST)))


@pytest.mark.parametrize("by_tensor_cores", [True, False])
def test_there_is_room_for_every_number_of_keys(by_tensor_cores: bool) -> None:
    for length, kv_heads, width in itertools.product((1, 33, 140, 1024, 9000, 70_000), (1, 2, 8, 16), (256, 512)):
        counted = max(splits(count, kv_heads, width, by_tensor_cores) for count in range(length + 1))
        assert counted <= attention._most_splits(length, kv_heads, width, by_tensor_cores) <= counted + 2


def test_numbers_that_the_kernels_know_as_well() -> None:
    text = programs.headers()["attention.cuh"]
    for name in ("RECORD", "FEW", "MANY", "BLOCKS", "FEWEST", "FEWER", "ALONE"):
        (value,) = re.findall(rf"^  {name} = ([^,]+),", text, re.MULTILINE)
        assert eval(value) == getattr(attention, f"_{name}"), name


def test_many_keys_of_one_block(monkeypatch: pytest.MonkeyPatch, change_file: Callable[[str, str, str], None]) -> None:
    monkeypatch.setattr(attention, "_alone", lambda width: 1000)
    monkeypatch.setattr(kernels, "_kernels", {})
    change_file("attention.cuh", "int ONE = AT_MOST > FEWEST ? AT_MOST : FEWEST", "int ONE = 1000")  # in rounds
    query, key, value = 2 * drawn(1, 1, 8, 256), drawn(1, 1, 700, 256), drawn(1, 1, 700, 256)
    lets = torch.arange(700) % 3 > 0
    lets[100:400] = False  # no key in a whole round
    mask = lets[None, None, None]
    made, result = attention.kernels(attention.match(query, key, value, attn_mask=mask))  # type: ignore[arg-type]
    launched(made)
    scores = (query.double() @ key.double().mT / 16).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1) @ value.double()
    theirs = (sdpa(query, key, value, attn_mask=mask) - expected).abs()
    assert len(made) == 2
    assert (result - expected).abs().mean() <= theirs.mean()
    assert (result - expected).abs().max() <= theirs.max()


def test_what_is_left_to_pytorch() -> None:
    query, key, mask = drawn(1, 2, 4, 256), drawn(1, 2, 10, 256), valid(10, 0, 4)
    assert attention.match(query, key, key, attn_mask=mask)
    assert attention.match(query, key, key, dropout_p=0.1) is None
    assert attention.match(query, key, key, is_causal=True) is None
    assert attention.match(query.double(), key.double(), key.double()) is None
    assert attention.match(query[..., :96], key[..., :96], key[..., :96]) is None
    assert attention.match(query, key, drawn(1, 2, 10, 128)) is None
    assert attention.match(query, key.half(), key) is None
    assert attention.match(query, key.mT.contiguous().mT, key) is None
    assert attention.match(query, key, key, attn_mask=mask.float()) is None
    assert attention.match(query, key, key, attn_mask=mask.repeat(1, 2, 1, 1)) is None
    assert attention.match(query, key, key, attn_mask=mask.repeat(2, 1, 1, 1)) is None
    assert attention.match(query, key, key, attn_mask=mask[..., :9]) is None
    assert attention.match(drawn(1, 3, 1, 256), key, key, enable_gqa=True) is None
    assert attention.match(drawn(1, 4, 1, 256), key, key) is None
    assert attention.match(drawn(1, 2, 9, 256), key, key, attn_mask=mask.repeat(1, 1, 9, 1)) is None
    assert attention.match(query.requires_grad_(), key, key) is None
    with torch.no_grad():
        assert attention.match(query, key, key)
