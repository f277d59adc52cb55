"""Check a safetensors file with a readable header, and the index of a checkpoint.

By safetensors' own rules the data of the tensors is contiguous, from the first byte to the last. The shards of a
checkpoint are beside its index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint.header import BITS, Tensor


def problems(file: Path, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """The problems of a header, as (tensor, problem)."""
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


def refuse_problems(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise ``Gemma4CompatError`` for a file with problems."""
    for name, problem in problems(file, tensors):
        raise Gemma4CompatError(f"{str(file)!r} is damaged: {name!r} {problem}. Get it again")


def refuse_outside(index: Path, shard: str) -> None:
    """Raise ``Gemma4CompatError`` for the name of a shard that leaves the folder of its index."""
    for path in (PurePosixPath(shard), PureWindowsPath(shard)):
        if path.is_absolute() or path.drive or ".." in path.parts:
            raise Gemma4CompatError(
                f"{str(index)!r} names the shard {shard!r}, which is not in its folder; get the checkpoint again"
            )
