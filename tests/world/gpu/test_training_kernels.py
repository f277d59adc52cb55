"""Kernels of training on a GPU: the loss is PyTorch's up to a last bit, and attention is no farther from float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemma4_compat._kernels.match import custom, shares
from gemma4_compat._training import chunks
from tests.world.gpu.test_chunked_mlp import DEVICE

WORDS = 1 << 18
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_losses_and_gradients_are_pytorchs(dtype: Any, soft_cap: float | None) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    both = [torch.randn((40, WORDS), generator=generator, device=DEVICE).mul_(9).to(dtype)]
    both.append(both[0].clone())
    targets = torch.randint(WORDS, (40,), generator=generator, device=DEVICE)
    assert chunks._is_fused(both[0], soft_cap)
    found, right = (how(one, targets, soft_cap, True) for how, one in zip((chunks._by_kernel, chunks._block), both))
    apart = found.view(torch.int32) - right.view(torch.int32)
    assert apart.abs().max() <= 1
    assert float((both[0] != both[1]).float().mean()) < 1e-4  # 2e-5 with a cap in bfloat16, none without, on an H200


@DTYPES
@pytest.mark.parametrize("keys", [640, 4096])
def test_shares_are_as_near_to_float64(dtype: Any, keys: int, record: Any) -> None:
    custom.operators()
    device = torch.device(DEVICE, torch.cuda.current_device())
    assert shares.compute(device, dtype)
    scores = torch.randn((8, 256, keys), generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE) * 3
    found, sums = torch.empty_like(scores, dtype=dtype), torch.empty((8, 256, 2), device=DEVICE)
    shown = torch.ones(keys, dtype=torch.bool, device=DEVICE)
    torch.ops.gemma4_compat.shares(scores, shown, (8, 1, 1, 256), False, 0, 1.0, found, sums)
    exact = scores.double().softmax(-1)
    off, theirs = (float((one.double() - exact).norm()) for one in (found, scores.softmax(-1).to(dtype)))
    record(f"{dtype}, {keys} keys: distance from float64 of PyTorch's shares, of the kernel's", [theirs, off])
    assert off <= 1.001 * theirs
