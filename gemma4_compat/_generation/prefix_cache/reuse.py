"""What a model keeps for ``decode_fast(reuse_prefix=True)``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from gemma4_compat._accelerate import attached
from gemma4_compat._generation.prefix_cache import weights
from gemma4_compat._graphs import decoder

if TYPE_CHECKING:
    from gemma4_compat._generation.prefix_cache.conversation import Conversation


class Kept:
    """The last conversation of a model. A copied or pickled model keeps nothing.

    Args:
        model: a transformers model.
    """

    def __init__(self, model: Any) -> None:
        self._counted = decoder.of(model).statistics
        self._lock = threading.Lock()
        self._last: Conversation | None = None
        self._modules: Any = None  # as they were when they were looked at
        self.settled = False  # whether a forward has run: libraries may store weights in another way in the first one

    def take(self) -> Conversation | None:
        """The last conversation, which is the caller's then."""
        with self._lock:
            found, self._last = self._last, None
        return found

    def put(self, found: Conversation) -> None:
        """Keep a conversation in place of the last one."""
        with self._lock:
            self._last = found

    def seen(self, model: Any) -> tuple[Any, ...]:
        """What is equal as long as the model computes the same (:func:`weights.seen`)."""
        with self._lock:
            found = weights.seen(model, self._modules)
            self._modules = found[0]
        return found

    def count(self, read: int, reused: int) -> None:
        """Count tokens of a prompt: those that are read, and those that a cache holds."""
        self._counted.prompt_tokens_read += read
        self._counted.prompt_tokens_reused += reused

    def not_reused(self, reason: str) -> None:
        """Count a prompt that is read from its beginning."""
        self._counted.not_reused = {
            **self._counted.not_reused,
            reason: self._counted.not_reused.get(reason, 0) + 1,
        }

    def __deepcopy__(self, _memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())


def of(model: Any) -> Kept | None:
    """What a model keeps; None without ``reuse_prefix``."""
    found: Kept | None = vars(model).get(attached.TURNS)
    return found


def ask(model: Any) -> None:
    """Have a model keep its conversation from now on; what it kept is forgotten."""
    vars(model)[attached.TURNS] = Kept(model)


def forget(model: Any) -> None:
    """Have a model keep nothing, and release what it kept."""
    vars(model).pop(attached.TURNS, None)
