"""The 4-bit weights of the experts that a token hits, read and dequantized by one kernel.

PyTorch and bitsandbytes gather the packed bytes, their scales and the scales of these, one kernel each, compute the
scales, and dequantize; transformers then copies the result in the order in which the token names its experts. The
kernel here reads each byte once, in place, from pinned host memory or the device, and writes the weights in that
order. Its arithmetic is bitsandbytes', operation by operation: ``code * scale`` in float, rounded once; a scale that
is itself quantized is ``code * scale + offset``. The bits are compared before the first use (:mod:`kernels`) and in
each step that is fused (:mod:`fused_steps`).
"""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

from gemma4_compat._gemma4.quantization import expert_storage
from gemma4_compat._kernels.programs import Kernel, instance, kinds

#: The name in an operation's signature.
OPERATION = "4-bit experts"
#: Values per scale, and scales per nested scale.
BLOCKSIZES = frozenset(1 << power for power in range(5, 13))
_WORD = 16  # bytes that a thread reads at once
_WORDS = 4  # of a thread; a warp reads 2 KiB in one piece
_WARP = 32


class Format(NamedTuple):
    """What decides the bits of a 4-bit weight.

    Attributes:
        quant_type: ``nf4`` or ``fp4``.
        blocksize: values per scale.
        nested: scales per nested scale; 0 where scales are in float32.
        dtype: of the weight, a ``torch.dtype``.
    """

    quant_type: str
    blocksize: int
    nested: int
    dtype: Any

    def signature(self, operation: str = OPERATION) -> tuple[Any, ...]:
        """As for other operations: name, operands, dtype."""
        return operation, self[:3], self.dtype


def kernel_of(parameter: Any, chosen: Any) -> tuple[Kernel, tuple[Any, ...], Any] | None:
    """The kernel that writes the weights of the experts ``chosen``, its operation's signature, and those weights.

    Args:
        parameter: 4-bit weights of all experts, in memory that the device of ``chosen`` can read.
        chosen: int64, (n,), contiguous.

    Returns:
        the kernel, the signature, and the weights, (n, rows, columns), not yet written; None for a parameter that does
        not suit.
    """
    import torch

    state = parameter.quant_state
    nested = state.state2.blocksize if state.nested else 0
    layout = Format(state.quant_type, state.blocksize, nested, state.dtype)
    count, height, width = state.shape
    packed = parameter.data
    row = height * width // 2
    scales = height * width // state.blocksize
    code = code_of(layout.quant_type, chosen.device)
    more = (state.state2.absmax.reshape(count, -1), state.offset, state.state2.code) if nested else (code, code, code)
    tensors = [packed, chosen, state.absmax, *more, code]
    words = len(chosen) * row // _WORD
    sizes = (-(-words // (_WORDS * _WARP)) * _WARP, words, row // _WORD, scales, more[0].shape[-1])
    expected = [packed.dtype, torch.int64, torch.uint8 if nested else torch.float32, *[torch.float32] * 4]
    if (
        [tensor.dtype for tensor in tensors] != expected  # the kernel reads them as these dtypes
        or row % _WORD
        or height * width % state.blocksize
        or layout.blocksize not in BLOCKSIZES
        or (nested and nested not in BLOCKSIZES)
        or layout.dtype not in kinds()
        or packed.data_ptr() % _WORD
        or packed.numel() * packed.element_size() != count * row
        or state.absmax.numel() != count * scales
        or any(not tensor.is_contiguous() or tensor.device != chosen.device for tensor in tensors)
    ):
        return None
    values = torch.empty((len(chosen), height, width), dtype=layout.dtype, device=chosen.device)
    tensors = [tensor.detach() for tensor in tensors]
    return Kernel(_text(layout), (*tensors, values), 1, sizes), layout.signature(), values


# The values of a 4-bit type, by type and device.
_codes: dict[tuple[str, Any], Any] = {}


def code_of(quant_type: str, device: Any) -> Any:
    """The 16 values of a 4-bit type as bitsandbytes computes them on a device: float32, (16,).

    ``QuantState.code`` has the same numbers, but not the same bits. FP4 has two zeros: the second is negative on CUDA
    and on CPUs without AVX-512, and positive there and on CPUs with it (bitsandbytes 0.50.2: ``csrc/kernels.cu``,
    ``csrc/cpu_ops.cpp``). Make the first call for a device outside a capture: :func:`prepare`.
    """
    if (quant_type, device) not in _codes:
        import torch
        from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

        halves = torch.arange(0, 16, 2, dtype=torch.uint8, device=device)
        packed = (halves * 16 + halves + 1).repeat(4).reshape(-1, 1)  # one block of 64 values
        state = QuantState(
            absmax=torch.ones(1, device=device),
            shape=torch.Size((1, 64)),
            code=get_4bit_type(quant_type, device=device),
            blocksize=64,
            quant_type=quant_type,
            dtype=torch.float32,
        )
        # With an option it is bitsandbytes that dequantizes: a kernel of ours would read this code.
        _codes[quant_type, device] = dequantize_4bit(packed, state, blocksize=64).reshape(-1)[:16].clone()
    return _codes[quant_type, device]


def prepare(device: Any) -> None:
    """Prepare what kernels on this device read and a capture cannot create."""
    if "bitsandbytes" in sys.modules:
        for quant_type in ("fp4", "nf4"):
            code_of(quant_type, device)


def _text(layout: Format) -> str:
    scale, shift = "unsigned char" if layout.nested else "float", (layout.blocksize // (2 * _WORD)).bit_length() - 1
    shifts = shift, max(layout.nested.bit_length() - 1, 0)
    return instance("experts.cuh", "expert_rows", kinds()[layout.dtype].name, scale, *shifts)


def trial(signature: tuple[Any, ...], device: Any) -> tuple[Kernel, Any, Any]:
    """A kernel of an operation for random bytes, the weights it writes, and the weights bitsandbytes computes."""
    import torch
    from bitsandbytes.functional import QuantState, create_dynamic_map, get_4bit_type

    _, (quant_type, blocksize, nested), dtype = signature
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)

    count, height, width = 5, _WARP + 1, 10 * blocksize  # more scales than a nested one has, and no whole warps
    number = height * width // blocksize
    state = QuantState(
        absmax=torch.rand((count, number), generator=generator, device=device),
        shape=torch.Size((count, height, width)),
        code=get_4bit_type(quant_type, device=device),
        blocksize=blocksize,
        quant_type=quant_type,
        dtype=dtype,
    )
    if nested:
        state.absmax = drawn(count, number)
        state.offset = torch.rand((count, 1), generator=generator, device=device)
        state.state2 = QuantState(
            absmax=torch.rand((count, -(-number // nested)), generator=generator, device=device),
            code=create_dynamic_map().to(device),
            blocksize=nested,
            dtype=torch.float32,
        )
        state.nested = True
    parameter = types.SimpleNamespace(data=drawn(count * height * width // 2, 1), quant_state=state)
    chosen = torch.tensor([3, 0, 4], device=device)
    found = kernel_of(parameter, chosen)
    if found is None:
        raise ValueError(f"there is no kernel for {signature}")
    return found[0], found[2], expert_storage.dequantized(parameter, chosen)


class Rows:
    """Reads experts while a step is captured; an :class:`expert_storage.Reader`.

    Args:
        sink: where kernels go, a :class:`fusing.Sink`.
        device: ``torch.device`` with an index.
    """

    def __init__(self, sink: Any, device: Any) -> None:
        self._sink, self._device = sink, device
        self._orders: dict[int, Any] = {}  # by how many experts a token hits

    def dequantized(self, parameter: Any, chosen: Any) -> Any:
        """The weights of these experts; None if no kernel can read them."""
        if chosen.device != self._device or (found := kernel_of(parameter, chosen)) is None:
            return None
        kernel, signature, values = found
        if not self._sink.accepts(signature):
            return None
        self._sink.kernel(kernel, [signature])
        return values

    def positions(self, top_k_index: Any) -> Any:
        """``arange``, made once per step. :meth:`is_order` recognizes it."""
        import torch

        number = top_k_index.numel()
        if number not in self._orders:
            self._orders[number] = torch.arange(number, device=self._device)
        return self._orders[number].view(top_k_index.shape)

    def is_order(self, indices: Any) -> bool:
        """Whether an indexing operation's ``indices`` are exactly an ``arange`` of :meth:`positions`."""
        if len(indices) != 1 or indices[0] is None or indices[0].ndim != 1:
            return False
        known = self._orders.get(indices[0].numel())
        return known is not None and known.data_ptr() == indices[0].data_ptr() and indices[0].is_contiguous()
