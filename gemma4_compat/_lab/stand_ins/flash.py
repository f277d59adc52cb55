"""A stand-in for a flash kernel: its functions in plain arithmetic, with the same refusals.

If no flash kernel runs, transformers gets these functions instead of those of the package ``flash_attn``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

#: The widths of heads in the calls so far.
called: list[int] = []


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Any:
    """Attention of ``q`` (batch, queries, heads, width) to ``k`` and ``v`` (batch, keys, fewer heads, width).

    The last query is aligned with the last key.

    Raises:
        RuntimeError: heads are wider than 256; the kernel raises the same.
    """
    import torch

    if q.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    called.append(q.shape[-1])
    query = q.transpose(1, 2).float()
    key, value = (each.transpose(1, 2).float().repeat_interleave(q.shape[2] // k.shape[2], 1) for each in (k, v))
    scores = query @ key.transpose(-1, -2) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    late = k.shape[1] - q.shape[1]
    ahead = torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[1], device=q.device)[:, None] - late
    left, right = window_size
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if causal or right >= 0:
        seen &= ahead <= (0 if causal else right)
    if left >= 0:
        seen &= ahead >= -left
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (shares @ value).transpose(1, 2).to(q.dtype)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Any:
    """:func:`flash_attn_func` of sequences one behind the other: ``q`` (tokens, heads, width)."""
    import torch

    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    found = [
        flash_attn_func(
            q[queries[i] : queries[i + 1]][None],
            k[keys[i] : keys[i + 1]][None],
            v[keys[i] : keys[i + 1]][None],
            dropout_p,
            softmax_scale,
            causal,
            window_size,
        )[0]
        for i in range(len(queries) - 1)
    ]
    return torch.cat(found)


@contextlib.contextmanager
def kernel() -> Iterator[tuple[str, Any]]:
    """The name of a flash attention that runs here, and its dtype: the package's on a GPU that has it, else the
    stand-in's.

    transformers has no name for a stand-in, so its look-up of a kernel is replaced meanwhile.
    """
    import torch
    from transformers import modeling_flash_attention_utils as upstream
    from transformers import modeling_utils, utils

    name = "flash_attention_2"
    if torch.cuda.is_available() and utils.is_flash_attn_2_available():
        yield name, torch.bfloat16
        return
    held = {each: getattr(upstream, each) for each in vars(upstream) if each.endswith("_fn") or each.startswith("_lo")}
    functions = [flash_attn_func, flash_attn_varlen_func, None, upstream._pad_input, upstream._unpad_input]
    if "_flash_with_kvcache_fn" not in held:
        del functions[2]
    before = [
        (upstream, "_lazy_imports", lambda *args, **kwargs: tuple(functions)),
        (modeling_utils.PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True),
        (modeling_utils, "is_kernels_available", lambda *args, **kwargs: False),  # no download
    ]
    before, changed = [(owner, each, getattr(owner, each)) for owner, each, _ in before], before
    upstream._loaded_implementation = None
    called.clear()
    try:
        for owner, each, value in changed:
            setattr(owner, each, value)
        yield name, torch.float32
    finally:
        for owner, each, value in before:
            setattr(owner, each, value)
        vars(upstream).update(held)
