"""Safetensors files that lie: overlaps, gaps, shapes and lengths that nothing holds."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from hypothesis import strategies as st

from tests.generated.fuzz import values
from tests.generated.fuzz.case import File

_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1, "F8_E4M3": 1}
_LENGTHS = (0, 1, 7, 8, 2, 100, 10**6, 100_000_000, 100_000_001, 2**31, 2**63, 2**64 - 1)
_HOLES = (0, 0, 0, 1, 7, 4096, 2**20, 2**31, 2**40)


def entries(shapes: Mapping[str, Sequence[int]], dtype: str = "F32") -> dict[str, Any]:
    """The header of a valid file of these tensors."""
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + prod(shape) * _BYTES[dtype]
        found[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return found


def written(header: Any, length: int | None = None, change: int = 0, hole: int = 0) -> File:
    """A file of this header and of as many zeros as its tensors take.

    ``length`` is what it says of its header, ``change`` how many bytes of data are there more, ``hole`` how many zeros
    behind all of it.
    """
    text = values.as_json(header)
    said = min(len(text) if length is None else length, 2**64 - 1)
    data = max(0, min(_end(header) + change, 1 << 20))
    return File(said.to_bytes(8, "little") + text + bytes(data), hole)


def _end(header: Any) -> int:
    ends = [0]
    for entry in header.values() if isinstance(header, dict) else ():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if isinstance(offsets, list):
            ends += [end for end in offsets if type(end) is int and 0 <= end < 1 << 20]
    return max(ends)


def files(documents: Sequence[Any]) -> st.SearchStrategy[File]:
    """Files of these headers, changed, moved, lied about, and cut."""
    plain = st.builds(written, values.changed(documents) | _moved(documents))
    lying = st.builds(
        written,
        values.changed(documents, most=1),
        st.sampled_from(_LENGTHS) | st.none(),
        st.sampled_from([0, 0, -1, 1, -8, 512]),
        st.sampled_from(_HOLES),
    )
    cut = st.builds(
        lambda file, made: File(values.cut(file.content, made), file.hole), plain, st.lists(values.cuts, max_size=2)
    )
    return values.mostly(plain | lying | cut, st.deferred(lambda: st.sampled_from(_special())))


def _moved(documents: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Headers with one tensor moved: onto another, away from it, beyond the end, or backwards."""
    return st.builds(
        _move, st.sampled_from(documents), st.integers(0, 50), st.sampled_from([-8, -1, 1, 4, 8, 64]), st.booleans()
    )


def _move(document: Any, which: int, by: int, both: bool) -> Any:
    moved = values.apply(document, ())
    names = [name for name in moved if name != "__metadata__"]
    if names:
        entry = moved[names[which % len(names)]]
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = [begin + by if both else begin, end + by]
    return moved


_HUGE = {"a": {"dtype": "F32", "shape": [2**62] * 2000, "data_offsets": [0, 4]}}
_WIDE = {"a": {"dtype": "U8", "shape": [1] * 50_000 + [0], "data_offsets": [0, 0]}}
_MANY = entries({f"t{number}": (1,) for number in range(3000)})


@functools.cache
def _special() -> tuple[File, ...]:
    """Half a second to write."""
    return (
        written(_HUGE),
        written({"a": {"dtype": "F4", "shape": [10**4000] * 50, "data_offsets": [0, 4]}}),
        written(_WIDE),
        written(_MANY),
        written({"a": {"dtype": "BF16", "shape": [0, 10**4000], "data_offsets": [0, 0]}}),
        File((99_999_999).to_bytes(8, "little") + b"{", hole=100_000_000),
        File((99_999_999).to_bytes(8, "little") + b'{"a":' + b"[" * 200_000, hole=100_000_000),
        File((20_000_000).to_bytes(8, "little") + b"{" + b'"a":1,' * 3_000, hole=20_000_000),
        File(
            b"\x80\x04\x95\x1f\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."
        ),
        File(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        File(b"PK\x03\x04" + bytes(60)),
        File(b""),
        File(b"\x02\0\0\0\0\0\0\0{}"),
        File(kind="folder"),
        File(kind="fifo"),
        File(b"/dev/zero", kind="link"),
        File(b"/dev/full", kind="link"),
        File(b"gone", kind="link"),
        File(b"adapter_model.safetensors", kind="link"),
    )
