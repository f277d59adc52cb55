"""One kernel dequantizes a 4-bit weight, in place of three.

Symptom: silent: a prompt or a training step of a 4-bit model waits for small kernels. With nested scales
(``bnb_4bit_use_double_quant``), each product of many rows, and its backward pass, runs two kernels and allocates
two tensors only for the scales of its weight.

Cause: ``dequantize_4bit``, and in 0.50 also ``_dequant_linear_fallback``, dequantize the scales, add their offset, and
then dequantize the weight.

Fix: On NVIDIA GPUs one kernel of this package reads packed weights and both levels of scales, and writes the weight:
NF4 and FP4, nested and plain, every block size, bfloat16, float16 and float32. The product after it is the same call
of cuBLAS. Before its first use on a GPU each format is computed both ways; unless all bits are equal, bitsandbytes
goes on dequantizing it. So it does under ``torch.compile``, where something watches single operations, and with torch
before 2.9, which cannot compile the kernel.

Remove when: bitsandbytes dequantizes weights with nested scales in one kernel.
"""

from typing import Any

from gemma4_compat._kernels.match import dequantizing
from gemma4_compat._kernels.specs.expert_rows import Format
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F105",
    kind="speed",
    severity="speed",
    affected=">=0.48.2",
    acts_on="every model",
    after="bitsandbytes-cpu-packing",
)

_NESTED = 256  # bitsandbytes' only block size of nested scales


@PATCH.replaces("bitsandbytes.functional", "dequantize_4bit")
def dequantize_4bit(
    original: Original,
    A: Any,  # noqa: N803  (upstream's name; callers may use it as a keyword)
    quant_state: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    found = None if quant_state is None or args or kwargs else dequantizing.of_state(A, quant_state)
    return original(A, quant_state, *args, **kwargs) if found is None else found


# Imported where there is a GPU.
@PATCH.replaces("bitsandbytes.backends.cuda.ops", "_dequant_linear_fallback", affected=">=0.50", group="products")
def dequantized_linear(
    original: Original,
    A: Any,  # noqa: N803
    B: Any,  # noqa: N803
    shapeB: Any,  # noqa: N803
    absmax: Any,
    blocksize: int,
    quant_type: str,
    bias: Any = None,
    absmax_8bit: Any = None,
    absmax_code: Any = None,
    absmax_offset: Any = None,
) -> Any:
    import torch

    scales = (absmax,) if absmax_8bit is None else (absmax_8bit, absmax, absmax_code, absmax_offset)
    layout = Format(quant_type, blocksize, _NESTED if len(scales) > 1 else 0, A.dtype)
    weight = dequantizing.weight(B, shapeB, layout, scales)
    if weight is None:
        nested = {"absmax_8bit": absmax_8bit, "absmax_code": absmax_code, "absmax_offset": absmax_offset}
        return original(A, B, shapeB, absmax, blocksize, quant_type, bias, **nested)
    return torch.nn.functional.linear(A, weight, bias)


def reproduce(workspace: Workspace) -> Outcome:
    """Whether scales are dequantized into a tensor of their own. Without a GPU, a stand-in is the kernel."""
    from bitsandbytes import functional

    from gemma4_compat._lab import scenarios
    from gemma4_compat._lab.stand_ins import packed_weights

    with packed_weights.kernel(workspace.main) as reason:
        if reason is not None:
            return Outcome(False, reason, applicable=False)
        weight = workspace.load("4bit-double").get_decoder().layers[0].mlp.down_proj.weight
        expected = packed_weights.computed(weight.data, weight.quant_state)
        with scenarios.noted(functional, "dequantize_blockwise") as calls:
            found = functional.dequantize_4bit(weight.data, weight.quant_state)
    kernels_of_scales = "two kernels and two tensors more for its scales" if calls else "no kernel for its scales"
    off = (found.float() - expected.float()).abs().max().item()
    return Outcome(bool(calls), f"a nested 4-bit weight is dequantized with {kernels_of_scales}", parity=off)
