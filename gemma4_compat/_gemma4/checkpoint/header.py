"""Read the header of a safetensors file: names, types, shapes and offsets of its tensors. The data is not read.

The safetensors library needs numpy or torch even for shapes, and maps the file.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import json_files
from gemma4_compat._errors import Gemma4CompatError

#: Bits per element, by safetensors' name of the dtype.
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_LONGEST_HEADER = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header.

    Attributes:
        dtype: safetensors' name (``"BF16"``).
        shape: the tensor's shape.
        start: its first byte in the file.
        nbytes: its size in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def header(file: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, by name.

    Raises:
        Gemma4CompatError: it is not a safetensors file, or it is truncated or damaged.
    """
    from gemma4_compat._engine.io import formats

    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise Gemma4CompatError(f"{str(file)!r} is not a file")
        size = found.st_size
        stream = file.open("rb")
    except OSError as error:
        raise Gemma4CompatError(f"{str(file)!r} cannot be read: {error.strerror or error}") from error
    with stream:
        start = stream.read(64)
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > _LONGEST_HEADER or start[8:9] not in (b"{", b""):
            raise Gemma4CompatError(f"{str(file)!r} is not a safetensors file: {_what_it_is(start)}")
        if 8 + length > size:
            raise _truncated(file, size, 8 + length, "its header alone takes")
        if length > json_files.TENSORS_LIMIT:
            raise Gemma4CompatError(
                f"{str(file)!r} has a header of {length} bytes; at most {json_files.TENSORS_LIMIT} are supported. "
                "Save the tensors in several files"
            )
        stream.seek(8)
        text = stream.read(length)
    wrong = f"{str(file)!r} is not a safetensors file: its header cannot be read"
    entries = json_files.of_format(text, dict[formats.Name, formats.Tensor], wrong)
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in entries.items():
        try:
            tensors[name] = _tensor(entry, 8 + length)
        except ValueError as error:
            raise Gemma4CompatError(f"{wrong} ({name!r}: {error})") from error
    ends = [tensor.start - 8 - length + tensor.nbytes for tensor in tensors.values()]
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise _truncated(file, size, expected, "its header describes")
    if size > expected:
        raise Gemma4CompatError(
            f"{str(file)!r} is damaged: it has {size} bytes and its header describes {expected}. Get it again"
        )
    return tensors


def _tensor(entry: Any, first: int) -> Tensor:
    dtype, shape, offsets = entry.dtype, entry.shape, entry.data_offsets
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, tuple)):
        raise ValueError("it has no dtype, shape or data_offsets")
    begin, end = offsets
    if end < begin:
        raise ValueError(f"it ends at {end}, before it begins at {begin}")
    if dtype in BITS and end - begin != prod(shape) * BITS[dtype] // 8:
        raise ValueError(f"{dtype} of shape {shape} in {end - begin} bytes")
    return Tensor(dtype, tuple(shape), first + begin, end - begin)


def problems(file: Path, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """The problems of a file with a readable header, as (tensor, problem).

    By safetensors' own rules the data of the tensors is contiguous, from the first byte to the last.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in BITS:
            yield name, f"has the dtype {tensor.dtype!r}, which safetensors does not have"
    with file.open("rb") as stream:
        end = 8 + int.from_bytes(stream.read(8), "little")
    before = "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start < end:
            yield name, f"shares {end - tensor.start} bytes with {before!r}"
        elif tensor.start > end:
            yield name, f"begins {tensor.start - end} bytes after the end of {before!r}; no tensor has these bytes"
        if tensor.start + tensor.nbytes >= end:
            end, before = tensor.start + tensor.nbytes, name


def _truncated(file: Path, size: int, expected: int, what: str) -> Gemma4CompatError:
    return Gemma4CompatError(
        f"{str(file)!r} is truncated: it has {size} bytes and {what} {expected}. Get it again; a download or a save "
        "was interrupted"
    )


def _what_it_is(start: bytes) -> str:
    if not start:
        return "it is empty"
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer. Fetch the file with: git lfs pull"
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")):
        return "it is a pickle, as torch.save writes it, under another name"
    return f"it starts with {start[:16]!r}"
