"""When the host waits for a token: after every step, or one step late.

After each token ``generate`` asks whether the text is finished, and waits for the device to answer. The Python between
two steps then adds to every step. transformers has a ``DeferredStopCheck`` (5.17) that reads the answer of one step
while the next one is running, and undoes that next step if the text was already finished.

The longer a step takes, the more the extra step costs, and the longer a text must be for deferral to pay. Its final
length is unknown, so deferral starts once waiting has cost as much as one wasted step.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

#: Seconds that waiting adds to a step, at least: 2.1 to 4.5 ms with E2B and 12B on an H200 (part "waiting" of
#: benchmarks/decoding/graph_decoding.py, 2026-11-24).
WAITING = 0.002
#: Replays to time, at least.
_TIMED = 4

_running = threading.local()


class Sampling:
    """One ``GenerationMixin._sample`` of this thread.

    Args:
        functions: its logits processors and stopping criteria.
        samples: whether tokens are sampled.
        synced: other processes run the same number of steps.
        streamer: what gets the tokens.

    Attributes:
        pure: no processor or criterion is a user's.
        no_user_code: nor is the streamer: no code but libraries' runs in this thread between two steps.
        replays: steps are replayed, as far as is known before the first.
        ours: its stop check is deferred because we asked for it.
        deferred: from now on, stops are read one step late.
        most: how many of the best words matter for each token; why all do, as text.
    """

    def __init__(self, functions: list[Any], *, samples: bool, synced: bool = False, streamer: Any = None) -> None:
        self.pure = all(map(is_pure, functions))
        self.no_user_code = self.pure and (streamer is None or is_of_libraries(type(streamer).__module__))
        self.replays = self.ours = self.deferred = False
        self.most: int | str = "code of the user's runs between two tokens"
        self._samples, self._synced = samples, synced
        self._launched: collections.deque[float] = collections.deque(maxlen=_TIMED + 1)
        self._replays = 0
        self._random_states: collections.deque[Any] = collections.deque(maxlen=2)

    def can_be_deferred(self) -> bool:
        """Whether nobody notices the extra step.

        Processors and criteria are called once more than needed. Those of transformers remember nothing; the few that
        call a user's function hold it as an attribute, and rule deferral out.
        """
        return self.replays and not self._synced and self.pure

    def launched(self) -> None:
        """Note that a step was replayed."""
        self._replays += 1
        self._launched.append(time.perf_counter())

    def defers(self) -> bool:
        """Whether this step's stop is read one step late."""
        if not self.deferred and self._replays > _TIMED:
            step = min(after - before for before, after in itertools.pairwise(self._launched))
            self.deferred = step <= self._replays * WAITING
        return self.deferred

    def note_random_state(self, device: Any) -> None:
        """Remember the state of the random number generator after a token was sampled."""
        if self._samples:
            generator = generator_of(device)
            self._random_states.append((generator, generator.get_state()))

    def undo_last_draw(self) -> None:
        """Restore the generator's state from before the extra token."""
        if self._random_states:
            generator, state = self._random_states[0]
            generator.set_state(state)


@contextlib.contextmanager
def sampling(functions: list[Any], *, samples: bool, synced: bool = False, streamer: Any = None) -> Iterator[Sampling]:
    """Inside, :func:`current` returns this ``_sample``."""
    outer = current()
    _running.sampling = found = Sampling(functions, samples=samples, synced=synced, streamer=streamer)
    try:
        yield found
    finally:
        _running.sampling = outer


def current() -> Sampling | None:
    """The ``_sample`` that runs in this thread, if its stops may be read late; otherwise None."""
    return getattr(_running, "sampling", None)


def no_user_code(model: Any) -> bool:
    """Whether no code but libraries' runs in this thread between two steps of a ``generate`` of this model."""
    running = current()
    return running is not None and running.no_user_code and type(model).__module__.startswith("transformers.")


def is_libraries(function: Any) -> bool:
    """Whether a function, and all that it wraps, is transformers' or this package's; None is nobody's."""
    while function is not None:
        if not is_of_libraries(getattr(function, "__globals__", {}).get("__name__", "")):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def is_of_libraries(module: str) -> bool:
    """Whether a module, by its name, is in transformers or this package."""
    return module.partition(".")[0] in ("transformers", "gemma4_compat")


def is_pure(function: Any) -> bool:
    """Whether a processor or criterion is transformers' or this package's, and calls nothing of a user's."""
    return is_of_libraries(type(function).__module__) and not any(map(callable, vars(function).values()))


def generator_of(device: Any) -> Any:
    """The random number generator that tokens on this device are drawn by."""
    import torch

    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
