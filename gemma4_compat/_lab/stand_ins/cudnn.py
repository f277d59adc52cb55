"""cuDNN's attention on a Hopper GPU, or a stand-in for it: NaN gradients for queries that see no key.

If the machine's own kernel does not give NaN, ``scaled_dot_product_attention`` gets a backward pass that does, and the
device poses as one on which PyTorch uses cuDNN.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

#: The fix, which is told about the device if it is loaded; a standalone script does not load it.
REPAIR = "gemma4_compat._gemma4.attention.unseen_keys"
#: The widest head that cuDNN's attention supports.
WIDEST = 256
#: Tokens in a row; NaN was seen at this length.
LENGTH = 64
PADDED = 20


def padded(device: Any, side: str = "left") -> dict[str, Any]:
    """Two rows of text with labels, the first of them padded."""
    import torch

    ids = torch.randint(3, 240, (2, LENGTH), generator=torch.Generator().manual_seed(11))
    mask = torch.ones_like(ids)
    mask[0, slice(PADDED) if side == "left" else slice(-PADDED, None)] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def broken(model: Any, batch: dict[str, Any]) -> tuple[int, int]:
    """How many weights get NaN gradients in a training step, and how many get gradients."""
    model(**batch).loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad(set_to_none=True)
    return sum(bool(gradient.isnan().any()) for gradient in gradients), len(gradients)


def gives_nan(device: Any) -> bool:
    """Whether the attention that PyTorch chooses on ``device`` has the defect."""
    import torch

    if not torch.cuda.is_available() or torch.device(device).type != "cuda":
        return False
    with torch.enable_grad():
        values = torch.randn(1, 2, LENGTH, 32, generator=torch.Generator().manual_seed(0))
        states = values.to(device, torch.bfloat16).requires_grad_()
        mask = torch.ones(1, 1, LENGTH, LENGTH, device=device, dtype=torch.bool).tril()
        mask[..., :PADDED] = False
        found = torch.nn.functional.scaled_dot_product_attention(states, states, states, attn_mask=mask)
        (gradient,) = torch.autograd.grad(found[:, :, PADDED:].float().square().sum(), states)
    return bool(gradient.isnan().any())


@contextlib.contextmanager
def kernel(device: Any) -> Iterator[str]:
    """Inside, attention on ``device`` has the defect, its own or the stand-in's. Yields the name of the kernel."""
    import torch

    if gives_nan(device):
        yield "cuDNN"
        return
    kept, repair = torch.nn.functional.scaled_dot_product_attention, sys.modules.get(REPAIR)
    known = getattr(repair, "takes_cudnn", None)

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
        taken = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= WIDEST
        if attn_mask is not None and taken and query.requires_grad:
            seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -torch.inf
            empty = ~seen.any(dim=-1, keepdim=True)
            query = query.view_as(query)
            query.register_hook(lambda gradient: gradient.masked_fill(empty, torch.nan))
        return kept(query, key, value, attn_mask=attn_mask, **options)

    torch.nn.functional.scaled_dot_product_attention = attention
    if repair is not None:
        vars(repair)["takes_cudnn"] = lambda device: True
        sys.modules["gemma4_compat._engine.dormant"].activate(repair.ID)
    try:
        yield "a stand-in for cuDNN"
    finally:
        torch.nn.functional.scaled_dot_product_attention = kept
        if repair is not None:
            vars(repair)["takes_cudnn"] = known
