"""What is kept of captured steps and prompts."""

from __future__ import annotations

import collections
import weakref
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._graphs import fused_steps
from gemma4_compat._graphs.guards.model import ModelGuards
from gemma4_compat._graphs.recording import Recording

#: Graphs, and sets of adapters, that are remembered as evicted.
REMEMBERED = 64


@dataclass
class Graph:
    """One captured step, or one captured forward of a prompt."""

    recording: Recording
    static: dict[str, Any]  # the inputs that it reads, except the cache, which it must not keep alive
    inputs: list[Any]  # the tensors in them
    outputs: Any  # from steps.kept
    progress: fused_steps.Progress = field(default_factory=fused_steps.Progress)


@dataclass
class Variant:
    """The model with one set of active adapters."""

    guards: ModelGuards
    graphs: collections.OrderedDict[Any, Graph] = field(default_factory=collections.OrderedDict)
    seen: set[Any] = field(default_factory=set)  # kinds of steps that have run once
    refused: set[Any] = field(default_factory=set)  # kinds of steps that could not be captured
    captured: dict[Any, int] = field(default_factory=dict)  # kinds that were, and the positions of their caches
    evicted: collections.deque[Any] = field(default_factory=lambda: collections.deque(maxlen=REMEMBERED))
    prompts: collections.OrderedDict[Any, Graph] = field(default_factory=collections.OrderedDict)
    read: collections.OrderedDict[Any, Any] = field(default_factory=collections.OrderedDict)  # kinds of prompts
    prompts_refused: bool = False  # they cannot be captured
    submodels: list[weakref.ref[Any]] | None = None  # of transformers, once they have been looked for
    tried: dict[Any, bool] = field(default_factory=dict)  # rounds, and whether they have the bits of single tokens
