"""What a model keeps for ``decode_fast(reuse_prefix=True)``."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.models import walk
from gemma4_compat._graphs import decoder, signatures
from gemma4_compat._graphs.guards.model import ModelGuards
from gemma4_compat._offload.transfer import idle_hooks

if TYPE_CHECKING:
    from gemma4_compat._generation.prefix_cache.conversation import Conversation

_log = logging.getLogger("gemma4_compat")


class Kept:
    """The last conversation of a model. A copied or pickled model keeps nothing.

    Args:
        model: a transformers model.
    """

    def __init__(self, model: Any) -> None:
        self._counted = decoder.of(model).statistics
        self._lock = threading.Lock()
        self._last: Conversation | None = None
        self._guards: ModelGuards | None = None
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
        """What is equal as long as the model has the same weights, adapters, hooks, attributes and settings of torch.

        Values of weights are compared as well, because a cache was computed from them.
        """
        import torch

        kind = model.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with self._lock, idle_hooks.put_back(model):  # a thread in a forward has them bypassed
            if self._guards is not None and not self._guards.check_under_any_adapter():
                found = self._guards.reason()
                _log.debug("gemma4_compat: the last conversation is of no use: %s (%s)", found.cause, found.detail)
                self._guards = None
            if self._guards is None:
                self._guards = ModelGuards(walk.modules(model), offloaded=False)
            guards = self._guards
            return guards, guards.active_adapters(), autocast, signatures.settings(), *guards.contents()

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
