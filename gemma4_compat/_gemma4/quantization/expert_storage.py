"""Quantize, dequantize, save and load the experts of a mixture of experts in 4 bits.

A parameter of all experts, (experts, rows, columns), becomes one ``Params4bit`` with the packed bytes of all experts
and a ``QuantState`` whose scales have one row per expert. Each expert is quantized separately, with its own scales
and, with double quantization, its own offset. So experts can be dequantized one by one, with the bits of
``dequantize_4bit(quantize_4bit(matrix))``. Code that moves, offloads, copies or counts 4-bit weights needs no special
case.

Imports nothing upstream at module level.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.quantization.experts import NAMES, all_experts, quantized_parameter, tail_of

#: Tensors beside the packed bytes in a checkpoint, ``<parameter>.<name>``: bitsandbytes' own, and an offset per
#: expert.
STORED = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "nested_offset")
STORED_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")

# --------------------------------------------------------------------------------------------------------- the modules


def prepare(model: Any, config: Any, chosen: Callable[[str], bool], *, prequantized: bool) -> None:
    """Mark the ``chosen`` experts of a model on meta as weights to be quantized to 4 bits as ``config``, a
    ``BitsAndBytesConfig``, describes. If ``prequantized``, the checkpoint already has them in 4 bits.
    """
    for path, module in all_experts(model).items():
        for name in NAMES:
            old = module._parameters.get(name)
            if old is None or not chosen(f"{path}.{name}"):
                continue
            new = _empty(old.data, config)
            if old[0].numel() % new.blocksize:
                continue  # scales would span experts; the report says that these stay
            if prequantized:  # older releases cast loaded values to the existing dtype
                new.data = new.data.to(config.bnb_4bit_quant_storage)
            module._parameters[name] = new
            _remember_states(module)


def _empty(data: Any, config: Any) -> Any:
    from bitsandbytes.nn import Params4bit

    return Params4bit(
        data,
        requires_grad=False,
        compress_statistics=config.bnb_4bit_use_double_quant,
        quant_type=config.bnb_4bit_quant_type,
        quant_storage=config.bnb_4bit_quant_storage,
    )


def quantize_module(module: Any, config: Any) -> None:
    """Quantize the experts of a loaded module on their current device; quantized ones stay as they are.

    Raises:
        Gemma4CompatError: an expert's matrix is not a multiple of a block; nothing was changed.
    """
    plain = {name: module._parameters[name] for name in NAMES if quantized_parameter(module, name) is None}
    module._parameters.update(
        {name: quantized(parameter.data, _empty(parameter.data, config)) for name, parameter in plain.items()}
    )
    _remember_states(module)


def dequantize_module(module: Any, dtype: Any = None) -> None:
    """Replace the 4-bit weights of an experts module by their bf16 (``dtype``) values, also if offloaded."""
    import torch

    with module_hooks.weights_brought_in(module):
        for name in NAMES:
            parameter = quantized_parameter(module, name)
            if parameter is not None:
                values = dequantized(parameter)
                plain = torch.nn.Parameter(values if dtype is None else values.to(dtype), requires_grad=False)
                module._parameters[name] = plain


# --------------------------------------------------------------------------------------------------------- the weights


def quantized(values: Any, like: Any) -> Any:
    """``values`` (experts, rows, columns), bf16, fp16 or fp32, as a ``Params4bit`` with the settings of ``like``, on
    the same device.

    Raises:
        Gemma4CompatError: rows x columns is not a multiple of the block size.
    """
    import torch
    from bitsandbytes import functional

    if values[0].numel() % like.blocksize:
        raise Gemma4CompatError(
            f"experts of {values.shape[1]} x {values.shape[2]} values are not a multiple of a block of "
            f"{like.blocksize}, so they cannot be quantized one by one. Leave them out: "
            "llm_int8_skip_modules=[..., 'experts']."
        )
    packed: Any = None
    states = []
    for index, matrix in enumerate(values):
        data, state = functional.quantize_4bit(
            matrix.contiguous(),
            blocksize=like.blocksize,
            compress_statistics=like.compress_statistics,
            quant_type=like.quant_type,
            quant_storage=like.quant_storage,
        )
        if packed is None:
            packed = torch.empty((len(values), data.numel()), dtype=data.dtype, device=data.device)
        packed[index] = data.flatten()
        states.append(state)
    return with_state(packed.view(-1, 1), _joined(states, values.shape))


def _joined(states: list[Any], shape: Any) -> Any:
    """One state for all experts: scales, nested scales and offsets have one row per expert."""
    import torch

    joined = copy.copy(states[0])
    joined.shape = torch.Size(shape)
    joined.absmax = torch.stack([state.absmax for state in states])
    if joined.nested:
        joined.offset = torch.stack([state.offset for state in states]).view(-1, 1)
        joined.state2 = copy.copy(states[0].state2)
        joined.state2.absmax = torch.stack([state.state2.absmax for state in states])
    return joined


def dequantized(parameter: Any, chosen: Any = None, rows: Callable[[Any, Any], Any] | None = None) -> Any:
    """The values of the experts ``chosen`` (indices; None: all), (experts, rows, columns), in the dtype from which
    they were quantized.

    Args:
        parameter: the 4-bit parameter of all experts.
        chosen: int64, of any length.
        rows: replaces :func:`rows_of`.
    """
    import torch
    from bitsandbytes import functional

    def those(tensor: Any) -> Any:
        return tensor if chosen is None else (rows or rows_of)(tensor, chosen)

    if chosen is not None and rows in (None, rows_of) and (reader := reading()) is not None:
        found = reader.dequantized(parameter, chosen)
        if found is not None:
            return found
    state = parameter.quant_state
    count, height, width = state.shape
    packed = those(parameter.data.view(torch.uint8).view(count, -1))
    plain = functional.QuantState(
        absmax=_scales(state, those).reshape(-1),
        shape=torch.Size((len(packed), height, width)),
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )
    return functional.dequantize_4bit(packed.view(-1, 1), plain)


class Reader(Protocol):
    """Another way to read the weights of the experts that are hit, with the same bits."""

    def dequantized(self, parameter: Any, chosen: Any) -> Any:
        """Like :func:`dequantized`; None for a parameter that it does not read."""

    def positions(self, top_k_index: Any) -> Any:
        """``arange`` in the shape of ``top_k_index``, to read the experts in that order; None: read them ascending."""


_reader: contextvars.ContextVar[Reader | None] = contextvars.ContextVar("gemma4_compat_expert_reader", default=None)


def reading() -> Reader | None:
    """The current reader of experts that are hit; None for PyTorch's operations."""
    import torch

    return None if torch.compiler.is_compiling() else _reader.get()


def read_by(reader: Reader) -> contextlib.AbstractContextManager[None]:
    """Inside, ``reader`` is tried first."""
    return in_place.bound(_reader, reader)


def _scales(state: Any, those: Callable[[Any], Any]) -> Any:
    """The fp32 scales, one row per expert; with double quantization computed exactly as bitsandbytes does."""
    scales = those(state.absmax)
    if not state.nested:
        return scales
    nested = those(state.state2.absmax).repeat_interleave(state.state2.blocksize, dim=1)
    return state.state2.code[scales.int()] * nested[:, : scales.shape[1]] + those(state.offset)


def rows_of(tensor: Any, chosen: Any) -> Any:
    """``tensor[chosen]``, read in the widest words that fit; over PCIe that is twice as fast as byte by byte.

    Args:
        tensor: (experts, ...), contiguous, of any dtype, in any memory that the device of ``chosen`` can read.
        chosen: int64, indices of experts.

    Returns:
        (len(chosen), ...), on the device of ``chosen``.
    """
    rows = in_words(tensor).index_select(0, chosen)
    return rows.view(tensor.dtype).view(len(chosen), *tensor.shape[1:])


def in_words(tensor: Any) -> Any:
    """A contiguous tensor, (experts, ...), as (experts, words) of 8 bytes, or of fewer if it is not aligned."""
    import torch

    flat = tensor.detach().view(len(tensor), -1)
    for word in (torch.int64, torch.int32, torch.int16):
        size = word.itemsize
        if flat.shape[1] * flat.dtype.itemsize % size == 0 and flat.data_ptr() % size == 0:
            return flat.view(word)
    return flat.view(torch.uint8)


# -------------------------------------------------------------------------------------------------------- checkpoints


def _remember_states(module: Any) -> None:
    """Add the scales of a module's experts to its state dict, beside the packed bytes."""
    if add_states not in module._state_dict_hooks.values():
        module._register_state_dict_hook(add_states)


def add_states(module: Any, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """The hook of :func:`_remember_states`."""
    for name in NAMES:
        parameter = quantized_parameter(module, name)
        if parameter is not None and parameter.quant_state is not None:
            state_dict.update({f"{prefix}{name}.{key}": value for key, value in _as_dict(parameter).items()})


def _as_dict(parameter: Any) -> dict[str, Any]:
    state = parameter.quant_state
    if not state.nested:
        return dict(state.as_dict(packed=True))
    one = copy.copy(state)
    one.offset = state.offset.new_zeros(())  # bitsandbytes writes one number, experts have one each
    return {**one.as_dict(packed=True), "nested_offset": state.offset}


def from_checkpoint(tensors: dict[str, Any]) -> Any:
    """The ``Params4bit`` made of a checkpoint's tensors: ``""`` is the packed bytes, the others as in
    :data:`STORED`.
    """
    rest = dict(tensors)
    data = rest.pop("")
    return with_state(data, state_of(rest, data.device))


def state_of(tensors: dict[str, Any], device: Any) -> Any:
    """The ``QuantState``, on ``device``, of a weight or of all experts, made of a checkpoint's tensors: see
    :data:`STORED`.
    """
    from bitsandbytes.functional import QuantState

    rest = dict(tensors)
    offset = rest.pop("nested_offset", None)
    state = QuantState.from_dict(rest, device=device)
    if offset is not None:
        state.offset = offset.to(device)
    return state


def with_state(data: Any, state: Any) -> Any:
    """The ``Params4bit`` with these packed bytes and this ``QuantState``."""
    from bitsandbytes.nn import Params4bit

    return Params4bit(
        data,
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=data.dtype,
        bnb_quantized=True,
    )


def in_checkpoint(files: Iterable[Any]) -> frozenset[str]:
    """The experts' parameters that are quantized in these files, as ``layers.<number>.experts.<name>``."""
    from gemma4_compat._gemma4.checkpoint import header  # imports json, which the package does not load at import

    found = set()
    for file in map(Path, files):
        if file.suffix == ".safetensors":
            for key in header.header(file):
                stem, _, last = key.rpartition(".")
                if last == "absmax" and (tail := tail_of(stem)) is not None:
                    found.add(tail)
    return frozenset(found)
