"""The bytes of a quantized weight: counted on a loaded one (:func:`stored_bytes`), computed from a shape (the others).

In 4 bits bitsandbytes stores two values per byte, one fp32 ``absmax`` per 64 values, and a code book of 16. With
double quantization: ``absmax`` in one byte, one fp32 nested ``absmax`` per 256 of them, a code book of 256 and an
offset. In 8 bits: one byte per value and one fp32 ``SCB`` per row.
"""

from __future__ import annotations

from typing import Any

from gemma4_compat._gemma4.quantization import quant_states

#: Values that share one ``absmax``; an expert whose weight is not a multiple cannot be quantized by itself.
BLOCK = 64
_NESTED_BLOCK = 256
_CODES = 16
_NESTED_CODES = 256
_FLOAT = 4


def stored_bytes(parameter: Any) -> int:
    """Bytes of a parameter and of what bitsandbytes keeps beside it (scales, code books, offsets), on any device.

    This is the size as loaded: in a forward bitsandbytes repacks 4-bit weights for some CPUs, and may move 8-bit
    scales.
    """
    attributes = vars(parameter)
    tensors = [parameter]
    if attributes.get("SCB") is not None:
        tensors.append(attributes["SCB"])
    if attributes.get("quant_state") is not None:
        tensors += quant_states.tensors(attributes["quant_state"])
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def expected_bytes(parameter: Any) -> int:
    """Bytes that a parameter on meta will take once loaded; for a weight that will be quantized, values and scales.

    Ignores that double quantization makes scales smaller.
    """
    kind, count = type(parameter).__name__, int(parameter.numel())
    if kind == "Params4bit":
        return sum(linear_tensors(1, count, "4bit"))
    if kind == "Int8Params":
        return count
    return count * int(parameter.element_size())


def stored_bytes_of(module: Any) -> int:
    """:func:`stored_bytes` of every parameter of a module."""
    return sum(map(stored_bytes, module.parameters()))


def linear_tensors(rows: int, columns: int, quantization: str) -> list[int]:
    """Bytes of each tensor that bitsandbytes keeps for one ``rows`` x ``columns`` weight."""
    count = rows * columns
    if quantization == "8bit":
        return [count, _FLOAT * rows]
    packed, scales, book = -(-count // 2), -(-count // BLOCK), _FLOAT * _CODES
    if quantization == "4bit":
        return [packed, _FLOAT * scales, book]
    return [packed, scales, book, _FLOAT * -(-scales // _NESTED_BLOCK), _FLOAT * _NESTED_CODES, _FLOAT]


def expert_tensors(count: int, rows: int, columns: int, quantization: str) -> list[int]:
    """Bytes of each tensor for the ``rows`` x ``columns`` weights of ``count`` experts in 4 bits: as for single
    weights, with shared code books and, with double quantization, one offset per expert.
    """
    if quantization == "4bit":
        packed, scales, book = linear_tensors(rows, columns, quantization)
        return [count * packed, count * scales, book]
    packed, scales, book, nested, nested_book, offset = linear_tensors(rows, columns, quantization)
    return [count * packed, count * scales, book, count * nested, nested_book, count * offset]
