"""Training's attention between its products (:mod:`specs.shares`): two operators, and whether kernels compute them."""

from __future__ import annotations

from typing import Any

from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.programs import Kernel, kinds
from gemma4_compat._kernels.specs import shares as spec

SCHEMA = "Tensor scores, Tensor? shown, int[] sizes, bool by_query, int start, float scale, "
#: What is tried: heads of the keys, windows, heads that share one, and queries; keys; how far 16 bits may be off.
_TRIED, _KEYS, _NEAR = (2, 2, 2, 24), (70, 1028), {"BFloat16": 2**-7, "Float16": 2**-10}


def shares(scores: Any, shown: Any, sizes: Any, by_query: bool, start: int, scale: float, *more: Any) -> None:
    """Write ``found`` and ``sums``."""
    found, sums = more
    _launch(spec.shares(spec.Scores(scores, shown, tuple(sizes), by_query, start, scale), found, sums))


def share_gradients(scores: Any, shown: Any, sizes: Any, by_query: bool, start: int, scale: float, *more: Any) -> None:
    """Write ``found``, from sums, gradients of shares and totals."""
    _launch(spec.gradients(spec.Scores(scores, shown, tuple(sizes), by_query, start, scale), *more))


def compute(device: Any, dtype: Any) -> bool:
    """Whether the kernels work here, with results in this dtype. Not known inside a capture, unless before it."""
    import torch

    if device.type not in kernels.COMPILERS or kinds()[dtype].name not in _NEAR:
        return False

    def is_near() -> bool:
        generator = torch.Generator(device).manual_seed(0)
        return all(
            _is_near(keys, is_masked, by_query, dtype, generator)
            for keys in _KEYS
            for is_masked in (True, False)
            for by_query in (True, False)
        )

    own, what = kernels.of(device), "softmax of training's attention"
    return own.selftest(("shares", dtype), what, "PyTorch computes the softmax of training's attention", is_near)


def _launch(kernel: Kernel) -> None:
    known = kernels.of(kernel.tensors[0].device)
    known.prepare([kernel.text], [])
    known.launch(kernel)


def _is_near(keys: int, is_masked: bool, by_query: bool, dtype: Any, generator: Any) -> bool:
    """Whether shares and gradients are those of float64, rounded, or next to them."""
    import torch

    heads, windows, group, queries = _TRIED
    rows, device, scale, start = queries * group, generator.device, 0.5, 5
    given = torch.randn((2, heads * windows, rows, keys), generator=generator, device=device) * 4
    shown, order = None, (queries, group) if by_query else (group, queries)
    places = torch.arange(queries, device=device)[:, None]
    seen = torch.arange(keys, device=device) <= start + places
    if is_masked:
        shown = torch.rand((1, heads, windows, 1, queries, keys), generator=generator, device=device) < 0.7
        shown[:, :, :, :, 3] = False
        seen = shown[0].flatten(0, 1)[:, 0]
    hidden = ~seen.expand(heads * windows, queries, keys)
    hidden = hidden[:, :, None] if by_query else hidden[:, None]
    scores, gradients = given.double().unbind()
    scores = scores.unflatten(1, order).mul(scale).masked_fill(hidden, torch.finfo(torch.float32).min)
    expected = scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0).flatten(1, 2)
    totals = (expected * gradients).sum(-1, keepdim=True)
    wanted = (gradients - totals) * expected * scale
    found, sums = torch.empty_like(given[0], dtype=dtype), torch.empty((heads * windows, rows, 2), device=device)
    what = given[0], shown, _TRIED, by_query, start, scale
    shares(*what, found, sums)
    of_scores = torch.empty_like(found)
    share_gradients(*what, sums, given[1], totals.float(), of_scores)
    near = {"rtol": _NEAR[kinds()[dtype].name], "atol": 1e-6}
    pairs = (found, expected), (of_scores, wanted)
    return all(bool(torch.allclose(one.double(), other, **near)) for one, other in pairs)
