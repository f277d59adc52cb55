"""What a model keeps for fast decoding: a one-token step is replayed where a replay is known to be exact."""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from gemma4_compat._accelerate import attached
from gemma4_compat._common import arguments, locks
from gemma4_compat._graphs import advancing, deferral, fused_steps, obstacles, static_caches, steps
from gemma4_compat._graphs.graphs import REMEMBERED, Graph, Variant
from gemma4_compat._graphs.guards.model import ModelGuards
from gemma4_compat._graphs.recaptures import LAST, Cause, DecodingStatistics, Recapture
from gemma4_compat._graphs.recording import RECORDERS, Recording, capturing
from gemma4_compat._models import walk
from gemma4_compat._offload import idle_hooks, streaming

#: Graphs kept for one model, over all its caches and adapters. The least recently used one goes first.
MAX_GRAPHS = 8
#: Sets of adapters whose graphs are kept.
_MAX_VARIANTS = 4
#: Kinds of steps in one variant. If there are more, every step differs from the one before.
_MAX_KINDS = 64
_ATTRIBUTE = attached.DECODING
_log = logging.getLogger("gemma4_compat")
#: Statistics that were read before there was anything to count: reading leaves nothing on a model.
_read_early: weakref.WeakKeyDictionary[Any, DecodingStatistics] = weakref.WeakKeyDictionary()


class Decoding:
    """What a model keeps for fast decoding: its graphs, and the memory of its last static cache.

    The model owns it. A copied or pickled model starts without it.
    """

    def __init__(self, statistics: DecodingStatistics | None = None) -> None:
        self.statistics = statistics or DecodingStatistics()
        self.preferred = False  # to compiling, where transformers would compile
        self.any_length = False  # whether prompts are read in pieces of a few sizes
        self.assistants = False  # whether texts with an assistant model are decoded in rounds
        self.known_assistants: weakref.WeakSet[Any] = weakref.WeakSet()  # models that keep graphs for this one
        self.paces: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # `pace.Known`, by assistant
        self.own = False  # whether kernels may have an arithmetic of their own
        self.fuses = True
        self.lock = locks.Lock(locks.DECODING)
        self.memories: list[static_caches.Memory] = []
        self._variants: list[Variant] = []
        self.waiting: weakref.ref[Any] | None = None  # the `call.Decoder` that was made last
        self.pauses = False  # no graph of a prompt is captured or replayed
        self.prompt_pool: Any = None  # of the graphs of prompts, and how many bytes it takes
        self.prompt_bytes = 0
        self.largest_pieces: dict[tuple[int, int], int] = {}  # of prompts, in tokens, by rows and length of the cache
        self.shapes: Any = None  # of the model and where it is, for `_planner.reading`
        self._pool: Any = None
        self._stream: Any = None  # of the last replay
        self._lost: Recapture | None = None  # why there is no variant to compare with
        self._evicted: collections.deque[int] = collections.deque(maxlen=REMEMBERED)  # variants, by their adapters

    @property
    def variants(self) -> list[Variant]:
        """By the sets of adapters that were active, the last one first."""
        return self._variants

    def memory_of(self, cache: Any) -> static_caches.Memory | None:
        """The memory that a cache has or was lent."""
        return next((memory for memory in self.memories if memory.is_of(cache)), None)

    def keep_memory(self, cache: Any) -> static_caches.Memory:
        """Keep the memory of a cache that has its tensors, which a graph uses."""
        made = static_caches.Memory(cache)
        found = next((memory for memory in self.memories if memory.addresses == made.addresses), made)
        if found is made:
            self.memories.append(made)
        return found

    def __deepcopy__(self, _memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    def _forget(self, guards: ModelGuards, module: str, *, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Drop the graphs that depend on a deleted module."""
        if ending():  # the interpreter is: the names of this module may be gone
            return
        self._lost = self._lost or Recapture(Cause.MODULE, f"{module} was deleted")
        self._variants = [variant for variant in self._variants if variant.guards is not guards]

    def _note(self, found: Recapture) -> None:
        """Count why a step needs another graph, if it had one."""
        counted = self.statistics
        if counted.captured:
            counted.recaptures = {**counted.recaptures, found.cause: counted.recaptures.get(found.cause, 0) + 1}
            counted.last_recaptures = (*counted.last_recaptures, found)[-LAST:]
            _log.debug("gemma4_compat: another CUDA graph: %s (%s)", found.cause, found.detail)

    def reason(self, text: str, what: str = "decoding without a CUDA graph") -> None:
        """Record why steps, prompts or drafts are not replayed, and log it once."""
        if text not in self.statistics.reasons:
            self.statistics.reasons += (text,)
            _log.warning("gemma4_compat: %s: %s", what, text)

    def reason_of(self, error: BaseException, *, prompt: bool = False) -> None:
        """Record why a capture failed, of a prompt or of a step."""
        if prompt:
            self.reason(f"a capture of a prompt failed with {_shown(error)}", "reading prompts without a CUDA graph")
        else:
            self.reason(f"a capture failed with {_shown(error)}")

    def reason_not_fused(self, text: str, how: str = "without fused kernels, with the same bits") -> None:
        """Record why PyTorch's kernels compute what those of this package would, and log it once."""
        if text not in self.statistics.not_fused:
            self.statistics.not_fused += (text,)
            _log.warning("gemma4_compat: decoding %s: %s", how, text)

    def arithmetic(self, device: Any, tokens: int = 1) -> contextlib.AbstractContextManager[Any]:
        """To be entered around each forward of a step: kernels of our own compute what they can, or PyTorch's do.

        ``tokens``: of each sequence; each has the bits that it would have in a step of its own.
        """
        if not self.own:
            return contextlib.nullcontext()
        from gemma4_compat._kernels.match import own

        obstacle = own.obstacle(device)
        if obstacle is None:
            return own.Own(device, tokens)
        self.reason_not_fused(obstacle, "with PyTorch's bits")
        return contextlib.nullcontext()

    def reading(self, device: Any, cache: Any) -> contextlib.AbstractContextManager[Any]:
        """To be entered around each forward of a prompt: kernels of our own may compute its attention."""
        if not self.own or not static_caches.is_static(cache):
            return contextlib.nullcontext()
        from gemma4_compat._kernels.match import own, reading

        if static_caches.length(cache) < reading.POSITIONS or own.obstacle(device) is not None:
            return contextlib.nullcontext()
        return reading.read(device)

    def tidy(self, cache: Any) -> None:
        """Before a ``generate``: release caches that are gone, except one, which lends its memory to ``cache``."""
        with self.lock.held():
            idle = [memory for memory in self.memories if not memory.in_use]
            for memory in idle[:-1]:
                self.drop(memory)
            if idle and static_caches.tensors(cache) is None:
                idle[-1].lend(cache, self.drop)

    def drop(self, memory: static_caches.Memory) -> None:
        """Release the memory of a cache, and the graphs that hold its addresses."""
        with self.lock.held():
            self.memories = [other for other in self.memories if other is not memory]
            for variant in self._variants:
                for graphs in (variant.graphs, variant.prompts):
                    for key in [key for key in graphs if key[0] == memory.addresses]:
                        del graphs[key]

    def clear(self) -> None:
        """Release all graphs and caches; the next call captures anew."""
        with self.lock.held():
            if self._variants:
                self._lost = Recapture(Cause.TURNED_OFF, "")
            self._variants, self.memories, self.shapes = [], [], None
            self.largest_pieces = {}
            for assistant in self.known_assistants:
                of(assistant).clear()
            self.known_assistants.clear()
            self.paces.clear()

    @property
    def captured(self) -> bool:
        """Whether there are graphs."""
        return any(variant.graphs or variant.prompts for variant in self._variants)

    def give_back(self) -> None:
        """Release all graphs where memory is short. The next call captures anew."""
        with self.lock.held():
            self._lost = Recapture(Cause.MEMORY, "a prompt needed what they take")
            self._variants = []
            self.prompt_pool, self.prompt_bytes = None, 0

    def variant(self, model: Any, *, in_full: bool, settling: bool = False, quiet: bool = False) -> Variant:
        """The variant of the model as it is now.

        ``in_full`` also checks what rarely changes; ``settling`` says that its first step has just run; ``quiet`` says
        that no code but libraries' has run since the last check.
        """
        with idle_hooks.put_back(model):  # a thread in a forward has them bypassed
            return self._variant_of(model, in_full=in_full, settling=settling, quiet=quiet)

    def _variant_of(self, model: Any, *, in_full: bool, settling: bool, quiet: bool) -> Variant:
        for index, variant in enumerate(self._variants):
            guards = variant.guards
            # Only the variant of the last step was looked at then.
            check = guards.check_rotating if quiet and not index else guards.check_step
            if check() and not (in_full and not guards.check_all()):
                if index:
                    self._variants = [variant, *(other for other in self._variants if other is not variant)]
                return variant
        # The adapters have changed, or the model has; in the latter case its graphs are of no use any more.
        before = next(iter(self._variants), None)
        found = before.guards.reason() if before is not None else self._lost
        self._lost = None
        self._variants = [one for one in self._variants if one.guards.check_weights() and one.guards.check_all()]
        groups = [group for streamer in streaming.streamers(model) for group in streamer.groups()]
        variant = Variant(ModelGuards(obstacles.modules_of_a_step(model), self._forget, groups=groups))
        adapters = variant.guards.adapters()
        if adapters in self._evicted:
            self._evicted.remove(adapters)
            found = Recapture(Cause.EVICTED, f"at most {_MAX_VARIANTS} sets of adapters keep theirs")
        if found is not None and not (settling and before is not None and not before.captured):
            self._note(found)
        self._evicted += [gone.guards.adapters() for gone in self._variants[_MAX_VARIANTS - 1 :]]
        self._variants = [variant, *self._variants[: _MAX_VARIANTS - 1]]
        return variant

    def run(self, model: Any, step: steps.Step, *, first: bool, following: advancing.Following | None = None) -> Any:
        """Run one step, as a replay if possible.

        Args:
            model: the model.
            step: whose inputs ``generate`` has built.
            first: whether it is the first step of a ``generate``.
            following: gets to know the step.

        Returns:
            the model's output, or None for a step that cannot be captured; nothing has run then.
        """
        quiet = not first and is_quiet(model)
        variant, kind = self.variant(model, in_full=first, quiet=quiet), step.kind
        if kind in variant.refused:
            return None
        graph = variant.graphs.get((step.addresses, kind))
        if graph is None:
            found = self._missing(step, variant)
            if found is not None:
                self._note(found)
            if kind not in variant.seen:
                return self._run_first(model, step, variant)
            graph = self._capture(model, step, variant)
            if graph is None:
                return None
        variant.graphs.move_to_end((step.addresses, kind))
        if following is None:
            return self._replay(model, graph, step)
        following.compare(graph, step)
        outputs = self._replay(model, graph, step)
        following.replayed(variant, graph, step)
        return outputs

    def follow(self, model: Any, following: advancing.Following) -> Any:
        """Replay the step after the last one, whose inputs are there; None if that graph does not serve it."""
        assert following.last is not None
        if not self._serves(model, following.last):
            return None
        _, graph, step = following.last
        self._replay(model, graph, step, given=False)
        return following.outputs()

    def again(self, model: Any, last: advancing.Replayed) -> Any:
        """Replay a step that was replayed before, with other tensors; None if that graph does not serve it.

        Only where no user's code has run since the last step (:func:`is_quiet`).
        """
        return self._replay(model, last.graph, last.step) if self._serves(model, last) else None

    def _serves(self, model: Any, last: advancing.Replayed) -> bool:
        """Whether the graph of a step that was replayed is still that step's."""
        known, graph, step = last
        key = step.addresses, step.kind
        variant = self.variant(model, in_full=False, quiet=True)
        if variant is not known or variant.graphs.get(key) is not graph or not step.has_settings():
            return False
        variant.graphs.move_to_end(key)
        return True

    def _missing(self, step: steps.Step, variant: Variant) -> Recapture | None:
        """Why none of this variant's graphs serves the step; None if it has had none, or the step was asked before."""
        key = step.addresses, step.kind
        if key in variant.evicted:
            variant.evicted.remove(key)
            return Recapture(Cause.EVICTED, f"at most {MAX_GRAPHS} of a model")
        if step.kind in variant.captured:
            held = any(memory.in_use for memory in self.memories if memory.addresses != step.addresses)
            return Recapture(Cause.CACHE, "the one before is held" if held else "the one before is gone")
        if step.kind in variant.seen or not variant.captured or step.is_expected:
            return None
        kind = next(reversed(variant.graphs))[1] if variant.graphs else next(reversed(variant.captured))
        return Recapture.of(step.differences(kind, variant.captured[kind]))

    def _run_first(self, model: Any, step: steps.Step, variant: Variant) -> Any:
        """Run the first step of a kind without a graph: libraries set themselves up, hooks settle."""
        obstacle = RECORDERS[step.device.type].obstacle()
        obstacle = obstacle or obstacles.find(model, obstacles.modules_of_a_step(model))
        if obstacle is None and len(variant.seen) == _MAX_KINDS:
            obstacle = "the shapes of the inputs change with every token"
        if obstacle is not None:
            self.reason(obstacle)
            variant.refused.add(step.kind)
            return None
        with self.arithmetic(step.device, step.tokens), static_caches.shifted(step.cache):
            outputs = step.forward(model, step.inputs)
        self.statistics.eager += 1
        self.variant(model, in_full=False, settling=True).seen.add(step.kind)
        return outputs

    def _capture(self, model: Any, step: steps.Step, variant: Variant) -> Graph | None:
        """Capture the step without running it. None, with model and cache unchanged, if it cannot be captured."""
        recorder = RECORDERS[step.device.type]
        self._make_room()
        begun = time.perf_counter()
        try:
            if not any(variant.graphs for variant in self._variants):  # a pool without a graph cannot be used again
                self._pool = recorder.new_pool()
            static = step.static_inputs()
            recording, outputs = self.recorded(model, step, static, self._pool)
        except Exception as error:  # noqa: BLE001  # whatever it is, the step can run without a graph
            self.reason_of(error)
            variant.refused.add(step.kind)
            return None
        self.statistics.captured += 1
        self.statistics.capture_seconds += time.perf_counter() - begun
        if step.added:  # or somebody else keeps it
            self.keep_memory(step.cache)
        graph = Graph(recording, steps.kept(static, step.cache), steps.tensors(static), outputs)
        variant.graphs[step.addresses, step.kind] = graph
        variant.captured[step.kind] = static_caches.length(step.cache)
        return graph

    def recorded(
        self,
        model: Any,
        step: steps.Step,
        static: dict[str, Any],
        pool: Any,
        within: fused_steps.Within = contextlib.nullcontext,
    ) -> tuple[Recording, Any]:
        """Record the step that reads ``static``, with its output; ``within`` is entered around the forward."""
        streamers = streaming.streamers(model)
        recording = RECORDERS[step.device.type](step.device, pool)

        def forward() -> Any:
            with contextlib.ExitStack() as stack:
                how = (
                    self.arithmetic(step.device, step.tokens)
                    if step.decodes
                    else self.reading(step.device, step.cache)
                )
                stack.enter_context(how)
                for streamer in streamers:
                    stack.enter_context(streamer.forked())
                settle = stack.enter_context(within())
                if settle is not None:
                    for streamer in streamers:
                        stack.enter_context(streamer.settled(settle))
                return step.forward(model, static)

        with capturing.held(), static_caches.capturable(step.cache, step.tokens), streaming.captured(streamers):
            outputs = recording.capture(forward)
        return recording, steps.kept(outputs, step.cache)

    def _make_room(self) -> None:
        while sum(len(variant.graphs) for variant in self._variants) >= MAX_GRAPHS:
            oldest = next(variant for variant in reversed(self._variants) if variant.graphs)
            oldest.evicted.append(oldest.graphs.popitem(last=False)[0])

    def launch(self, graph: Graph, step: steps.Step, *, given: bool = True) -> None:
        """Before a replay: wait for the stream of the last one, and give the graph the step's inputs."""
        import torch

        if step.device.type == "cuda":
            stream = torch.cuda.current_stream(step.device)
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream
        for static, tensor in zip(graph.inputs, step.tensors if given else ()):
            static.copy_(tensor)

    def _replay(self, model: Any, graph: Graph, step: steps.Step, *, given: bool = True) -> Any:
        """The output of a replay; None unless ``given``, when the graph's inputs are those of the step already."""
        self.launch(graph, step, given=given)
        running = deferral.current()
        if running is not None:
            running.launched()
        if not (self.fuses and graph.progress.is_due() and self.replay_fused(model, graph, step)):
            graph.recording.replay()
        static_caches.advance(step.sliding, step.added)
        self.statistics.replayed += 1
        return steps.copied(graph.outputs, step.cache) if given else None

    def replay_fused(self, model: Any, graph: Graph, step: steps.Step) -> bool:
        """Whether this call replayed the step, because its graph is fused from now on."""
        obstacle = fused_steps.obstacle(step.device)
        if obstacle is not None:
            _log.debug("gemma4_compat: decoding without fused kernels: %s", obstacle)
            return False
        begun = time.perf_counter()
        try:
            found = fused_steps.fused(
                *(graph.recording, graph.outputs, step.changes, step.device, graph.progress),
                lambda within: self.recorded(
                    *(model, step, steps.given_back(graph.static, step.cache)),
                    *(self._pool if step.decodes else self.prompt_pool, within),
                ),
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, the plain graph is there
            self.reason_not_fused(_shown(error))
            return False
        finally:
            self.statistics.capture_seconds += time.perf_counter() - begun
        if found is not None:
            graph.recording, graph.outputs = found
            self.statistics.fused += int(step.decodes)
        return found is not None


def _shown(error: BaseException) -> str:
    """An error on one line; for a failed capture, its cause."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def of(model: Any) -> Decoding:
    """What this model keeps for fast decoding."""
    found: Decoding | None = vars(model).get(_ATTRIBUTE)
    if found is None:
        found = vars(model)[_ATTRIBUTE] = Decoding(_read_early.pop(model, None))
    return found


def is_quiet(model: Any) -> bool:
    """Whether no code but libraries' runs in this thread between two steps of a ``generate`` of this model."""
    running = deferral.current()
    return running is not None and running.quiet and type(model).__module__.startswith("transformers.")


def is_preferred(model: Any) -> bool:
    """Whether replaying is preferred to compiling (``gemma4_compat.decode_fast``)."""
    found: Decoding | None = vars(model).get(_ATTRIBUTE)
    return found is not None and found.preferred


def decoding_statistics(model: Any) -> DecodingStatistics:
    """How the one-token steps of ``model`` were run; PEFT, DDP or ``torch.compile`` may wrap the model.

    >>> counted = gemma4_compat.decoding_statistics(model)
    >>> counted.replayed, counted.captured, counted.reasons
    (199, 1, ())

    It is the model's own object: later calls of ``generate`` go on counting in it. Reading it changes no model.

    Raises:
        Gemma4CompatError: ``model`` is not a module.
    """
    inner = walk.unwrapped(arguments.model(model, "decoding_statistics"))
    found: Decoding | None = vars(inner).get(_ATTRIBUTE)
    return _read_early.setdefault(inner, DecodingStatistics()) if found is None else found.statistics
