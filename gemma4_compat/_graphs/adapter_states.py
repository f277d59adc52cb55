"""The states that a model is in as its adapters change: each has captured calls of its own."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from typing import Any

from gemma4_compat._graphs import deferral, unsupported
from gemma4_compat._graphs.captured_calls import REMEMBERED, State
from gemma4_compat._graphs.guards.model import ModelGuards
from gemma4_compat._graphs.statistics import Cause, DecodingStatistics, Recapture
from gemma4_compat._offload import idle_hooks, streaming

#: States that keep their captured calls.
LIMIT = 4


class AdapterStates:
    """The guards of steps and prompts.

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

    def check(self, call: Any, *, first: bool = False, settling: bool = False, quiet: bool | None = None) -> State:
        """The state of the model as it is now. See :class:`captured_calls.Guards`."""
        if quiet is None:
            quiet = call.decodes and not (first or settling) and deferral.is_quiet(call.model)
        with idle_hooks.put_back(call.model):  # a thread in a forward has them bypassed
            for index, state in enumerate(self.states):
                # Only the last one was looked at with the last step.
                check = state.guards.check_rotating if quiet and not index else state.guards.check_step
                if check() and not (first and not state.guards.check_all()):
                    if index:
                        self.states = [state, *(other for other in self.states if other is not state)]
                    return state
            return self._changed(call.model, settling=settling)

    def rest_holds(self, call: Any) -> bool:
        """Whether the model is in the last state, if its guards say that all memory is what it was."""
        with idle_hooks.put_back(call.model):
            guards = self.states[0].guards
            return bool(guards.check_rest() and guards.check_all())

    def _changed(self, model: Any, *, settling: bool) -> State:
        """The adapters have changed, or the model has; in the latter case its graphs are of no use any more."""
        before = next(iter(self.states), None)
        found = before.guards.reason() if before is not None else self._lost
        self._lost = None
        self.states = [one for one in self.states if one.guards.check_weights() and one.guards.check_all()]
        groups = [group for streamer in streaming.streamers(model) for group in streamer.groups()]
        state = State(ModelGuards(unsupported.modules_of_a_step(model), self._forget, groups=groups))
        adapters = state.guards.adapters()
        if adapters in self._evicted:
            self._evicted.remove(adapters)
            found = Recapture(Cause.EVICTED, f"at most {LIMIT} sets of adapters keep theirs")
        had_none = before is not None and not any(known.captured for known in before.calls.values())
        if found is not None and not (settling and had_none):
            self._statistics.note(found)
        self._evicted += [gone.guards.adapters() for gone in self.states[LIMIT - 1 :]]
        self.states = [state, *self.states[: LIMIT - 1]]
        return state

    def _forget(self, guards: ModelGuards, module: str, *, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Drop the state that depends on a deleted module."""
        if ending():  # the interpreter is: the names of this module may be gone
            return
        self._lost = self._lost or Recapture(Cause.MODULE, f"{module} was deleted")
        self.states = [state for state in self.states if state.guards is not guards]
