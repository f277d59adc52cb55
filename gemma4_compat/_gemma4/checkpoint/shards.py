"""Read and write safetensors files tensor by tensor, or in pieces of a tensor, never a whole file.

Memory-mapping would do the same, but the pages of an open mapped file count as memory of the process.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from gemma4_compat._engine.io import json_files
from gemma4_compat._engine.io.files import exists, read_bytes
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint.header import header, problems

#: Bytes per piece when a tensor is only copied.
PIECE = 64 << 20

_TORCH = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


@dataclass(frozen=True)
class Entry:
    """Location of a tensor: ``dtype`` is torch's name, ``start`` is in bytes from the beginning of ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


def dtype_of(name: str) -> Any:
    """The torch dtype of that name."""
    import torch

    return getattr(torch, name)


def entries(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises:
        Gemma4CompatError: it is not a safetensors file, or it is truncated or damaged.
    """
    tensors = header(file)
    for name, problem in problems(file, tensors):
        raise Gemma4CompatError(f"{str(file)!r} is damaged: {name!r} {problem}. Get it again")
    found = [
        Entry(name, _torch_name(file, name, tensor.dtype), tensor.shape, file, tensor.start, tensor.nbytes)
        for name, tensor in tensors.items()
    ]
    return {entry.name: entry for entry in sorted(found, key=lambda entry: (entry.start, entry.nbytes))}


def _torch_name(file: Path, name: str, dtype: str) -> str:
    if dtype not in _TORCH:
        raise Gemma4CompatError(
            f"{name} in {str(file)!r} has the dtype {dtype}, which cannot be merged; supported are {', '.join(_TORCH)}"
        )
    return _TORCH[dtype]


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return math.prod((dtype_of(dtype).itemsize, *shape))


def read(entry: Entry) -> Any:
    """The tensor, copied into memory."""
    import torch

    tensor = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
    if entry.nbytes:
        _fill(entry, 0, tensor.reshape(-1).view(torch.uint8))
    return tensor


def pieces(entry: Entry, nbytes: int = PIECE) -> Iterator[Any]:
    """The tensor's elements in order, flat, at most about ``nbytes`` at a time."""
    import torch

    dtype = dtype_of(entry.dtype)
    step = max(1, nbytes // dtype.itemsize)
    count = entry.nbytes // dtype.itemsize
    for first in range(0, count, step):
        piece = torch.empty(min(step, count - first), dtype=dtype)
        _fill(entry, first * dtype.itemsize, piece.view(torch.uint8))
        yield piece


def _fill(entry: Entry, offset: int, tensor: Any) -> None:
    view = memoryview(tensor.numpy()).cast("B")
    try:
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.start + offset)
            done = 0
            while done < len(view):
                got = stream.readinto(view[done:])
                if not got:
                    raise Gemma4CompatError(f"{str(entry.file)!r} ended while {entry.name} was read; get it again")
                done += got
    except OSError as error:
        raise Gemma4CompatError(f"{str(entry.file)!r} cannot be read: {error.strerror or error}") from error


def checkpoint(folder: Path) -> dict[str, Entry]:
    """Every tensor of the checkpoint in ``folder``, shard by shard.

    Raises:
        Gemma4CompatError: there are no safetensors files, or a shard is missing or damaged.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if exists(index):
        names = _weight_map(index)
        found: dict[str, Entry] = {}
        for file in sorted(set(names.values())):
            _refuse_outside(index, file)
            if not exists(folder / file):
                raise Gemma4CompatError(f"{index.name} names the shard {file}, which is not in {str(folder)!r}")
            found |= entries(folder / file)
        if missing := sorted(set(names) - set(found)):
            raise Gemma4CompatError(f"{index.name} in {str(folder)!r} names tensors no shard has: {missing[0]!r}, ...")
        return found
    if exists(single):
        return entries(single)
    raise Gemma4CompatError(
        f"there are no weights in safetensors in {str(folder)!r} (model.safetensors, or shards with their index). "
        "Save the model once with save_pretrained, which writes them"
    )


def _refuse_outside(index: Path, shard: str) -> None:
    """The shards of a checkpoint are beside its index."""
    for path in (PurePosixPath(shard), PureWindowsPath(shard)):
        if path.is_absolute() or path.drive or ".." in path.parts:
            raise Gemma4CompatError(
                f"{str(index)!r} names the shard {shard!r}, which is not in its folder; get the checkpoint again"
            )


def _weight_map(index: Path) -> dict[str, str]:
    from gemma4_compat._engine.io.formats import ShardIndex

    data = read_bytes(index, json_files.TENSORS_LIMIT, "an index of shards")
    return json_files.of_format(data, ShardIndex, f"{str(index)!r} is not an index of shards").weight_map


@dataclass(frozen=True)
class Output:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


def shards(outputs: Sequence[Output], largest: int) -> list[list[Output]]:
    """``outputs`` in files of at most ``largest`` bytes; a larger tensor gets its own file."""
    found: list[list[Output]] = [[]]
    held = 0
    for output in outputs:
        if found[-1] and held + output.nbytes > largest:
            found.append([])
            held = 0
        found[-1].append(output)
        held += output.nbytes
    return found


def with_bar(
    values: Mapping[str, Callable[[], Iterator[Any]]], doing: str, shown: bool | None
) -> dict[str, Callable[[], Iterator[Any]]]:
    """``values`` for :func:`write`, with a progress bar on standard error. ``shown`` None: on a terminal."""
    from tqdm import tqdm

    visible = sys.stderr.isatty() if shown is None else shown
    bar = tqdm(total=len(values), desc=doing, unit="tensor", disable=not visible, leave=False)

    def counted(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        yield from make()
        bar.update()

    return {name: functools.partial(counted, make) for name, make in values.items()}


def write(
    folder: Path,
    files: Sequence[Sequence[Output]],
    values: Mapping[str, Any],
    *,
    there: Collection[str] = (),
    done: Callable[[str, str], None] | None = None,
) -> list[str]:
    """Write a checkpoint and its index; returns the names of the files.

    Args:
        folder: where the files are written.
        files: the tensors of each file.
        values: name -> a function that yields the tensor in pieces, flat or not; each is called once, in order.
        there: names of files that are already complete and are not written again.
        done: called with the name and the SHA-256 of each file once it is completely on the disk.

    Raises:
        Gemma4CompatError: the disk is full, or the folder cannot be written.
    """
    names = [
        "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        for number in range(1, len(files) + 1)
    ]
    for name, outputs in zip(names, files):
        if name in there:
            continue
        digest = None if done is None else hashlib.sha256()
        write_file(folder / name, outputs, values, digest)
        if done is not None and digest is not None:
            done(name, digest.hexdigest())
    if len(files) > 1:
        total = sum(output.nbytes for outputs in files for output in outputs)
        index = {
            "metadata": {"total_size": total},
            "weight_map": {output.name: name for name, outputs in zip(names, files) for output in outputs},
        }
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    return names


def write_file(file: Path, outputs: Sequence[Output], values: Mapping[str, Any], digest: Any = None) -> None:
    """Write one file, as :func:`write` does; ``digest`` is updated with its bytes."""
    # The widest dtype first, as safetensors itself does: that aligns every tensor.
    ordered = sorted(outputs, key=lambda output: -dtype_of(output.dtype).itemsize)
    names = {torch_name: name for name, torch_name in _TORCH.items()}
    description: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in ordered:
        offsets = [end, end := end + output.nbytes]
        description[output.name] = {"dtype": names[output.dtype], "shape": list(output.shape), "data_offsets": offsets}
    text = json.dumps(description, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with file.open("wb") as stream:
            head = len(text).to_bytes(8, "little") + text
            stream.write(head)
            if digest is not None:
                digest.update(head)
            for output in ordered:
                written = 0
                for piece in values[output.name]():
                    data = as_bytes(piece)
                    written += stream.write(data)
                    if digest is not None:
                        digest.update(data)
                if written != output.nbytes:
                    raise AssertionError(f"{output.name}: {written} bytes written, {output.nbytes} announced")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise unwritable(error, file, 8 + len(text) + end) from error


def as_bytes(piece: Any) -> Any:
    """A tensor's bytes, as a ``memoryview``."""
    import torch

    flat = piece.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def write_text(file: Path, text: str) -> None:
    """Write a small file, or raise :class:`Gemma4CompatError`."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(error, file, len(text.encode())) from error


def unwritable(error: OSError, file: Path, nbytes: int) -> Gemma4CompatError:
    """The error for a file that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Gemma4CompatError(
            f"the disk is full: {str(file)!r} needs {nbytes} bytes. Free some space or write to another disk; what "
            "was written so far is removed"
        )
    return Gemma4CompatError(f"{str(file)!r} cannot be written: {error.strerror or error}")
