"""Capture a captured step or prompt again, with fewer kernels, and keep it if a replay has the same bits.

The forward is captured with fused kernels. The first capture only shows which kernels are needed, and they are
compiled, in the background if that takes time. Then the first recording of the step and the fused one are replayed on
the same inputs and the same cache. If an output or the cache differs in a bit, the first recording stays.

Kernels that such a step needed before, here or in an earlier process, are known (:mod:`noted`). A step that decodes is
then captured once, with them (:func:`fused_at_once`), and compared with a forward without a graph.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._gemma4.quantization import expert_storage
from gemma4_compat._graphs import static_caches
from gemma4_compat._graphs.recording import Recording
from gemma4_compat._kernels.kernels import COMPILERS, Kernels, StillCompiling
from gemma4_compat._kernels.kernels import of as kernels_of
from gemma4_compat._kernels.specs import expert_rows

#: Captures: one to see which kernels are needed, one without the operations that were found to be inexact, one that
#: launches all kernels.
_CAPTURES = 4
_log = logging.getLogger("gemma4_compat")

#: Entered around a captured forward; it may provide a function to call before an event marks a point in a stream.
Within = Callable[[], contextlib.AbstractContextManager[Callable[[], None] | None]]
#: Captures the step within that, and returns the recording and the outputs.
Capture = Callable[[Within], tuple[Recording, Any]]
#: The tensors that a step may change, beside its output, as views.
Changes = Callable[[], list[Any]]


class NotFused(Exception):  # noqa: N818 (not an error: the plain step stays)
    """Why a step is not fused."""


class Progress:
    """When a graph is to be fused.

    Attributes:
        early: the replay in which a step is captured to see which kernels it needs. If they are on disk it is fused at
            once, else in the first replay after they were compiled in the background. Not sooner: captures take 1 to
            2 s, and a fused token of an E2B is 1 ms faster. On an H100 an answer of 48 tokens took 1.0 s, and 2.7 s if
            fused in its 8th replay.
        after: the replay in which it is fused at the latest: that waits for the compiler.
    """

    early, after = 96, 192

    def __init__(self) -> None:
        self._replays = 0
        self._awaited: list[Future[Any]] | None = []  # before the next attempt; None after the last one

    @classmethod
    def may_come(cls, replays: int) -> bool:
        """Whether a graph that is replayed so often would be fused."""
        return replays >= min(cls.early, cls.after)

    def is_due(self) -> bool:
        """Count a replay. Whether the graph is to be fused in this one; asked again only after :meth:`postpone`."""
        due = self.is_next
        self.count()
        if due:
            self._awaited = None
        return due

    @property
    def is_next(self) -> bool:
        """Whether the graph is to be fused in the next replay."""
        if self._awaited is None or self._replays + 1 < min(self.early, self.after):
            return False
        return self._replays + 1 >= self.after or not self.awaits

    def count(self) -> None:
        """Count a replay in which the graph cannot be fused."""
        self._replays += 1

    @property
    def waits(self) -> bool:
        """Whether this replay waits for the compiler."""
        return self._replays >= self.after

    @property
    def is_over(self) -> bool:
        """Whether the graph is fused, or never will be."""
        return self._awaited is None

    @property
    def awaits(self) -> bool:
        """Whether kernels for it are being compiled."""
        return not all(one.done() for one in self._awaited or ())

    def hasten(self) -> None:
        """Have it fused as soon as its kernels are there."""
        self._replays = max(self._replays, min(self.early, self.after))

    def end(self) -> None:
        """It is fused."""
        self._awaited = None

    def postpone(self, futures: list[Future[Any]]) -> None:
        """Until these are done."""
        self._awaited = futures


class _Launches:
    """A sink that launches kernels, and notes those that are not prepared yet."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.accepts = kernels.accepts
        self.launched: dict[str, None] = {}  # texts
        self.texts: dict[str, None] = {}  # of those that were not launched
        self.signatures: dict[tuple[Any, ...], None] = {}  # of the operations in them

    def kernel(self, kernel: Any, signatures: Iterable[tuple[Any, ...]]) -> None:
        if self._kernels.is_prepared(kernel.text):
            self._kernels.launch(kernel)
            self.launched[kernel.text] = None
            return
        self.texts[kernel.text] = None
        self.signatures |= dict.fromkeys(signatures)


def unsupported_reason(device: Any) -> str | None:
    """Why steps on this device cannot be fused; None if they can."""
    import torch

    compiler = COMPILERS.get(device.type)
    if compiler is None:
        return f"there are no kernels for {device.type}"
    if not hasattr(torch._C, "_storage_Use_Count"):
        return f"torch {torch.__version__} lacks torch._C._storage_Use_Count"
    return compiler.unsupported_reason()


@dataclass(frozen=True)
class Step:
    """What is to be fused.

    Attributes:
        device: ``torch.device`` with an index.
        changes: the tensors that it may change, beside its output, as views.
        capture: captures it.
        shapes: of its model (:func:`noted.shapes_of`).
        kind: what else decides which kernels it needs, in words.
        trained: of a layer of a training step (:mod:`on_demand`): the weights that are trained.
    """

    device: Any
    changes: Changes
    capture: Capture
    shapes: str = ""
    kind: str = ""
    trained: Sequence[Any] | None = None


def fused(step: Step, plain: Recording, outputs: Any, progress: Progress) -> tuple[Recording, Any] | None:
    """Replay the step once, and return how to replay it from now on; None, without a replay, if that has to wait.

    Args:
        step: captured already.
        plain: the step as it was first captured.
        outputs: its output.
        progress: of this graph.

    Returns:
        the fused recording and its output, which holds this step's result.

    Raises:
        NotFused: it cannot be done, or bits differ. The cache is as it was before.
        Exception: the fused step could not be captured. The cache is as it was before.
    """
    try:
        recording, found, texts = _captured(step, wait=progress.waits)
    except StillCompiling as error:
        progress.postpone(error.futures)
        return None

    def expected() -> list[Any]:
        plain.replay()
        return _copies(outputs)

    _compare(recording, found, step.changes, expected)
    kernels_of(step.device).note(step.shapes, step.kind, texts)
    return recording, found


def fused_at_once(step: Step, run: Callable[[], Any]) -> tuple[Recording, Any] | None:
    """Capture the step with kernels that are known. The cache is as it was before.

    Args:
        step: not captured yet.
        run: runs it without a graph, and returns its output.

    Returns:
        the recording and its output; None if the kernels are not known, or not all that it needs.

    Raises:
        NotFused: bits differ. What was known is forgotten.
        Exception: the step could not be captured, or run. What was known is forgotten, unless memory ran out.
    """
    import torch

    kernels = kernels_of(step.device)
    if not kernels.recall(step.shapes, step.kind):
        return None
    try:
        recording, found, texts = _captured(step, wait=False)
        before = _compare(recording, found, step.changes, lambda: _copies(run()))
    except StillCompiling:
        return None
    except torch.OutOfMemoryError:
        raise
    except Exception:
        kernels.forget(step.shapes)
        raise
    before.restore()
    kernels.note(step.shapes, step.kind, texts)
    return recording, found


def recorded(
    device: Any, capture: Callable[[Within], Recording], trained: Sequence[Any]
) -> tuple[Recording, list[str]]:
    """The fused recording of a pass through a layer of a training step, not compared yet, and its kernels' texts.

    Args:
        device: ``torch.device`` with an index.
        capture: captures it.
        trained: weights of the layer.

    Raises:
        StillCompiling: kernels are being compiled.
        NotFused: it cannot be done.
    """
    step = Step(device, list, lambda within: (capture(within), None), trained=trained)
    recording, _, texts = _captured(step, wait=False)
    return recording, texts


def _captured(step: Step, *, wait: bool) -> tuple[Recording, Any, list[str]]:
    """The fused recording, its output, and the texts of its kernels.

    Raises:
        StillCompiling: kernels are being compiled, and nobody is to ``wait``.
    """
    kernels = kernels_of(step.device)
    expert_rows.prepare(step.device)
    fusing = _fusing if step.trained is None else functools.partial(_fusing_on_demand, weights=step.trained)
    for _ in range(_CAPTURES):
        launches = _Launches(kernels)
        recording, found = step.capture(lambda: fusing(step.device, launches))  # noqa: B023 (it is called here)
        if not launches.texts:
            return recording, found, list(launches.launched)
        if not kernels.prepare(list(launches.texts), list(launches.signatures), wait=wait):
            _log.info("gemma4_compat: not fused, since bits would differ: %s", ", ".join(kernels.inexact()))
    raise NotFused("each capture of the step needs other kernels")


def _compare(
    recording: Recording, found: Any, changes: Changes, expected: Callable[[], list[Any]]
) -> static_caches.Snapshot:
    """Replay a recording, which has to have the bits that are expected. What its cache was before."""
    before = static_caches.Snapshot(changes())
    try:
        outputs, after = expected(), before.again()
        before.restore()
        recording.replay()
        if not _are_equal(_copies(found), outputs) or not after.holds():
            raise NotFused("a fused step differs bitwise")
    except BaseException:
        before.restore()
        raise
    return before


@contextlib.contextmanager
def _fusing(device: Any, sink: Any) -> Iterator[Callable[[], None]]:
    from gemma4_compat._kernels.match.fusing import Fusing

    mode = Fusing(device, sink, kernels_of(device).layouts)
    with mode, expert_storage.read_by(mode.rows):
        yield mode.flush
        mode.flush()


@contextlib.contextmanager
def _fusing_on_demand(device: Any, sink: Any, weights: Sequence[Any]) -> Iterator[Callable[[], None]]:
    from gemma4_compat._kernels.match.on_demand import OnDemand

    mode = OnDemand(device, sink, kernels_of(device).layouts, weights)
    with mode:
        yield mode.flush
        mode.flush()


def _copies(outputs: Any) -> list[Any]:
    from torch.utils import _pytree

    return [leaf.clone() for leaf in _pytree.tree_leaves(outputs) if hasattr(leaf, "clone")]


def _are_equal(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(same_bits, some, others))
