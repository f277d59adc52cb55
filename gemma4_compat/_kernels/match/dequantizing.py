"""4-bit weights dequantized by one kernel, with bitsandbytes' or PyTorch's bits (:mod:`nf4_dequantize`).

For every product of many rows bitsandbytes dequantizes the nested scales, adds their offset, and dequantizes the
weight: three kernels and three tensors. Integers that stay packed (:mod:`packed_linear`) take PyTorch six.

The result is new memory of PyTorch's allocator, not a buffer that is kept: the allocator gives the next weight on this
stream the memory of the last, takes it from a graph's pool inside a capture, and gives it to other tensors meanwhile.
Nor is a weight kept for the next chunk of a prompt: that of E2B would take 4 GiB, and a larger chunk saves as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.specs import nf4_dequantize
from gemma4_compat._kernels.specs.expert_rows import BLOCKSIZES, Format
from gemma4_compat._kernels.specs.nf4_dequantize import VALUES
from gemma4_compat._kernels.specs.products import INT4

# What a launch depends on (:func:`_key`): how to launch again. All checks would take longer than the launch.
_launches: dict[tuple[Any, ...], Callable[[], Any]] = {}
_MOST_LAUNCHES = 4096  # weights that are streamed have new addresses
_TRIED_WORDS = 3  # of a block of integers


def of_state(packed: Any, state: Any) -> Any:
    """What ``bitsandbytes.functional.dequantize_4bit(packed, state)`` returns; None if it has to compute it."""
    import torch

    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    with torch._C.DisableTorchFunctionSubclass():  # that of Params4bit would be asked about each attribute
        if packed.device.type not in kernels.COMPILERS or getattr(state, "packing_format_for_cpu", False):
            return None
        if state.nested:
            inner = state.state2
            if inner.nested or inner.dtype is not torch.float32:
                return None
            scales: tuple[Any, ...] = (state.absmax, inner.absmax, inner.code, state.offset)
            nested = inner.blocksize
        else:
            scales, nested = (state.absmax,), 0
        layout = Format(state.quant_type, state.blocksize, nested, state.dtype)
        found = weight(packed, state.shape, layout, scales)
        return found.t() if found is not None and packed.shape[0] == 1 else found


def unpacked(packed: Any, scale: Any, columns: int, bits: int, stored: Any) -> Any:
    """As :func:`packed_linear.unpacked`, which computes what the kernel does not."""
    import torch

    found = None
    if bits == 4 and scale.dtype == stored and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        shape = len(packed), columns
        layout = Format(INT4, math.prod(shape) // scale.numel(), 0, stored)
        found = weight(packed, shape, layout, (scale.detach(),))
    if found is not None:
        return found
    from gemma4_compat._gemma4.quantization import packed_linear

    return packed_linear.unpacked(packed, scale, columns, bits, stored)


def weight(packed: Any, shape: Sequence[int], layout: Format, scales: tuple[Any, ...]) -> Any:
    """A new weight of this shape, written on its device's current stream.

    Args:
        packed: the bytes, in any dtype, one after the other.
        shape: of the weight.
        layout: its format.
        scales: as for :func:`nf4_dequantize.kernel_of`.

    Returns:
        None if bitsandbytes or PyTorch has to: the kernel does not suit, or differs bitwise on this device.
    """
    import torch

    if _is_watched():
        return None
    with torch._C.DisableTorchFunctionSubclass():
        device = packed.device
        if (
            device.type not in kernels.COMPILERS
            or type(packed).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
            or not {*map(type, scales)} <= {torch.Tensor}
        ):
            return None
        key = _key(packed, shape, layout, scales)
        again = _launches.get(key)
        if again is not None:
            return again()
        own = kernels.of(device)
        if not _supports(packed, math.prod(shape), layout, scales) or not _is_exact(layout, own):
            return None
        result = torch.empty(shape, dtype=layout.dtype, device=device)
        kernel = nf4_dequantize.kernel_of(packed, layout, scales, result)
        own.launch(kernel)
        if (launch := own.again(kernel)) is not None:
            _remember(key, result, launch)
    return result


def _is_watched() -> bool:
    """Whether a mode sees single operations. One that fuses them does not mind: weights are there when it begins."""
    import torch
    from torch.utils import _python_dispatch

    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return not all(getattr(type(mode), "ignores_launches", False) for mode in modes)


def _key(packed: Any, shape: Sequence[int], layout: Format, scales: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where all is that a launch reads, and how it is read: other tensors may have these addresses later."""
    size = packed.nbytes if packed.is_contiguous() else None
    found = [part for one in scales for part in (one.data_ptr(), one.dtype, one.is_contiguous())]
    return (layout, *shape, packed.device, packed.data_ptr(), size, *found)


def _remember(key: tuple[Any, ...], result: Any, launch: Callable[[int], None]) -> None:
    import torch

    shape, strides, dtype, device = result.shape, result.stride(), result.dtype, result.device
    new = torch.empty_strided  # takes half the time of `empty`

    def again() -> Any:
        result = new(shape, strides, dtype=dtype, device=device)
        launch(result.data_ptr())
        return result

    if len(_launches) >= _MOST_LAUNCHES:
        _launches.clear()
    _launches[key] = again


def _supports(packed: Any, size: int, layout: Format, scales: tuple[Any, ...]) -> bool:
    """Whether the kernel reads no other memory than bitsandbytes, and reads it as it is meant."""
    import torch

    dtype, device = layout.dtype, packed.device
    if (
        size <= 0
        or size % VALUES
        or not dtype.is_floating_point
        or dtype.itemsize not in (2, 4)
        or packed.numel() * packed.element_size() * 2 != size
        or not packed.is_contiguous()
        or packed.data_ptr() % 4
        or packed.requires_grad
    ):
        return False
    blocks = -(-size // layout.blocksize)
    if layout.quant_type == INT4:
        fits = scales[0].dtype is dtype and scales[0].numel() * layout.blocksize == size
        fits = fits and not layout.blocksize % VALUES
    elif layout.blocksize not in BLOCKSIZES:
        return False
    elif layout.nested:
        if layout.nested not in BLOCKSIZES:
            return False
        quantized, nested, codes, offset = scales
        fits = (
            quantized.dtype is torch.uint8
            and nested.dtype is codes.dtype is offset.dtype is torch.float32
            and quantized.numel() >= blocks
            and nested.numel() * layout.nested >= blocks
            and codes.numel() == 256
            and offset.numel() == 1
        )
    else:
        fits = scales[0].dtype is torch.float32 and scales[0].numel() >= blocks
    return fits and all([tensor.is_contiguous() and tensor.device == device for tensor in scales])


def _is_exact(layout: Format, own: kernels.Kernels) -> bool:
    """Whether the kernel has the right bits. A trial calls bitsandbytes, and so this function again."""
    instead = "bitsandbytes dequantizes 4-bit weights"
    if layout.quant_type == INT4:  # one kernel for blocks of any size, which may be a whole weight
        instead, layout = "PyTorch unpacks 4-bit weights", layout._replace(blocksize=_TRIED_WORDS * VALUES)
    text, signature = nf4_dequantize.text_of(layout), layout.signature(nf4_dequantize.OPERATION)
    return own.selftest(layout, str(layout), instead, lambda: own.prepare([text], [signature]))
