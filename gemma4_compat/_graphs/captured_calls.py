"""One store for everything that is captured: calls that come back with the same shapes.

Steps, prompts, drafts and the layers of training steps are such calls. A call runs eagerly until it comes for the
``capture_at``-th time with the same signature. Then it is captured, and replayed from then on, until ``limit`` others
were used since.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from gemma4_compat._engine.io import terminal
from gemma4_compat._graphs.recording import RECORDERS, Recording
from gemma4_compat._graphs.statistics import Recapture

_CAPTURING = "capturing a CUDA graph, which later tokens, prompts or training steps replay"
#: Signatures that are remembered, and evicted calls.
REMEMBERED = 64


class Seen(NamedTuple):
    """How often calls of a signature ran eagerly, and the layout of the last one's cache."""

    times: int
    layout: Any


@dataclass
class Known:
    """What a store knows of calls while a model is as it is.

    Attributes:
        graphs: captured calls, the least recently used first.
        seen: signatures that ran eagerly, the last one at the end.
        refused: what cannot be captured.
        captured: signatures that were captured, with the length of their cache.
        evicted: addresses and signatures of those that made room for others.
    """

    graphs: list[Any] = field(default_factory=list)
    seen: dict[Any, Seen] = field(default_factory=dict)
    refused: set[Any] = field(default_factory=set)
    captured: dict[Any, int] = field(default_factory=dict)
    evicted: collections.deque[Any] = field(default_factory=functools.partial(collections.deque, maxlen=REMEMBERED))

    def find(self, call: Call) -> Any:
        """The captured call that serves this one, or None."""
        for graph in reversed(self.graphs):
            if graph.signature == call.signature and (graph.addresses == call.addresses or call.is_served_by(graph)):
                return graph
        return None


class State:
    """A model as it is: with these weights, hooks and adapters.

    Args:
        guards: say whether it still is.

    Attributes:
        calls: of each store.
        notes: what others know of the model.
    """

    def __init__(self, guards: Any) -> None:
        self.guards = guards
        self.calls: collections.defaultdict[CapturedCalls, Known] = collections.defaultdict(Known)
        self.notes: dict[Any, Any] = {}


class Guards(Protocol):
    """Says which state a model is in. ``states``: those that are remembered, the last one first."""

    states: list[State]

    def check(
        self, call: Any, *, first: bool = False, settling: bool = False, no_user_code: bool | None = None
    ) -> State | None:
        """The state of the model of a call now; None if nothing is to be captured.

        ``first``: also look at what rarely changes. ``settling``: the first call of its signature has just run.
        ``no_user_code``: no code but libraries' has run since the last look; None if the call knows.
        """

    def rest_holds(self, call: Any) -> bool:
        """Whether the model is in the last state, whose memory was looked at already."""


class Call:
    """A call that may be captured: what it shares with other calls, and how it is captured and replayed.

    Attributes:
        signature: hashable; calls with the same one run the same kernels on tensors of the same shapes.
        refused_as: what cannot be captured if this call cannot: calls with this signature, or more.
        addresses: of the memory that it reads and writes beside its inputs. A captured call serves one memory.
        device: of its tensors.
    """

    signature: Any
    refused_as: Any
    addresses: Any
    device: Any

    def is_served_by(self, graph: Any) -> bool:
        """Whether a captured call with this signature and other addresses serves this one."""
        return False

    def begins(self, known: Known) -> bool:
        """Whether it may be replayed; what it needs for that is done then."""
        return True

    def has_settings(self) -> bool:
        """Whether what its signature says of the process still holds."""
        return True

    def recapture(self, known: Known) -> Recapture | None:
        """Why no captured call serves it; None if that is nothing to report."""
        return None

    def unsupported(self, known: Known) -> str | None:
        """Why it cannot be captured."""
        return None

    def has_room(self, known: Known) -> bool:
        """Whether there is room to capture it."""
        return True

    def capture(self, pool: Any) -> Any:
        """Capture it without running it: what :meth:`replay` takes, with ``signature`` and ``addresses``."""
        raise NotImplementedError

    def replay(self, graph: Any, *, prepared: bool = False) -> Any:
        """Replay it, and return its outputs; ``prepared``: the graph has its inputs, or has begun."""
        raise NotImplementedError

    def note(self, reason: str | BaseException) -> None:
        """Record why it is not captured."""

    def starts(self, known: Known, graph: Any) -> bool:
        """Launch a graph that may turn out not to serve it. False, and nothing has run, if that is not to be tried."""
        return False

    def take_back(self) -> None:
        """Undo :meth:`starts`."""

    def layout(self) -> Any:
        """What its cache has, after it ran eagerly."""
        return None

    def was_captured(self, known: Known) -> None:
        """Note what later calls are compared with."""


class Pool:
    """The memory that the recordings of a store share: no two of them are replayed at the same time.

    Args:
        recorders: by device type.
        measured: whether to know how much it takes.

    Attributes:
        handle: as recordings take it.
        nbytes: what it takes, if ``measured``.
    """

    def __init__(self, recorders: Mapping[str, type[Recording]] = RECORDERS, *, measured: bool = False) -> None:
        self.handle: Any = None
        self.nbytes = 0
        self._recorders, self._measured = recorders, measured

    def renew(self, device: Any) -> None:
        """Begin anew, where no graph holds the memory."""
        self.handle, self.nbytes = self._recorders[device.type].new_pool(), 0

    def release(self) -> None:
        """Let the memory go."""
        self.handle, self.nbytes = None, 0

    @contextlib.contextmanager
    def growing(self, device: Any) -> Iterator[None]:
        """Inside, recordings are made, on this device."""
        before = _unused(device) if self._measured else 0
        yield
        if self._measured:
            self.nbytes += max(_unused(device) - before, 0)


def _unused(device: Any) -> int:
    """Bytes that PyTorch's allocator keeps from the GPU and no tensor has, without what is only cached."""
    import torch

    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


class CapturedCalls:
    """Calls that come back with the same shapes: counted, captured, replayed, evicted.

    Args:
        guards: of the model.
        capture_at: the call of a signature that is captured.
        limit: captured calls, over all states of the model. The least recently used one goes first.
        pool: their memory.
        statistics: counts them.
    """

    def __init__(self, guards: Guards, *, capture_at: int, limit: int, pool: Pool, statistics: Any) -> None:
        self.pool, self.statistics = pool, statistics
        self.limit = limit
        self._guards, self._capture_at, self._paused = guards, capture_at, False

    def run(self, call: Call, *, first: bool = False) -> Any:
        """Replay a call, captured before if it is time for that; None, and nothing has run, if it has to run eagerly.

        ``first``: nothing was replayed yet in this call of the whole model.
        """
        state = self._guards.check(call, first=first)
        if state is None:
            return None
        known = state.calls[self]
        if call.refused_as in known.refused or not call.begins(known):
            return None
        graph = known.find(call) or self._captured(call, known)
        return None if graph is None else self._replayed(call, known, graph)

    def again(self, call: Call, graph: Any, *, prepared: bool = False, no_user_code: bool | None = None) -> Any:
        """Replay a call that was replayed before, with other tensors; None if its graph does not serve it any more.

        ``no_user_code``: as for :meth:`Guards.check`.
        """
        state = self._guards.check(call, no_user_code=no_user_code)
        known = None if state is None else state.calls[self]
        if known is None or graph not in known.graphs or not call.has_settings():
            return None
        return self._replayed(call, known, graph, prepared=prepared)

    def _replayed(self, call: Call, known: Known, graph: Any, *, prepared: bool = False) -> Any:
        if graph is not known.graphs[-1]:
            known.graphs.remove(graph)
            known.graphs.append(graph)
        outputs = call.replay(graph, prepared=prepared)
        self.statistics.replayed += 1
        return outputs

    def run_ahead(self, call: Call) -> Any:
        """Replay a call after a look at the memory that its graph reads, and at the rest while the device computes.

        None if no graph is known, or if something has changed: then everything is as it was.
        """
        state = next(iter(self._guards.states), None)
        if state is None:
            return None
        known = state.calls[self]
        graph = known.find(call)
        if graph is None or not state.guards.check_memory() or not call.starts(known, graph):
            return None
        if self._guards.rest_holds(call):
            return self._replayed(call, known, graph, prepared=True)
        call.take_back()
        return None

    def has_run(self, call: Call) -> int:
        """Note a call that has run eagerly. How often calls with its signature have; 0 if they cannot be captured."""
        state = self._guards.check(call, settling=True)
        known = None if state is None else state.calls[self]
        if known is None or call.refused_as in known.refused:
            return 0
        times: int = known.seen.pop(call.signature, Seen(0, None)).times + 1
        known.seen[call.signature] = Seen(times, call.layout())
        if len(known.seen) > REMEMBERED:
            del known.seen[next(iter(known.seen))]
        return times

    def may_serve(self, call: Call) -> bool:
        """Whether a look at the model is worth it: such a call ran before, and nothing is paused."""
        for state in self._guards.states:
            if call.signature in state.calls[self].seen:
                return not self._paused
        return False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, :meth:`may_serve` is False."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def refuses(self, call: Call) -> bool:
        """Whether such calls cannot be captured, in the state that the model was last in."""
        state = next(iter(self._guards.states), None)
        return state is not None and call.refused_as in state.calls[self].refused

    def graph_of(self, call: Call) -> Any:
        """What the call was replayed with just now; None if it ran eagerly."""
        state = next(iter(self._guards.states), None)
        return None if state is None else state.calls[self].find(call)

    def graphs(self) -> Iterator[Any]:
        """All that are captured."""
        for state in self._guards.states:
            yield from state.calls[self].graphs

    @property
    def nbytes(self) -> int:
        """What their pool takes."""
        return int(self.pool.nbytes) if any(self.graphs()) else 0

    def drop(self, is_over: Callable[[Any], bool]) -> None:
        """Release those of which this is true."""
        for state in self._guards.states:
            known = state.calls[self]
            known.graphs = [graph for graph in known.graphs if not is_over(graph)]

    def release(self) -> bool:
        """Release all, and their pool. False if there are none."""
        found = any(self.graphs())
        self.drop(lambda _: True)
        self.pool.release()
        return found

    def _captured(self, call: Call, known: Known) -> Any:
        """Capture a call without running it; None, with nothing changed, if it is not the time or not possible."""
        recapture = call.recapture(known)
        if recapture is not None:
            self.statistics.note(recapture)
        reason = call.unsupported(known)
        if reason is not None:
            self._refuse(call, known, reason)
            return None
        if known.seen.get(call.signature, Seen(0, None)).times + 1 < self._capture_at:
            return None
        if not call.has_room(known):
            return None
        self._evict()
        begun = time.perf_counter()
        try:
            if not any(self.graphs()):
                self.pool.renew(call.device)
            with self.pool.growing(call.device), terminal.explained(_CAPTURING):
                graph = call.capture(self.pool)
        except Exception as error:  # noqa: BLE001  # whatever it is, the call can run eagerly
            self._refuse(call, known, error)
            return None
        self.statistics.captured += 1
        self.statistics.capture_seconds += time.perf_counter() - begun
        known.graphs.append(graph)
        call.was_captured(known)
        return graph

    @staticmethod
    def _refuse(call: Call, known: Known, reason: str | BaseException) -> None:
        known.refused.add(call.refused_as)
        call.note(reason)

    def _evict(self) -> None:
        while len(list(self.graphs())) >= self.limit:
            oldest = next(state for state in reversed(self._guards.states) if state.calls[self].graphs)
            known = oldest.calls[self]
            gone = known.graphs.pop(0)
            known.evicted.append((gone.addresses, gone.signature))
