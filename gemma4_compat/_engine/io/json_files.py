"""Read JSON files: configurations, indices of shards and headers of safetensors files.

A type (:mod:`formats`) says which fields are checked and what they may hold; other fields stay as they are, because
newer releases add some.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from gemma4_compat._engine.io import files
from gemma4_compat._engine.io.files import MIB
from gemma4_compat._errors import Gemma4CompatError

#: Bytes of a configuration. The largest of a Gemma 4 adapter is the one with ``trainable_token_indices`` of all
#: 262,144 tokens, 3.6 MB as PEFT writes it; a model's is a few kB.
SETTINGS_LIMIT = 8 * MIB
#: Bytes of an index of shards, or of a safetensors header. Qwen3-235B's index, 36,000 tensors, has 3.5 MB; a Gemma 4
#: with one module per expert has 12,000.
TENSORS_LIMIT = 16 * MIB
#: Objects and lists inside each other. Real configurations have five.
DEEPEST = 64
#: Digits of a whole number: 64 bits are 20.
_DIGITS = 40

_Format = TypeVar("_Format")


def settings(file: Path, format: type | None = None) -> dict[str, Any]:
    """The object in a configuration, as plain data with all its fields.

    Args:
        file: the configuration file.
        format: the type of the fields that it names.

    Raises:
        Gemma4CompatError: it cannot be read, is too large or too deep, or a field has another type.
    """
    data = _plain(file, files.read_bytes(file, SETTINGS_LIMIT, "a configuration"))
    if not isinstance(data, dict):
        raise Gemma4CompatError(f"{str(file)!r} holds no settings: it is a JSON {type(data).__name__}")
    if format is not None:
        import msgspec

        try:
            msgspec.convert(data, format)
        except msgspec.ValidationError as error:
            raise Gemma4CompatError(f"a setting in {str(file)!r} cannot be right: {_said(error)}") from error
    return data


def of_format(data: bytes, format: type[_Format], wrong: str) -> _Format:
    """``data`` as an object of that type; other fields are skipped.

    Raises:
        Gemma4CompatError: it is not JSON, or has another type; the message begins with ``wrong``.
    """
    import msgspec

    try:
        return msgspec.json.decode(data, type=format)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Gemma4CompatError(f"{wrong} ({_said(error)})") from error


def _plain(file: Path, data: bytes) -> Any:
    """JSON as Python and PEFT write it, possibly with Infinity and NaN."""
    try:
        found = json.loads(data.decode("utf-8"), parse_int=_whole)
        _refuse_odd(found)
    except RecursionError as error:
        raise _too_deep(file) from error
    except UnicodeError as error:
        place = f"byte {error.start} is not UTF-8" if isinstance(error, UnicodeDecodeError) else "half a character"
        raise Gemma4CompatError(f"{str(file)!r} is not JSON: {place}; save it as UTF-8") from error
    except ValueError as error:
        raise Gemma4CompatError(f"{str(file)!r} is not JSON: {error}") from error
    return found


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _refuse_odd(data: Any) -> None:
    """Refuse values that parse but fail later: nesting that Python cannot walk, and lone surrogates."""
    level = [data]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, str):
                value.encode()  # raises UnicodeEncodeError, a ValueError, for a lone surrogate
            elif isinstance(value, dict):
                inner += value
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level = inner
        if not level:
            return
    raise RecursionError


def _too_deep(file: Path) -> Gemma4CompatError:
    return Gemma4CompatError(f"{str(file)!r} cannot be read: its JSON is nested deeper than {DEEPEST} levels")


def _said(error: Exception) -> str:
    """The message of msgspec with the place first: ``rank_pattern: expected object | null, got array``."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):  # its text contains the whole file
        return "it is not UTF-8"
    said, _, place = str(error).replace("`", "").partition(" - at ")
    said = f"{said[:1].lower()}{said[1:]}"
    return f"{place.removeprefix('$.')}: {said}" if place else said
