"""How calls were run, and why a graph is captured again, in words for people."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

#: How many recaptures are kept with their details.
LAST = 8
_LONGEST, _NAMED = 200, 3  # characters of a detail, and names in it
_log = logging.getLogger("gemma4_compat")


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
        also: the other causes, if several things had changed by then, each with its detail.
    """

    cause: Cause
    detail: str
    also: tuple[str, ...] = ()

    @classmethod
    def of(cls, differences: Iterable[tuple[Cause, str]]) -> Recapture:
        """Why a graph is captured again, from causes and details; without any, nobody knows what has changed."""
        found: dict[Cause, dict[str, None]] = {}
        for cause, detail in differences:
            found.setdefault(cause, {})[detail] = None
        causes = [(cause, _listed(list(details))) for cause, details in found.items()] or [(Cause.ATTRIBUTE, "")]
        return cls(*causes[0], also=tuple(str(cls(*other)) for other in causes[1:]))

    def __str__(self) -> str:
        own = f"{self.cause}: {self.detail}" if self.detail else str(self.cause)
        return "; ".join((own, *self.also))


def _listed(details: list[str]) -> str:
    """The first of them, as many as are short enough, and how many more there are."""
    for count in range(min(len(details), _NAMED), 0, -1):
        shown = ", ".join(details[:count])
        more = f" and {len(details) - count} more" if len(details) > count else ""
        if len(shown) + len(more) <= _LONGEST:
            break
    return f"{shown[: _LONGEST - len(more)]}{more}"


@dataclass
class Statistics:
    """How calls were run, in numbers and reasons."""

    replayed: int = 0
    captured: int = 0
    eager: int = 0
    capture_seconds: float = 0.0
    reasons: tuple[str, ...] = ()

    def add_reason(self, reason: str) -> bool:
        """Note why calls run without a graph. Returns whether the reason is new."""
        new = reason not in self.reasons
        if new:
            self.reasons += (reason,)
        return new


@dataclass
class TrainingStatistics(Statistics):
    """How the decoder layers of a model ran in training steps, after ``train_fast``.

    Attributes:
        replayed: forwards of layers that were replayed.
        captured: layers that were captured, once for each kind of call.
        eager: forwards that ran without a graph.
        capture_seconds: time that captures took.
        reasons: why layers ran without a graph, other than before their kind of call was captured.
        fused: graphs with fused kernels: each layer has one of its forward pass and one of its backward pass.
        not_fused: why others have PyTorch's kernels.
    """

    fused: int = 0
    not_fused: tuple[str, ...] = ()


@dataclass
class DecodingStatistics(Statistics):
    """How the one-token steps of a model were run, and its prompts after ``decode_fast``.

    Attributes:
        replayed: replayed steps, including the captured ones.
        captured: graphs that were captured.
        eager: steps that ran without a graph: the first of each kind, and those that could not be captured.
        capture_seconds: time that captures took, including fused ones and waiting for their kernels.
        reasons: why steps ran without a graph, other than the first of each kind, or a text without drafts.
        fused: graphs that were captured again with fused kernels.
        not_fused: why graphs stayed as they were captured, or PyTorch's kernels replace those of ``decode_fast``.
        recaptures: why graphs that were there did not serve a step, so that it needed another: how often each cause,
            of several the first.
        last_recaptures: the last eight of them, the newest at the end, with what has changed.
        prompts_replayed: forwards of prompts, or of chunks of them, that were replayed, including the captured ones.
        prompts_captured: graphs that were captured for them.
        prompts_fused: those that were captured again with fused kernels.
        prompts_in_chunks: how often memory was too short for a prompt that is read at once, or for a larger chunk.
        prompt_tokens_read: after ``decode_fast(reuse_prefix=True)``, tokens of prompts that were read.
        prompt_tokens_reused: those that the cache of the call before held.
        not_reused: why prompts were read from their beginning: how often each reason.
        rounds: forwards that read the newest token and drafts (``decode_fast(assistants=True)``); the first ones of a
            text have none.
        drafted: tokens that an assistant model, or prompt lookup, drafted for them.
        accepted: those among them that were right.
        heads_in_two_stages: calls of ``generate`` after ``decode_fast`` in which only the best words' logits were
            computed from the head itself.
        whole_heads: those in which the logits of all words were: how often each reason.
        head_tokens: tokens of the former, since the copy of the head that they read has its place.
        head_words: logits that were computed for them.
        experts_kept: experts of layers in host memory that a step needed and the card still had, since it has room for
            so many of them.
        experts_brought: those that were read over the bus to the card.
    """

    fused: int = 0
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
    heads_in_two_stages: int = 0
    whole_heads: dict[str, int] = field(default_factory=dict)
    head_tokens: int = 0
    head_words: int = 0
    experts_kept: int = 0
    experts_brought: int = 0

    def note(self, found: Recapture) -> None:
        """Count why a step needs another graph, if it had one."""
        if self.captured:
            self.recaptures = {**self.recaptures, found.cause: self.recaptures.get(found.cause, 0) + 1}
            self.last_recaptures = (*self.last_recaptures, found)[-LAST:]
            _log.debug("gemma4_compat: another CUDA graph: %s", found)


def _as(name: str) -> Any:
    return property(lambda self: getattr(self.whole, name), lambda self, value: setattr(self.whole, name, value))


class PromptStatistics:
    """The numbers of prompts in the statistics of a model, under the names of :class:`Statistics`."""

    replayed, captured, fused = _as("prompts_replayed"), _as("prompts_captured"), _as("prompts_fused")
    capture_seconds = _as("capture_seconds")

    def __init__(self, whole: DecodingStatistics) -> None:
        self.whole = whole
