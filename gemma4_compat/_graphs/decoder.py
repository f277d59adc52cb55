"""What a model keeps for fast decoding: a one-token step is replayed where a replay is known to be exact."""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.runtime import locks
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.models import walk
from gemma4_compat._graphs import deferred_stop, static_caches, steps, unsupported
from gemma4_compat._graphs.captured_calls import REMEMBERED, CapturedCalls, Pool, State
from gemma4_compat._graphs.guards.model import ModelGuards
from gemma4_compat._graphs.recording import without_collection
from gemma4_compat._graphs.statistics import Cause, DecodingStatistics, PromptStatistics, Recapture
from gemma4_compat._offload.transfer import idle_hooks, row_lookup, streaming

#: Graphs of steps, and of prompts, that are kept for one model, over all its caches and adapters.
MAX_GRAPHS, MAX_PROMPTS = 8, 16
#: Sets of adapters whose captured calls are kept.
MAX_STATES = 4
#: The call of a signature that is captured.
CAPTURE_AT = 2
_ATTRIBUTE = attached.DECODING
_log = logging.getLogger("gemma4_compat")
#: Statistics that were read before there was anything to count: reading leaves nothing on a model.
_read_early: weakref.WeakKeyDictionary[Any, DecodingStatistics] = weakref.WeakKeyDictionary()


class AdapterStates:
    """The guards of steps and prompts: a model is in another state with each set of adapters.

    Args:
        statistics: where recaptures are counted.

    Attributes:
        states: by the sets of adapters that were active, the last one first.
    """

    def __init__(self, statistics: DecodingStatistics) -> None:
        self.states: list[State] = []
        self._statistics = statistics
        self._lost: Recapture | None = None  # why there is no state to compare with
        self._evicted: collections.deque[int] = collections.deque(maxlen=REMEMBERED)  # states, by their adapters

    def lose(self, cause: Cause, detail: str = "") -> None:
        """Drop all of them, for this reason."""
        self._lost, self.states = Recapture(cause, detail), []

    def check(
        self, call: Any, *, first: bool = False, settling: bool = False, no_user_code: bool | None = None
    ) -> State:
        """The state of the model as it is now. See :class:`captured_calls.Guards`."""
        if no_user_code is None:
            no_user_code = call.decodes and not (first or settling) and deferred_stop.no_user_code(call.model)
        with idle_hooks.put_back(call.model):  # a thread in a forward has them bypassed
            for index, state in enumerate(self.states):
                # Only the last one was looked at with the last step.
                check = state.guards.check_rotating if no_user_code and not index else state.guards.check_step
                if check() and (not first or of(call.model).owned or state.guards.check_all()):
                    if index:
                        self.states = [state, *(other for other in self.states if other is not state)]
                    return state
            return self._changed(call.model, settling=settling)

    def rest_holds(self, call: Any) -> bool:
        """Whether the model is in the last state, if its guards say that all memory is what it was."""
        with idle_hooks.put_back(call.model):
            guards = self.states[0].guards
            return bool(guards.check_rest() and (of(call.model).owned or guards.check_all()))

    def _changed(self, model: Any, *, settling: bool) -> State:
        """The adapters have changed, or the model has; in the latter case its graphs are of no use any more."""
        before = next(iter(self.states), None)
        found = before.guards.reason() if before is not None else self._lost
        self._lost = None
        self.states = [one for one in self.states if one.guards.check_weights() and one.guards.check_all()]
        modules = unsupported.modules_of_a_step(model)
        groups = [group for streamer in streaming.streamers(model) for group in streamer.groups()]
        with without_collection():
            state = State(ModelGuards(modules, self._forget, groups=[*groups, *row_lookup.places(modules)]))
        adapters = state.guards.adapters()
        if adapters in self._evicted:
            self._evicted.remove(adapters)
            found = Recapture(Cause.EVICTED, f"at most {MAX_STATES} sets of adapters keep theirs")
        had_none = before is not None and not any(known.captured for known in before.calls.values())
        if found is not None and not (settling and had_none):
            self._statistics.note(found)
        self._evicted += [gone.guards.adapters() for gone in self.states[MAX_STATES - 1 :]]
        self.states = [state, *self.states[: MAX_STATES - 1]]
        return state

    def _forget(self, guards: ModelGuards, module: str, *, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Drop the state that depends on a deleted module."""
        if ending():  # the interpreter is: the names of this module may be gone
            return
        self._lost = self._lost or Recapture(Cause.MODULE, f"{module} was deleted")
        self.states = [state for state in self.states if state.guards is not guards]


class Decoding:
    """What a model keeps for fast decoding: captured steps and prompts, and the memory of its last static cache.

    The model owns it. A copied or pickled model starts without it.

    Attributes:
        steps: one-token steps, and those of drafts.
        prompts: forwards of several tokens.
        owned: whether nobody but the caller of ``generate`` has the model, as in a server: only adapters and settings
            of torch change, and what changes rarely is not looked at.
    """

    def __init__(self, statistics: DecodingStatistics | None = None) -> None:
        self.statistics = statistics or DecodingStatistics()
        self.preferred = False  # to compiling, where transformers would compile
        self.any_length = False  # whether prompts are read in buckets of a few sizes
        self.assistants = False  # whether texts with an assistant model are decoded in speculative steps
        self.known_assistants: weakref.WeakSet[Any] = weakref.WeakSet()  # models that keep graphs for this one
        #: `draft_length.Known`, by assistant
        self.draft_lengths: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.custom = False  # whether custom kernels may run
        self.fuses, self.owned = True, False
        self.lock = locks.Lock(locks.DECODING)
        self.memories: list[static_caches.Memory] = []
        self.head: Any = None  # a `best_words.Kept`
        self.has_room_for_head = True  # until a prompt needed what it takes
        self.experts: Any = None  # an `expert_slots.Kept`
        self.waiting: weakref.ref[Any] | None = None  # the `call.Decoder` that was made last
        self.largest_buckets: dict[tuple[int, int], int] = {}  # of prompts, in tokens, by rows and length of the cache
        self.shapes: Any = None  # of the model and where it is, for `_generation.prompts.chunks`
        self._states = AdapterStates(self.statistics)
        self.steps = CapturedCalls(
            self._states, capture_at=CAPTURE_AT, limit=MAX_GRAPHS, pool=Pool(), statistics=self.statistics
        )
        self.prompts = CapturedCalls(
            self._states,
            capture_at=CAPTURE_AT,
            limit=MAX_PROMPTS,
            pool=Pool(measured=True),
            statistics=PromptStatistics(self.statistics),
        )
        self._stream: Any = None  # of the last replay

    @property
    def state(self) -> State | None:
        """That of the model in the last step or prompt."""
        return next(iter(self._states.states), None)

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

    def holds_other(self, addresses: tuple[int, ...]) -> bool:
        """Whether a cache with other memory than this is alive."""
        return any(memory.in_use for memory in self.memories if memory.addresses != addresses)

    def __deepcopy__(self, _memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    def reason(self, text: str, what: str = "decoding eagerly") -> None:
        """Record why steps, prompts or drafts are not replayed, and log it once."""
        if self.statistics.add_reason(text):
            _log.warning("gemma4_compat: %s: %s", what, text)

    def reason_not_fused(self, text: str, how: str = "without fused kernels, with the same bits") -> None:
        """Record why PyTorch's kernels compute what those of this package would, and log it once."""
        if text not in self.statistics.not_fused:
            self.statistics.not_fused += (text,)
            _log.warning("gemma4_compat: decoding %s: %s", how, text)

    def arithmetic(self, device: Any, tokens: int = 1, head: Any = None) -> contextlib.AbstractContextManager[Any]:
        """To be entered around each forward of a step: custom kernels compute what they can, or PyTorch's do.

        Args:
            device: of the step.
            tokens: of each sequence; each has the bits that it would have in a step of its own.
            head: a ``best_words.Head``, if only its best words matter.
        """
        if not self.custom:
            return contextlib.nullcontext()
        from gemma4_compat._kernels.match import custom

        reason = custom.unsupported_reason(device)
        if reason is None:
            return custom.CustomKernels(device, tokens, head)
        self.reason_not_fused(reason, "with PyTorch's bits")
        return contextlib.nullcontext()

    def reading(self, device: Any, cache: Any) -> contextlib.AbstractContextManager[Any]:
        """To be entered around each forward of a prompt: custom kernels may compute its attention."""
        if not self.custom or not static_caches.is_static(cache):
            return contextlib.nullcontext()
        from gemma4_compat._kernels.match import custom, reading

        if static_caches.length(cache) < reading.POSITIONS or custom.unsupported_reason(device) is not None:
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
            for calls in (self.steps, self.prompts):
                calls.drop(lambda graph: bool(graph.addresses == memory.addresses))

    def clear(self) -> None:
        """Release all graphs and caches; the next call captures anew."""
        with self.lock.held():
            if self._states.states:
                self._states.lose(Cause.TURNED_OFF)
            self.memories, self.shapes, self.largest_buckets = [], None, {}
            self.head, self.has_room_for_head = None, True
            self.drop_experts()
            for assistant in self.known_assistants:
                of(assistant).clear()
            self.known_assistants.clear()
            self.draft_lengths.clear()

    def drop_head(self) -> None:
        """Release the copy of the head, and the steps that read it."""
        self.steps.drop(lambda graph: graph.reads_copy)
        self.head = None

    def give_back_head(self) -> bool:
        """Release the copy of the head where memory is short, for good. False if there is none."""
        with self.lock.held():
            found = self.head is not None
            if found:
                self.drop_head()
                self.has_room_for_head = False
            return found

    def drop_experts(self) -> None:
        """Release the experts that are kept on the card, and the steps that read them."""
        self.give_back_experts()
        self.steps.drop(lambda graph: graph.reads_slots)
        self.experts = None

    def give_back_experts(self) -> bool:
        """Release their memory until a step takes it again. False if it is not there."""
        with self.lock.held():
            if self.experts is None or not self.experts.is_there:
                return False
            if self._stream is not None:
                self._stream.synchronize()
            self.experts.give_back()
            return True

    @property
    def captured(self) -> bool:
        """Whether there are graphs."""
        return any(self.steps.graphs()) or any(self.prompts.graphs())

    def give_back(self) -> None:
        """Release all graphs where memory is short. The next call captures anew."""
        with self.lock.held():
            self._states.lose(Cause.MEMORY, "a prompt needed what they take")
            self.give_back_head()
            self.prompts.release()

    def run(self, step: steps.Step, *, first: bool) -> Any:
        """Run one step, as a replay if possible.

        Args:
            step: whose inputs ``generate`` has built.
            first: whether it is the first step of a ``generate``.

        Returns:
            the model's output, or None for a step that cannot be captured; nothing has run then.
        """
        outputs = self.steps.run(step, first=first)
        if outputs is None and not self.steps.refuses(step):
            outputs = step.run_first()
            self.statistics.eager += 1
            self.steps.has_run(step)
        return outputs

    def follow_stream(self, device: Any) -> None:
        """Before a replay on a CUDA device: wait for the stream of the last one."""
        import torch

        stream = torch.cuda.current_stream(device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def of(model: Any) -> Decoding:
    """What this model keeps for fast decoding."""
    found: Decoding | None = vars(model).get(_ATTRIBUTE)
    if found is None:
        found = vars(model)[_ATTRIBUTE] = Decoding(_read_early.pop(model, None))
    return found


def is_preferred(model: Any) -> bool:
    """Whether replaying is preferred to compiling (``gemma4_compat.decode_fast``)."""
    found: Decoding | None = vars(model).get(_ATTRIBUTE)
    return found is not None and found.preferred


def statistics(model: Any) -> DecodingStatistics:
    """The object in which ``generate`` of a model counts. PEFT, DDP or ``torch.compile`` may wrap the model.

    Reading it changes no model.
    """
    inner = walk.unwrapped(model)
    found: Decoding | None = vars(inner).get(_ATTRIBUTE)
    if found is None:
        return _read_early.setdefault(inner, DecodingStatistics())
    if found.head is not None:
        found.statistics.head_words, found.statistics.head_tokens = found.head.counts()
    if found.experts is not None:
        found.statistics.experts_kept, found.statistics.experts_brought = found.experts.counts()
    return found.statistics
