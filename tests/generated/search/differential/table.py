"""What is called: a table of calls, each crossed with the places and the kinds of model that it is tried on.

A call is a function of a :class:`~tests.generated.search.differential.world.World`. What it returns (tensors,
numbers, words, or containers of them) is what a user sees of it. The right value is that of the same call on one
device without the package. Where upstream is wrong there too, the call returns an :class:`Expect`, which says what is
right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

#: Everything on one device; some layers and the towers in host memory or on disk; embeddings and head in host memory.
PLACES = ("one", "ram", "disk")
EVERYWHERE = (*PLACES, "embeddings")

#: By name: the variant of the workspace, its quantization, its adapter. "-text" is the class for text alone.
KINDS: dict[str, tuple[str | None, str | None, str | None]] = {
    "E2B": (None, None, None),
    "E2B-lora": (None, None, "language"),
    "E2B-towers": (None, None, "all"),
    "E2B-4bit": (None, "4bit", None),
    "E2B-4bit-lora": (None, "4bit", "language"),
    "E2B-8bit": (None, "8bit", None),
    "E2B-8bit-lora": (None, "8bit", "language"),
    "E2B-text": (None, None, None),
    "E2B-text-lora": (None, None, "text"),
    "12B": ("12B", None, None),
    "12B-lora": ("12B", None, "language"),
    "12B-4bit": ("12B", "4bit", None),
    "26B": ("26B-A4B", None, None),
    "26B-lora": ("26B-A4B", None, "language"),
    "31B": ("31B", None, None),
    "31B-lora": ("31B", None, "language"),
}

#: Families of kinds, for calls.
PLAIN = ("E2B",)
CLASSES = ("E2B", "E2B-text", "12B")
LORA = ("E2B-lora",)
LORAS = ("E2B-lora", "E2B-4bit-lora", "12B-lora")
QUANTIZED = ("E2B-4bit", "E2B-8bit")
WEIGHTS = ("E2B", "E2B-4bit", "E2B-8bit")
ALL = ("E2B", "E2B-lora", "E2B-4bit", "E2B-8bit", "E2B-text", "12B", "26B")


class NotHereError(Exception):
    """The call does not exist in this release, or makes no sense for this kind."""


@dataclass
class Expect:
    """What was found, and what is right by the call's own word."""

    found: Any
    right: Any


@dataclass(frozen=True)
class Call:
    """A call, and what it is crossed with.

    Attributes:
        name: ``area/function[variant]``.
        function: of the world and ``options``.
        options: what the variant passes.
        places: of :data:`EVERYWHERE`.
        kinds: keys of :data:`KINDS`.
        tolerance: how far numbers may be from the right ones.
    """

    name: str
    function: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    places: tuple[str, ...] = PLACES
    kinds: tuple[str, ...] = PLAIN
    tolerance: float = 0.0

    @property
    def about(self) -> str:
        """The function's first sentence, or its name in words."""
        text = inspect.getdoc(self.function) or self.function.__name__.strip("_").replace("_", " ")
        return text.partition("\n\n")[0].replace("\n", " ").rstrip(".")


@dataclass(frozen=True)
class Entry:
    """A call in a place on a kind of model; its name is ``area/function[variant] place kind``."""

    call: Call
    place: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.call.name} {self.place} {self.kind}"


#: Every call, by name.
CALLS: dict[str, Call] = {}


class Area:
    """Registers the calls of an area: ``@area.call(...)`` on a function.

    ``variants`` are names of variants and the options of each.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def call(
        self, *, variants: dict[str, dict[str, Any]] | Iterable[str] | None = None, **attributes: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """``variants`` may be names only: the function is given each as its one argument."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            name = f"{self.name}/{function.__name__}"
            chosen = variants
            if chosen is not None and not isinstance(chosen, dict):
                argument = list(inspect.signature(function).parameters)[1]
                chosen = {variant: {argument: variant} for variant in chosen}
            for variant, options in ({"": {}} if chosen is None else chosen).items():
                full = f"{name}[{variant}]" if variant else name
                if full in CALLS:
                    raise ValueError(f"two calls are named {full!r}")
                CALLS[full] = Call(full, function, options, **attributes)
            return function

        return register


def entries() -> list[Entry]:
    """All of them, those of one kind beside each other: the first kind of a call in all its places, each other kind in
    one of them, another for each.
    """
    from tests.generated.search.differential import calls

    calls.load()
    found = []
    for number, call in enumerate(CALLS.values()):
        places = ("one", *(place for place in call.places if place != "one"))
        found += [Entry(call, place, call.kinds[0]) for place in places]
        found += [Entry(call, places[(number + i) % len(places)], kind) for i, kind in enumerate(call.kinds) if i]
    return sorted(found, key=lambda entry: (list(KINDS).index(entry.kind), EVERYWHERE.index(entry.place)))


def named(name: str) -> Entry:
    """The entry of a name, whether :func:`entries` has it or not."""
    from tests.generated.search.differential import calls

    calls.load()
    call, place, kind = name.rsplit(" ", 2)
    return Entry(CALLS[call], place, kind)
