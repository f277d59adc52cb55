"""F104 on a GPU: what is computed by windows without the opt-in has the bits of one call, and training is as exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemma4_compat._gemma4.attention import products, windows
from tests.unit.gemma4.attention import test_products as products_test
from tests.unit.gemma4.attention.test_products import deterministic
from tests.unit.gemma4.attention.test_windows import Gemma4TextAttention, band, enabled, images, padded

__all__ = ["deterministic"]
LENGTHS = (16_384, 16_500, 20_001)


def layer() -> Gemma4TextAttention:
    """Of an E2B: eight heads share their keys."""
    found = Gemma4TextAttention()
    found.num_key_value_groups = 8
    return found


def given(length: int, dtype: Any, rows: int = 1) -> list[Any]:
    """Queries, keys and values of a sliding layer of an E2B."""
    generator = torch.Generator("cuda").manual_seed(length)
    options = {"device": "cuda", "generator": generator}
    found = [torch.randn(rows, length, heads, 256, **options).to(dtype).transpose(1, 2) for heads in (8, 1, 1)]
    return [found[0] / 16, *found[1:]]


@pytest.fixture(autouse=True)
def _nothing_tried() -> None:
    windows._tests.passed.clear()


def _sdpa() -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bits(length: int, dtype: Any) -> None:
    """Whatever the trial says; what it said is printed, with ``-s``."""
    whole, mask = _sdpa(), band(length).cuda()
    for number in range(3):
        tensors = [tensor[:, :, number : length + number] for tensor in given(length + 2, dtype)]
        with torch.no_grad():
            expected = whole(layer(), *tensors, mask, scaling=1.0)[0]
            found = windows.attention(whole, layer(), *tensors, mask, scaling=1.0)[0]
        assert torch.equal(found, expected)
    print(length, dtype, windows._tests.passed.values())
    assert len(windows._tests.passed) == 1


@pytest.mark.parametrize("mask", [band, padded, images])
def test_gradients(mask: Any) -> None:
    """The norm of the error, from float32's math kernel, is that of one call up to a tenth.

    Queries that see nothing are left out: each kernel gives them something else.
    """
    whole, seen = _sdpa(), mask(16_384).cuda()
    counts = seen.any(-1)[:, 0, :, None, None]
    tensors = given(16_384, torch.bfloat16, rows=len(seen))

    def gradients(function: Any, dtype: Any) -> list[Any]:
        leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in tensors]
        found = function(layer(), *leaves, seen, scaling=1.0)[0] * counts
        found.backward(torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to("cuda", dtype))
        return [found.detach().float(), *(leaf.grad.float() for leaf in leaves)]

    exact = gradients(whole, torch.float32)
    usual = gradients(whole, torch.bfloat16)
    torch.cuda.synchronize()
    with enabled():
        found = gradients(lambda *args, **kwargs: windows.attention(whole, *args, **kwargs), torch.bfloat16)
    for right, plain, ours in zip(exact, usual, found):
        assert (ours - right).norm() <= 1.1 * (plain - right).norm()


def test_memory() -> None:
    whole, mask = _sdpa(), band(16_384).cuda()
    tensors = given(16_384, torch.bfloat16)

    def peak(function: Any) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            function(layer(), *tensors, mask, scaling=1.0)
        return int(torch.cuda.max_memory_allocated() - before)

    with enabled():
        ours = peak(lambda *args, **kwargs: windows.attention(whole, *args, **kwargs))
    assert ours < 0.8 * peak(whole)  # on an H100 0.69 of it


@pytest.mark.parametrize("kind", products_test.MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wide_heads(kind: str, dtype: Any) -> None:
    products_test.is_exact(_sdpa(), kind, dtype, "cuda")


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("kind", products_test.KINDS)
def test_narrow_heads(kind: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name in ("_WINDOW", "UNIT"):
        monkeypatch.setattr(products, name, 32)
    products_test.windows_are_exact(_sdpa(), kind, groups, "cuda")
