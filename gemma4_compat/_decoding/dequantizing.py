"""4-bit weights dequantized by one kernel, with bitsandbytes' bits (:mod:`dequantizing_source`).

For every product of many rows bitsandbytes dequantizes the nested scales, adds their offset, and dequantizes the
weight: three kernels and three tensors.

The result is new memory of PyTorch's allocator, not a buffer that is kept: the allocator gives the next weight on this
stream the memory of the last, takes it from a graph's pool inside a capture, and gives it to other tensors meanwhile.
Nor is a weight kept for the next chunk of a prompt: that of E2B would take 4 GiB, and a larger chunk saves as much.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from typing import Any

from gemma4_compat._decoding import dequantizing_source, kernels
from gemma4_compat._decoding.dequantizing_source import BLOCKSIZES, VALUES, Format

_log = logging.getLogger("gemma4_compat")
_lock = threading.Lock()
_here = threading.local()
# By format and device: whether the kernel has bitsandbytes' bits there.
_exact: dict[tuple[Format, Any], bool] = {}


def of_state(packed: Any, state: Any) -> Any:
    """The weight that ``bitsandbytes.functional.dequantize_4bit(packed, state)`` gives; None if it has to compute it."""
    import torch

    if packed.device.type not in kernels.COMPILERS or getattr(state, "packing_format_for_cpu", False):
        return None
    scales: tuple[Any, ...] = (state.absmax,)
    nested = 0
    if state.nested:
        inner = state.state2
        if inner.nested or inner.dtype != torch.float32:
            return None
        scales, nested = (state.absmax, inner.absmax, inner.code, state.offset), inner.blocksize
    found = weight(packed, state.shape, Format(state.quant_type, state.blocksize, nested, state.dtype), scales)
    return found.t() if found is not None and packed.shape[0] == 1 else found


def weight(packed: Any, shape: Sequence[int], layout: Format, scales: Sequence[Any]) -> Any:
    """A new weight of this shape, written on its device's current stream.

    Args:
        packed: the bytes, in any dtype, one after the other.
        shape: of the weight.
        layout: its format.
        scales: as for :func:`dequantizing_source.kernel_of`.

    Returns:
        None if bitsandbytes has to dequantize it: the kernel does not suit, or has other bits on this device.
    """
    import torch

    if (
        packed.device.type not in kernels.COMPILERS
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()  # something watches operations
    ):
        return None
    with torch._C.DisableTorchFunctionSubclass():  # that of Params4bit would be asked about each attribute
        if not _suits(packed, math.prod(shape), layout, scales) or not _is_exact(layout, packed.device):
            return None
        result = torch.empty(shape, dtype=layout.dtype, device=packed.device)
        known, kernel = kernels.of(packed.device), dequantizing_source.kernel_of(packed, layout, scales, result)
        known.prepare([kernel.text], [])  # nothing to do, unless kernels were released since its trial
        known.launch(kernel)
    return result


def _suits(packed: Any, size: int, layout: Format, scales: Sequence[Any]) -> bool:
    """Whether the kernel reads no other memory than bitsandbytes, and reads it as it is meant."""
    import torch

    blocks = -(-size // layout.blocksize) if layout.blocksize in BLOCKSIZES else 0
    if layout.nested in BLOCKSIZES:
        lengths = (blocks, -(-blocks // layout.nested), 256, 1)
        dtypes = (torch.uint8, torch.float32, torch.float32, torch.float32)
    else:
        lengths, dtypes = (blocks,), (torch.float32,)
    return bool(
        blocks
        and len(scales) == len(lengths)
        and not size % VALUES
        and layout.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and type(packed).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and packed.numel() * packed.element_size() * 2 == size
        and packed.is_contiguous()
        and not packed.data_ptr() % 4
        and not packed.requires_grad
        and all(
            type(tensor) is torch.Tensor
            and tensor.dtype == dtype
            and tensor.numel() >= length
            and tensor.device == packed.device
            and tensor.is_contiguous()
            for tensor, dtype, length in zip(scales, dtypes, lengths)
        )
    )


def _is_exact(layout: Format, device: Any) -> bool:
    known = _exact.get((layout, device))
    return _tried(layout, device) if known is None else known


def _tried(layout: Format, device: Any) -> bool:
    """Whether the kernel has bitsandbytes' bits. A trial calls bitsandbytes, and so this function again."""
    import torch

    if getattr(_here, "trying", False) or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return False
    with _lock:
        if (layout, device) in _exact:
            return _exact[layout, device]
        _here.trying = True
        try:
            refused = kernels.COMPILERS[device.type].obstacle()
            if refused is None and not _has_same_bits(layout, device):
                refused = f"{layout} has other bits on {device}"
        except torch.OutOfMemoryError:
            return False  # only this time
        except (OSError, RuntimeError) as error:
            refused = f"this package's kernels failed: {' '.join(str(error).split()):.200}"
        finally:
            _here.trying = False
        if refused is not None:
            _log.info("gemma4_compat: bitsandbytes dequantizes 4-bit weights: %s", refused)
        _exact[layout, device] = refused is None
        return refused is None


def _has_same_bits(layout: Format, device: Any) -> bool:
    text = dequantizing_source.text_of(layout.dtype, nested=layout.nested > 0)
    return kernels.of(device).prepare([text], [layout.signature])
