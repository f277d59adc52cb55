"""The attention of a prompt, by custom kernels: :mod:`flash` where its kernels run on this GPU and pass a trial.

:class:`Reading` sees the functions of ``torch`` that the forward of a prompt calls. Everything but attention stays
PyTorch's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import Any

import torch

from gemma4_compat._engine import dormant
from gemma4_compat._engine.runtime.selftest import SelfTests
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._gemma4.state import contents
from gemma4_compat._kernels.match import custom
from gemma4_compat._kernels.specs import attention, flash

#: Whether kernels of this package may compute attention with a mask, by the width of a head, and that of prompts which
#: are read at once, where no mask is needed. On an H100 a call with a mask took 0.23 to 0.41 of the time of PyTorch's
#: from 8,192 keys on (width 512), and in sliding windows (256) 0.42 to 1.02 of it. Without a mask 0.4 to 0.45 of it
#: (512), but 2.3 times as long for 256.
WITH_MASK = {256: True, 512: True}
CAUSAL = {256: False, 512: True}
POSITIONS = flash.POSITIONS
#: Keys before those of a trial's tokens.
_BEFORE = 70
_TOKENS_OF_A_TRIAL = 20
_log = logging.getLogger("gemma4_compat")
_tests = SelfTests()  # by device and layout


def read(device: Any) -> contextlib.AbstractContextManager[Any]:
    """To be entered around the forward of a prompt: attention may be computed by these kernels.

    Only attention is looked at: a mode sees each look at a shape as well, and takes a microsecond for it, 70 ms for a
    prompt of an E2B. So it needs the patch whose function stands before that of attention.
    """
    if not dormant.is_installed(windows.ID):
        return contextlib.nullcontext()
    dormant.activate(windows.ID)
    return windows.each_inside(Reading(device))


class Reading(custom.CustomKernels):
    """Inside, these kernels compute calls of attention of a prompt.

    Args:
        device: whose tensors they may read.
    """

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._bounds: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # by mask: it, and its valid keys

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            found = self._attention(*args, **kwargs)
            if found is None:
                found = self.called(func, args, kwargs)
            self.forget()  # only this call reads them
            return found
        found = self.repeated(func, args, kwargs)
        return self.called(func, args, kwargs) if found is None else found

    def _attention(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if query.device != self._device or torch.is_grad_enabled():
            return None
        key, value, kwargs = self.shared(key, value, kwargs)
        if query.shape[2] <= attention.MAX_HEADS:  # a token or a few: layers that compute only the last one
            found = super()._attention(query, key, value, *args, **kwargs)
            if found is not None:
                return found
        call = flash.match(query, key, value, *args, **kwargs)
        if call is None or not (CAUSAL if call.mask is None else WITH_MASK).get(query.shape[3], False):
            return None
        if not _passes(call):
            return None
        found = None if call.mask is None else self._bounds_of(call.mask)
        return torch.ops.gemma4_compat.flash(query, key, value, call.mask, found, call.scale)

    def _bounds_of(self, mask: Any) -> Any:
        """The valid keys of each token: found once for all layers with this mask."""
        what = contents.stamp(mask), mask.shape, mask.stride()
        if what not in self._bounds:
            self._bounds[what] = mask, torch.ops.gemma4_compat.flash_bounds(mask)
        return self._bounds[what][1]


def is_used(device: Any) -> bool:
    """Whether these kernels compute the attention of prompts that has a mask, as far as it was tried."""
    found = [passed for (where, layout), passed in _tests.passed.copy().items() if where == device and layout.masked]
    return bool(found) and all(found) and dormant.is_installed(windows.ID)


def computes(device: Any, dtype: Any, heads: Iterable[tuple[int, int, int]]) -> bool:
    """Whether these kernels compute the attention of prompts that has a mask. They are tried if they have not been.

    Args:
        device: of the model.
        dtype: of its keys.
        heads: query heads, key-value heads and their width.
    """

    def drawn(count: int, rows: int, width: int) -> Any:
        return torch.empty((1, count, rows, width), dtype=dtype, device=device)

    mask = torch.ones((1, 1, _TOKENS_OF_A_TRIAL, _TOKENS_OF_A_TRIAL), dtype=torch.bool, device=device)
    for count, kv_heads, width in heads:
        key = drawn(kv_heads, _TOKENS_OF_A_TRIAL, width)
        query = drawn(count, _TOKENS_OF_A_TRIAL, width)
        with torch.no_grad():
            call = flash.match(query, key, key, mask, enable_gqa=True)
        if call is None or not WITH_MASK.get(width, False) or not _passes(call):
            return False
    return dormant.is_installed(windows.ID)


def _passes(call: flash.Call) -> bool:
    """Whether kernels of this layout err no more than PyTorch's on this device. Tried once, not inside a capture."""
    device = call.query.device
    if (
        flash.tiling(call.query.shape[3], flash.shared_memory(device)) is None
        or custom.unsupported_reason(device) is not None
    ):
        return False

    def trial() -> bool:
        why = _trial(call)
        if why is not None:
            _log.warning("gemma4_compat: PyTorch computes attention of prompts: %s", why)
        return why is None

    return _tests.passes((device, flash.layout_of(call)), device, trial)


def _trial(call: flash.Call) -> str | None:
    """Compute attention with the heads of a call. Returns why the kernels are not used; None if they are."""
    device, width = call.query.device, call.query.shape[3]
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    generator = torch.Generator(device).manual_seed(0)
    before = _BEFORE if call.mask is not None else 0
    length = before + _TOKENS_OF_A_TRIAL

    def drawn(count: int, rows: int) -> Any:
        return torch.randn((1, count, rows, width), generator=generator, device=device).to(call.query.dtype)

    query, key, value = drawn(heads, _TOKENS_OF_A_TRIAL), drawn(kv_heads, length), drawn(kv_heads, length)
    at = torch.arange(length, device=device)
    mask = (at <= at[before:, None])[None, None]
    options: dict[str, Any] = {"attn_mask": mask} if before else {"is_causal": True}
    tried = flash.match(query, key, value, **options, enable_gqa=True)
    assert tried is not None  # as the call
    try:
        launched, found = flash.kernels(tried, layout=flash.layout_of(call))
        custom.launch(device, *launched)
        wide = [tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (query, key, value)]
        scores = (wide[0].double() @ wide[1].double().mT * tried.scale).masked_fill(~mask, float("-inf"))
        expected = scores.softmax(-1) @ wide[2].double()
        ours = (found - expected).abs()
        theirs = (torch.nn.functional.scaled_dot_product_attention(*wide, **options) - expected).abs()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return f"this package's kernels failed: {' '.join(str(error).split()):.200}"
    # Both round to 16 bits at the end: the largest error of few numbers may be either's.
    if not (ours.mean() <= 1.05 * theirs.mean() and ours.max() <= 1.5 * theirs.max()):
        return f"this package's kernels err by {ours.mean():.2g} on average and PyTorch's by {theirs.mean():.2g}"
    return None
