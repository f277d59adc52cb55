"""Graphs of a layer with fused kernels, which are kept where a replay has the bits of PyTorch's kernels.

If a layer of these shapes was fused before, here or in an earlier process, its kernels are known (:mod:`noted`): the
layer is captured once, with them. Otherwise it is captured as it is, and again when its kernels are compiled.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._graphs import fused_steps, unsupported
from gemma4_compat._graphs.recording import Recording
from gemma4_compat._graphs.statistics import TrainingStatistics
from gemma4_compat._kernels import noted
from gemma4_compat._kernels.kernels import StillCompiling
from gemma4_compat._kernels.kernels import of as kernels_of

#: Whether graphs are fused. A benchmark turns it off.
ENABLED = True
#: What a layer's notes say that it was fused for.
KIND = "training"
#: How far gradients may be from PyTorch's, of the distance between two replays of PyTorch's kernels, if these differ.
APART = 2.0


@dataclass(frozen=True)
class Pass:
    """A pass through a layer, forward or backward, which can be captured any number of times.

    Attributes:
        capture: captures it, within something.
        written: the tensors that it writes.
        layer: whose it is.
        weights: of the layer, that are trained.
    """

    capture: Callable[[fused_steps.Within], Recording]
    written: Sequence[Any]
    layer: Any
    weights: Sequence[Any]


class Replays:
    """The graph of a pass, and a fused one, until a replay has compared them.

    Args:
        recording: what is replayed.
        written: the tensors that it writes.
        is_settled: whether nothing more is to be captured.
    """

    def __init__(self, recording: Recording, written: Sequence[Any], *, is_settled: bool = False) -> None:
        self.is_settled = is_settled
        self._recording, self._written = recording, written
        self._candidate: tuple[Recording, Callable[[str | None], None]] | None = None

    def replay(self) -> None:
        """Replay the graph; once also the fused one, if there is one."""
        self._recording.replay()
        if self._candidate is None:
            return
        (candidate, note), self._candidate = self._candidate, None
        before = self._copies()
        candidate.replay()
        found = self._copies()
        if not all(map(same_bits, found, before)):
            self._recording.replay()
            if not all(map(_is_as_near, found, before, self._written)):
                note("a fused layer differs bitwise")
                return
        self._recording = candidate
        note(None)

    def offer(self, candidate: Recording, note: Callable[[str | None], None]) -> None:
        """Compare the next replay with this one. ``note`` is told why it is not kept, or None."""
        self._candidate, self.is_settled = (candidate, note), True

    def _copies(self) -> list[Any]:
        return [one.clone() for one in self._written]


def _is_as_near(found: Any, before: Any, again: Any) -> bool:
    """Whether what fused kernels have written is as near to what PyTorch's have as that is to their next replay: the
    same bits, unless attention adds gradients up in another order each time.
    """
    apart, usual = ((one.double() - before.double()).norm() for one in (found, again))
    return same_bits(found, before) or bool(apart <= APART * usual)


def _unsupported_reason(device: Any, one: Pass) -> str | None:
    return fused_steps.unsupported_reason(device) or unsupported.foreign_reason(one.layer)


class Fusing:
    """Fuses the graphs of a model's layers.

    Args:
        statistics: counts what is fused, and keeps why something is not.
    """

    def __init__(self, statistics: TrainingStatistics) -> None:
        self._statistics = statistics
        self._awaited: list[Future[Any]] = []

    def captured(self, device: Any, one: Pass, has_the_bits: Callable[[Recording], bool]) -> Replays:
        """The graph of a pass, fused if its kernels are known.

        Args:
            device: ``torch.device`` with an index.
            one: the pass.
            has_the_bits: replays a recording, and compares what it writes with a pass without a graph.
        """
        candidate = None
        may_be_known = ENABLED and _unsupported_reason(device, one) is None
        if may_be_known and kernels_of(device).recall(noted.shapes_of(one.layer), KIND):
            with contextlib.suppress(StillCompiling):
                candidate = self._recorded(device, one)
        if candidate is not None and has_the_bits(candidate[0]):
            candidate[1](None)
            return Replays(candidate[0], one.written, is_settled=True)
        found = Replays(one.capture(contextlib.nullcontext), one.written)
        if candidate is not None:
            found.offer(*candidate)
        return found

    def attempt(self, device: Any, several: Sequence[tuple[Replays, Pass]]) -> None:
        """Capture passes again, unless kernels are being compiled."""
        if not ENABLED or any(not one.done() for one in self._awaited):
            return
        begun, self._awaited = time.perf_counter(), []
        for replays, one in several:
            if replays.is_settled:
                continue
            reason = _unsupported_reason(device, one)
            if reason is not None:
                replays.is_settled = True
                self._note(reason)
                continue
            try:
                candidate = self._recorded(device, one)
            except StillCompiling as error:
                self._awaited += error.futures
                continue
            replays.is_settled = True
            if candidate is not None:
                replays.offer(*candidate)
        self._statistics.capture_seconds += time.perf_counter() - begun

    def _recorded(self, device: Any, one: Pass) -> tuple[Recording, Callable[[str | None], None]] | None:
        """The fused recording, and what to tell about it; None if that is not possible."""
        try:
            recording, texts = fused_steps.recorded(device, one.capture, one.weights)
        except StillCompiling:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the graph stays as it is
            first, *_ = str(error).split("\n")
            self._note(f"{type(error).__name__}: {first}")
            return None

        def note(reason: str | None) -> None:
            shapes, kernels = noted.shapes_of(one.layer), kernels_of(device)
            if reason is None:
                kernels.note(shapes, KIND, texts)
            else:
                kernels.forget(shapes)
            self._note(reason)

        return recording, note

    def _note(self, reason: str | None) -> None:
        if reason is None:
            self._statistics.fused += 1
        elif reason not in self._statistics.not_fused:
            self._statistics.not_fused += (reason,)
