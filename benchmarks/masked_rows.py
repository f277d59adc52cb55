"""Which of PyTorch's attention kernels give NaN gradients where a query may see no key, as padding does in a batch?

python benchmarks/masked_rows.py     prints a line for each width of heads, dtype, heads for keys, padding and kernel

"left": the first row of a batch is padded on the left, so that its padded queries see nothing. "right": it is padded
on the right, behind more padding than a sliding window. The loss is of queries that are not padded alone. Needs a GPU
and nothing of Gemma 4; "default" is the kernel that PyTorch takes by itself.
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


def mask_of(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, 1, queries, keys), True where a key is seen; (batch, queries), True where a query is not padded."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").tril()
    real = torch.ones(2, LENGTH, dtype=torch.bool, device="cuda")
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
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
