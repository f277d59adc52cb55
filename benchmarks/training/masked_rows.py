"""Which of PyTorch's attention kernels give NaN gradients where a query may see no key, as padding does in a batch?

python benchmarks/training/masked_rows.py

It prints a line for each width of heads, dtype, heads for keys, padding and kernel

"left": the first row of a batch is padded on the left, so that its padded queries see nothing. "right": it is padded
on the right, behind more padding than a sliding window. The loss is of queries that are not padded alone. Needs a GPU
and nothing of Gemma 4; "default" is the kernel that PyTorch takes by itself.

Then, of that kernel: which lengths have NaN gradients with padding; with padding where a padded query sees every key
and its output is set to zero, as gemma4_compat has it; and with no padding where all scores are near -120, which is
what https://github.com/pytorch/pytorch/issues/196678 is about.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

KERNELS = (None, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
HEADS, LENGTH, WINDOW, PADDED = 4, 64, 8, 20
LENGTHS = (24, 32, 48, 56, 64, 72, 96, 100, 112, 127, 128, 129, 160, 192, 256, 320, 384, 448, 1024, 1088)


def mask_of(side: str, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, 1, queries, keys), True where a key is seen; (batch, queries), True where a query is not padded."""
    seen = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    real = torch.ones(2, length, dtype=torch.bool, device="cuda")
    if side == "left":
        real[0, :PADDED] = False
    else:
        real[0, -PADDED:] = False
        seen &= ~seen.tril(-WINDOW)
    return (seen & real[:, None, :])[:, None], real


def outcome(width: int, dtype: torch.dtype, heads: int, side: str, kernel: SDPBackend | None) -> str:
    """Which of the outputs and gradients have a NaN."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, number, LENGTH, width, device="cuda", dtype=dtype, requires_grad=True)
        for number in (HEADS, heads, heads)
    )
    mask, real = mask_of(side)
    try:
        with contextlib.nullcontext() if kernel is None else sdpa_kernel(kernel):
            found = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=heads != HEADS)
            found.transpose(1, 2)[real].float().square().sum().backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    tensors = {"output": found, "query": query.grad, "key": key.grad, "value": value.grad}
    broken = [name for name, tensor in tensors.items() if tensor is None or tensor.isnan().any()]
    return f"NaN in {', '.join(broken)}" if broken else "finite"


def by_length(length: int, width: int, kind: str) -> str:
    """The same of one ``kind``: "padded", "filled" or "low scores"."""
    torch.manual_seed(0)
    query, key, value = (0.1 * torch.randn(2, HEADS, length, width, device="cuda") for _ in range(3))
    mask, real = mask_of("left", length)
    if kind == "low scores":
        query[..., 0], key[..., 0] = 1.0, -120 * width**0.5
        mask, real = torch.ones_like(mask).tril(), torch.ones_like(real)
    empty = ~mask.any(dim=-1, keepdim=True)
    states = [each.bfloat16().requires_grad_() for each in (query, key, value)]
    found = scaled_dot_product_attention(*states, attn_mask=mask | empty if kind == "filled" else mask)
    if kind == "filled":
        found = found.masked_fill(empty, 0.0)
    found.transpose(1, 2)[real].float().square().sum().backward()
    broken = [
        name
        for name, state in zip(("query", "key", "value"), states, strict=True)
        if state.grad is None or state.grad.isnan().any()
    ]
    return f"NaN in {', '.join(broken)}" if broken else "finite"


def main() -> int:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    warnings.simplefilter("ignore")  # why a kernel does not take this
    for case in itertools.product((32, 256, 512), (torch.bfloat16, torch.float32), (1, HEADS), ("left", "right")):
        for kernel in KERNELS:
            name = "default" if kernel is None else kernel.name
            width, dtype, heads, side = case
            print(
                f"heads of {width}, {dtype}, {heads} for keys, padded on the {side}, {name}: {outcome(*case, kernel)}"
            )
    for kind, width in itertools.product(("padded", "filled", "low scores"), (64, 256)):
        for length in LENGTHS:
            print(f"{kind}, heads of {width}, torch.bfloat16, {length} tokens: {by_length(length, width, kind)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
