"""What a model keeps of its captured forwards, and how it counts them."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._decoding.dependencies import Dependencies
from gemma4_compat._decoding.recaptures import Cause, Recapture
from gemma4_compat._decoding.recording import Recording

#: Graphs, and sets of adapters, that are remembered as evicted.
REMEMBERED = 64


@dataclass
class DecodingStatistics:
    """How the one-token steps of a model were run, and its prompts after ``decode_fast``.

    Attributes:
        replayed: replayed steps, including the captured ones.
        captured: graphs that were captured.
        eager: steps that ran without a graph: the first of each kind, and those that could not be captured.
        fused: graphs that were captured again with fused kernels.
        capture_seconds: time spent on all captures, including fused ones and compiling their kernels.
        reasons: why steps ran without a graph, other than the first of each kind.
        not_fused: why graphs stayed as they were captured, or PyTorch's kernels replace those of ``decode_fast``.
        recaptures: why graphs that were there did not serve a step, so that it needed another: how often each cause.
        last_recaptures: the last eight of them, the newest at the end, with what has changed.
        prompts_replayed: forwards of prompts, or of chunks of them, that were replayed, including the captured ones.
        prompts_captured: graphs that were captured for them.
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


@dataclass
class Graph:
    """One captured step, or one captured forward of a prompt."""

    recording: Recording
    static: dict[str, Any]  # the inputs that it reads, except the cache, which it must not keep alive
    inputs: list[Any]  # the tensors in them
    outputs: Any  # from steps.kept
    replays: int = 0  # until it is fused, or known not to be fusible


@dataclass
class Variant:
    """The model with one set of active adapters."""

    dependencies: Dependencies
    graphs: collections.OrderedDict[Any, Graph] = field(default_factory=collections.OrderedDict)
    seen: set[Any] = field(default_factory=set)  # kinds of steps that have run once
    refused: set[Any] = field(default_factory=set)  # kinds of steps that could not be captured
    captured: dict[Any, int] = field(default_factory=dict)  # kinds that were, and the positions of their caches
    evicted: collections.deque[Any] = field(default_factory=lambda: collections.deque(maxlen=REMEMBERED))
    prompts: collections.OrderedDict[Any, Graph] = field(default_factory=collections.OrderedDict)
    read: collections.OrderedDict[Any, Any] = field(default_factory=collections.OrderedDict)  # kinds of prompts
    prompts_refused: bool = False  # they cannot be captured
