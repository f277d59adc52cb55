"""Hostile values, and strategies that put them anywhere into a document."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Raw:
    """Text that stands in a document as it is, valid or not."""

    text: str


DEEP = 100_000

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 4, 255, 10**4, 10**6, 10**7, 10**9, 2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64, -(2**63), 10**18),
    *(10**100, 10**4000, 0.5, -0.0, 4.0, 1e308, math.nan, math.inf, -math.inf, True, False, None),
)
TEXTS = (
    *("", " ", "\0", "a", "\n", "\r", "\t", "\x7f", "\x9b31m", "\x1b[31mred", "\x1b]0;title\x07", "\u202e", "\u2028"),
    *("\ud800", "\udcff", "é", "\U0001d4b3", "\u0661\u0662", "a" * 300, "x" * 70_000, "a" * 28 + "!"),
    *("../outside", "/etc/passwd", "/dev/zero", "..", ".", "~", "file:///etc/passwd", "https://example.com/a.txt"),
    *("(a+)+$", "(", "[", "\\", "(.*)*x", "(a|a)*$", "(?P<a>.)(?P=a)", "((a{1,99}){1,99}){1,99}", ".*", "a|" * 5000),
    *("{count}", "{first}", "{0.__class__}", "%s", "${HOME}", "$(touch canary)", "`touch canary`", "[red]", "[/red]"),
    *("NaN", "null", "True", "1" * 5000, "1e400", "-1", "0", "12", "8GiB", "auto", "cpu", "mars:9", "cuda:999"),
    *("__metadata__", "__class__", "__init__", "LORA", "IA3", "BF16", "F4", "q_proj", "peft", "transformers", "torch"),
)
#: Tokens of JSON that `json.dumps` never writes.
TOKENS = (
    *("NaN", "Infinity", "-Infinity", "1" * 5000, "-" + "9" * 5000, "1" * 5000 + ".5", "1e999999", "1E-999999", "-"),
    *('"\\ud800"', '"\\u0000"', '"\\u001b[31m"', '"a', "'a'", "tru", "", "/*c*/1", '{"a":1,"a":2}', '{"a"}', "[1,]"),
    *("[" * 500 + "]" * 500, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * DEEP, "0" * 100),
    *(" " * 200_000 + "1", "[" + "1," * 100_000 + "1]", '{"a":"' + "\\u0061" * 50_000 + '"}', "\ufeff1"),
)


def mostly(usual: st.SearchStrategy[Any], rare: st.SearchStrategy[Any], times: int = 15) -> st.SearchStrategy[Any]:
    """``usual``, and once in ``times`` what is expensive or always ends in the same way."""
    return st.one_of(*[usual.map(_same)] * times, rare)


def _same(item: Any) -> Any:
    return item


#: Any text: control characters and lone surrogates too.
text = st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=()), max_size=12)
number = st.sampled_from(NUMBERS) | st.integers(-5, 300)
token = st.sampled_from(TOKENS).map(Raw)
scalar = number | text
value = (
    scalar
    | token
    | st.lists(scalar, max_size=3)
    | st.dictionaries(text, scalar, max_size=3)
    | st.sampled_from([[[]], {"": {}}, [{}], {"a": [{"a": []}]}, [None], [[0, 1], [2, 3]]])
)

OPERATIONS = ("replace", "remove", "add", "rename", "wrap", "swap", "repeat")


@dataclass(frozen=True)
class Change:
    """One change of a document, at the ``place``-th of its values (counted around)."""

    operation: str
    place: int
    name: str
    value: Any


changes = st.builds(Change, st.sampled_from(OPERATIONS), st.integers(0, 400), text, value)


def changed(documents: Sequence[Any], most: int = 3) -> st.SearchStrategy[Any]:
    """One of these documents with up to ``most`` changes anywhere in it."""
    return st.builds(apply, st.sampled_from(documents), st.lists(changes, max_size=most))


def apply(document: Any, made: Sequence[Change]) -> Any:
    """``document``, copied, with these changes."""
    root = [copy.deepcopy(document)]
    for change in made:
        places = list(_places(root))
        owner, key = places[change.place % len(places)]
        _apply(owner, key, change, places)
    return root[0]


def _places(node: Any) -> Any:
    """Every (container, key) of a tree, outer ones first; a document is small."""
    pending = [node]
    while pending:
        here = pending.pop(0)
        for key in list(here) if isinstance(here, dict) else range(len(here)):
            yield here, key
            if isinstance(here[key], (dict, list)):
                pending.append(here[key])


def _apply(owner: Any, key: Any, change: Change, places: list[Any]) -> None:
    here = owner[key]
    if change.operation == "remove" and owner is not places[0][0]:
        del owner[key]
    elif change.operation == "add" and isinstance(here, dict):
        here[change.name] = copy.deepcopy(change.value)
    elif change.operation == "add" and isinstance(here, list):
        here.append(copy.deepcopy(change.value))
    elif change.operation == "rename" and isinstance(owner, dict):
        owner[change.name] = owner.pop(key)
    elif change.operation == "wrap":
        owner[key] = [here]
    elif change.operation == "swap":
        other, place = places[(change.place * 7 + 3) % len(places)]
        owner[key] = copy.deepcopy(other[place])
    elif change.operation == "repeat" and isinstance(here, list):
        here.extend(copy.deepcopy(here) * 50)
    else:
        owner[key] = copy.deepcopy(change.value)


def as_json(document: Any) -> bytes:
    """The document as JSON, with what is :class:`Raw` in it as it is. Lone surrogates become three bytes."""
    return _write(document, json.dumps, ": ").encode("utf-8", "surrogatepass")


def as_toml(document: Any) -> bytes:
    """The same as TOML: a line for every key, tables inline."""
    if not isinstance(document, dict):
        return _write(document, _toml_scalar, " = ").encode("utf-8", "surrogatepass")
    lines = [f"{_toml_key(name)} = {_write(item, _toml_scalar, ' = ')}\n" for name, item in document.items()]
    return "".join(lines).encode("utf-8", "surrogatepass")


def _toml_key(name: str) -> str:
    plain = bool(name) and all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in name)
    return name if plain else json.dumps(name)


def _toml_scalar(item: Any) -> str:
    if isinstance(item, float):
        return {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(json.dumps(item), repr(item))
    return json.dumps(item, ensure_ascii=False) if isinstance(item, str) else json.dumps(item)


def _write(item: Any, scalar: Callable[[Any], str], colon: str) -> str:
    if isinstance(item, Raw):
        return item.text
    if isinstance(item, dict):
        inside = (f"{json.dumps(name)}{colon}{_write(part, scalar, colon)}" for name, part in item.items())
        return "{" + ", ".join(inside) + "}"
    if isinstance(item, (list, tuple)):
        return "[" + ", ".join(_write(part, scalar, colon) for part in item) + "]"
    return scalar(item)


@dataclass(frozen=True)
class Cut:
    """One change of bytes: ``length`` of them at a place, given in thousandths of the whole, become ``data``."""

    place: int
    length: int
    data: bytes


_CHUNKS = (b"", b"\0", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x1b[31m", b"{", b"}", b"[", b'"', b"\\", b"\r", b"\n")
cuts = st.builds(
    Cut,
    st.integers(0, 1000),
    st.sampled_from([0, 1, 1, 2, 8, 100, 10**6]),
    st.sampled_from(_CHUNKS) | st.binary(max_size=4),
)


def cut(content: bytes, made: Sequence[Cut]) -> bytes:
    """``content`` with these changes of bytes."""
    for change in made:
        place = len(content) * change.place // 1000
        content = content[:place] + change.data + content[place + change.length :]
    return content


def bytes_of(documents: st.SearchStrategy[bytes], most: int = 2) -> st.SearchStrategy[bytes]:
    """The second layer: three of four are left as they are."""
    return st.builds(cut, documents, mostly(st.just([]), st.lists(cuts, min_size=1, max_size=most), 3))
