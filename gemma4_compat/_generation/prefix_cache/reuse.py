"""``gemma4_compat.reuse_prefix``, and what a model keeps for it."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from gemma4_compat._accelerate import attached
from gemma4_compat._common import arguments
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._graphs import decoder, signatures
from gemma4_compat._graphs.guards.model import ModelGuards
from gemma4_compat._models import family, walk
from gemma4_compat._offload import idle_hooks

if TYPE_CHECKING:
    from gemma4_compat._generation.prefix_cache.conversation import Conversation

_Model = TypeVar("_Model")
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
    """What a model keeps; None without :func:`reuse_prefix`."""
    found: Kept | None = vars(model).get(attached.TURNS)
    return found


def reuse_prefix(model: _Model, *, enabled: bool = True) -> _Model:
    """Have ``generate`` of a Gemma 4 model read only what is new of a prompt that begins like the last conversation.

    >>> model = gemma4_compat.reuse_prefix(model)
    >>> pipeline("text-generation", model, tokenizer=tokenizer)(messages)  # and with the next turn in messages

    The cache of the last ``generate`` is kept. If the next prompt begins with the same tokens, images and sounds, the
    cache is cut to the longest common prefix, and ``generate`` reads the rest of the prompt, at least one token. So a
    chat passes its whole history every time, as without this. Works with the default cache and static ones, and with
    ``decode_fast``, whose static caches then have few lengths.

    Keys and values that are reused were computed by other forwards than a prompt that is read at once, so logits round
    otherwise, as with ``prefill_chunk_size``. docs/DECODING.md says by how much.

    A prompt is read from its beginning if weights, active adapters, attributes, hooks or the attention implementation
    have changed, or if you have written to the cache that the last call returned. What is written through ``.data``
    into a part of a weight that is in host memory may be missed, and so is what a hook of yours reads elsewhere: call
    this again afterwards, which forgets the conversation. Batches, beams, padding, videos, assistants, and calls with
    ``adapter_names`` or a cache of the caller's read their prompts as without this. ``decoding_statistics(model)``
    counts ``prompt_tokens_read``, ``prompt_tokens_reused`` and ``not_reused``.

    Args:
        model: a transformers model for text generation, quantized, dispatched or not, or a PEFT model around one.
        enabled: False undoes it, and releases the conversation.

    Returns:
        ``model`` itself.

    Raises:
        Gemma4CompatError: it is not a Gemma 4 model that generates.
    """
    inner = walk.unwrapped(model)
    if not family.is_gemma4(inner) or getattr(inner, "generation_config", None) is None:
        raise Gemma4CompatError(
            f"reuse_prefix requires a Gemma 4 model with generate(); got {arguments.shown(inner)}. Load it with "
            "AutoModelForCausalLM or AutoModelForImageTextToText."
        )
    vars(inner).pop(attached.TURNS, None)
    if enabled:
        vars(inner)[attached.TURNS] = Kept(inner)
    return model
