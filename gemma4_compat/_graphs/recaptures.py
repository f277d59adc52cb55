"""How steps were run, and why a graph is captured again, in words for people."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

#: How many are kept with their details.
LAST = 8
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


@dataclass
class DecodingStatistics:
    """How the one-token steps of a model were run, and its prompts after ``decode_fast``.

    Attributes:
        replayed: replayed steps, including the captured ones.
        captured: graphs that were captured.
        eager: steps that ran without a graph: the first of each kind, and those that could not be captured.
        fused: graphs that were captured again with fused kernels.
        capture_seconds: time that captures took, including fused ones and waiting for their kernels.
        reasons: why steps ran without a graph, other than the first of each kind, or a text without drafts.
        not_fused: why graphs stayed as they were captured, or PyTorch's kernels replace those of ``decode_fast``.
        recaptures: why graphs that were there did not serve a step, so that it needed another: how often each cause.
        last_recaptures: the last eight of them, the newest at the end, with what has changed.
        prompts_replayed: forwards of prompts, or of chunks of them, that were replayed, including the captured ones.
        prompts_captured: graphs that were captured for them.
        prompts_fused: those that were captured again with fused kernels.
        prompts_in_chunks: how often memory was too short for a prompt that is read at once, or for a larger chunk.
        prompt_tokens_read: after ``reuse_prefix``, tokens of prompts that were read.
        prompt_tokens_reused: those that the cache of the call before held.
        not_reused: why prompts were read from their beginning: how often each reason.
        rounds: forwards that read the newest token and drafts (``decode_fast(assistants=True)``); the first ones of a
            text have none.
        drafted: tokens that an assistant model, or prompt lookup, drafted for them.
        accepted: those among them that were right.
    """

    replayed: int = 0
    captured: int = 0
    eager: int = 0
    fused: int = 0
    capture_seconds: float = 0.0
    reasons: tuple[str, ...] = ()
    not_fused: tuple[str, ...] = ()
    recaptures: dict[Cause, int] = field(default_factory=dict)
    last_recaptures: tuple[Recapture, ...] = ()
    prompts_replayed: int = 0
    prompts_captured: int = 0
    prompts_fused: int = 0
    prompts_in_chunks: int = 0
    prompt_tokens_read: int = 0
    prompt_tokens_reused: int = 0
    not_reused: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
