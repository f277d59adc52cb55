"""Why a graph is captured again, in words for people."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

_LONGEST = 200  # characters of a detail


class Cause(str, enum.Enum):
    """Why the graphs that a model has do not serve a step. docs/DECODING.md has a line on each."""

    # the model
    WEIGHT = "a weight changed"
    ADAPTER = "the adapters changed"
    MODULE = "a module was replaced"
    ATTRIBUTE = "an attribute changed"
    CODE = "a function or a class changed"
    CONFIGURATION = "the configuration changed"
    TRAINING = "training mode changed"
    HOOK_ADDED = "a hook was added"
    HOOK_REMOVED = "a hook was removed"
    OFFLOADING = "offloading changed"
    # the call
    OPTION = "an option of generate changed"
    SHAPE = "the shapes of the inputs changed"
    CACHE_LENGTH = "a cache of another length"
    CACHE = "another cache"
    WINDOW = "the sliding windows are full or no longer full"
    SETTING = "a setting of torch changed"
    # what is kept
    EVICTED = "too many graphs"
    MEMORY = "memory was short"
    TURNED_OFF = "decode_fast was turned off"

    __str__ = str.__str__


@dataclass(frozen=True)
class Recapture:
    """One of them.

    Attributes:
        cause: see :class:`Cause`.
        detail: the module, the weight, the option; at most 200 characters. It may be empty.
    """

    cause: Cause
    detail: str

    @classmethod
    def of(cls, differences: Iterable[tuple[Cause, str]]) -> Recapture:
        """The first difference, and how many more there are of the same cause.

        Args:
            differences: causes and details; without any, nobody knows what has changed.
        """
        found = list(differences) or [(Cause.ATTRIBUTE, "")]
        cause, detail = found[0]
        others = len({other for kind, other in found if kind is cause}) - 1
        more = f" and {others} more" if others else ""
        return cls(cause, f"{detail[: _LONGEST - len(more)]}{more}")
