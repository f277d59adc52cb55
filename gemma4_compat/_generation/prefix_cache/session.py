"""What a model keeps for ``decode_fast(reuse_prefix=True)``, and one ``generate`` that may reuse it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._gemma4.models import media, walk
from gemma4_compat._generation.prefix_cache import conversation, rows
from gemma4_compat._generation.prompts import buckets
from gemma4_compat._graphs import decoder, signatures, unsupported
from gemma4_compat._graphs.guards import digests
from gemma4_compat._graphs.guards.model import ModelGuards
from gemma4_compat._offload.transfer import idle_hooks

#: Arguments of ``generate`` that are the prompt, or part of it.
_PROMPT = ("inputs", "input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
_MEDIA = tuple(name for _kind, names in media.MEDIA for name in names)
#: Arguments of ``generate`` that leave the forward of the prompt as it is.
_OF_THE_CALL = (
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer"),
    *("tokenizer", "trust_remote_code", "use_model_defaults"),
)
#: Options, and their values with which a prompt is read once, by one row.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic", "static"),
    "output_hidden_states": (None, False),
    "output_attentions": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "guidance_scale": (None, 1, 1.0),
    "dola_layers": (None,),
    "penalty_alpha": (None, 0, 0.0),
    "is_assistant": (None, False),
    "token_healing": (None, False),
}
_MODES = ("greedy_search", "sample")
#: Tokens: a shorter common beginning is read again, with the bits of a prompt that is read at once.
LEAST = 16
_log = logging.getLogger("gemma4_compat")
_running = threading.local()


class Kept:
    """The last conversation of a model. A copied or pickled model keeps nothing.

    Args:
        model: a transformers model.

    Attributes:
        room: tokens that a cache has room for at least, after ``decode_fast``: texts of many lengths share graphs.
    """

    room = 0

    def __init__(self, model: Any) -> None:
        self._counted = decoder.of(model).statistics
        self._lock = threading.Lock()
        self._last: conversation.Conversation | None = None
        self._guards: ModelGuards | None = None
        self.settled = False  # whether a forward has run: libraries may store weights in another way in the first one

    def take(self) -> conversation.Conversation | None:
        """The last conversation, which is the caller's then."""
        with self._lock:
            found, self._last = self._last, None
        return found

    def put(self, found: conversation.Conversation) -> None:
        """Keep a conversation in place of the last one."""
        with self._lock:
            self._last = found

    def seen(self, model: Any) -> tuple[Any, ...]:
        """What is equal as long as the model has the same weights, adapters, hooks, attributes and settings of torch.

        Values of weights are compared as well, because a cache was computed from them. Where the model is owned, only
        adapters and settings change.
        """
        import torch

        kind = model.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with self._lock, idle_hooks.put_back(model):  # a thread in a forward has them bypassed
            owned = decoder.of(model).owned
            if not (self._guards is None or owned or self._guards.check_under_any_adapter()):
                _log.debug("gemma4_compat: the last conversation is of no use: %s", self._guards.reason())
                self._guards = None
            if self._guards is None:
                self._guards = ModelGuards(walk.modules(model), offloaded=False)
            guards = self._guards
            values = () if owned else guards.contents()
            return guards, guards.active_adapters(), autocast, signatures.settings(), *values

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


def begin(model: Any, kept: Kept, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Session | None:
    """The session of a ``generate`` with these arguments; None if it has to read its prompt as it would otherwise."""
    given = dict(kwargs) if not args else kwargs | {"inputs": args[0]}
    ids: Any = given.get("inputs") if given.get("input_ids") is None else given["input_ids"]
    reason = _unsupported_reason(model, ids, given) if len(args) < 2 else "arguments of generate without their names"
    if reason is None and not decoder.of(model).owned and unsupported.chooses_adapters(model):
        reason = "adapters are chosen for this call"
    if reason is None:
        tokens = ids[0].detach().to("cpu", copy=True)
        found = media.items(model, tokens.tolist(), given)
        if found is not None:
            return Session(model, kept, tokens, found, given)
        reason = "images or sounds that do not match the prompt, or a video"
    kept.not_reused(reason)
    return None


def _unsupported_reason(model: Any, ids: Any, given: dict[str, Any]) -> str | None:
    """Why a prompt is read as it would be otherwise, whatever is kept."""
    import torch

    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.shape[1] or ids.dtype != torch.long:
        return "no input_ids"
    if ids.shape[0] != 1:
        return "several prompts at once"
    configs = [given.get("generation_config"), model.generation_config]

    def option(name: str) -> Any:
        if given.get(name) is not None:
            return given[name]
        return next(
            (value for value in (getattr(config, name, None) for config in configs) if value is not None), None
        )

    for name, value in given.items():
        if name in (*_PROMPT, *_MEDIA, *_OF_THE_CALL) or value is None or (name == "synced_gpus" and not value):
            continue
        if name in cache_names.NAMES or not hasattr(model.generation_config, name):
            return f"{name} is given"
    for name, values in _PLAIN.items():
        if option(name) not in values:
            return f"{name}={option(name)}"
    mask = given.get("attention_mask")
    if mask is not None:
        if mask.shape != ids.shape or not bool((mask == 1).all()):
            return "padding"
    elif option("pad_token_id") is not None and bool((ids == option("pad_token_id")).any()):
        return "padding"
    if model.training:
        return "training mode"
    return "virtual tokens" if unsupported.virtual_tokens_reason(model) is not None else None


def current(model: Any) -> Session | None:
    """The session of this thread, if it is this model's."""
    found: Session | None = getattr(_running, "session", None)
    return found if found is not None and found.model is model else None


@contextlib.contextmanager
def running(found: Session | None) -> Iterator[None]:
    """Inside, :func:`current` finds this session in this thread, and not one around it."""
    before = getattr(_running, "session", None)
    _running.session = found
    try:
        yield
    finally:
        _running.session = before


class Session:
    """Takes what the model keeps, if the prompt begins like it, and keeps what is read.

    Args:
        model: a transformers model.
        kept: of this model.
        ids: the prompt, int64 [length], on the CPU.
        items: its images and sounds.
        given: the arguments of ``generate``.

    Attributes:
        arguments: of ``generate``, without the images and sounds that are read already.
    """

    def __init__(self, model: Any, kept: Kept, ids: Any, items: list[media.Item], given: dict[str, Any]) -> None:
        self.model, self._kept, self._ids, self._items = model, kept, ids, items
        self._window = int(model.config.get_text_config().sliding_window)
        self._seen = kept.seen(model) if kept.settled else ()
        self._cache: Any = None
        self._copies: list[rows.Layers] = []
        self._needed = 0
        self._last = kept.take()
        self._reused = 0 if self._last is None else self._common(self._last)
        if not self._reused:
            self._last = None
        self.arguments = media.from_position(items, given, self._reused)

    def _common(self, last: conversation.Conversation) -> int:
        common = last.common(self._ids, self._items)
        found = last.longest(common)
        if found < LEAST:  # nobody waits for what was seen
            self._kept.not_reused("another beginning" if common < LEAST else "the window has passed the edited place")
        elif last.seen != self._seen:
            self._kept.not_reused("weights, adapters, hooks or settings of torch changed")
        elif not last.is_untouched():
            self._kept.not_reused("the cache that was returned has been written to")
        else:
            return found
        return 0

    def room(self, tokens: int) -> int:
        """How long the cache of a text of so many tokens is: ``decode_fast`` keeps its graphs while a text grows."""
        return buckets.room(max(tokens, self._kept.room)) if decoder.is_preferred(self.model) else tokens

    def prepare(self, model_kwargs: dict[str, Any], mode: str, needed: int) -> None:
        """Have ``generate`` use a cache that holds what is reused.

        Args:
            model_kwargs: with the new cache that ``generate`` has made.
            mode: of ``generate``.
            needed: tokens that the cache must have room for.

        Raises:
            RuntimeError: images or sounds are left out, but nothing can hold them.
        """
        fresh = cache_names.cache_in(model_kwargs)
        if self._cache is not None or mode not in _MODES or fresh is None or not rows.is_known(fresh):
            if self._reused:
                raise RuntimeError(
                    f"generate made a {type(fresh).__name__} in mode {mode}, which reuse_prefix did not expect"
                )
            return
        self._needed = needed
        if self._last is not None:
            name = next(name for name in cache_names.NAMES if model_kwargs.get(name) is not None)
            cache = self._last.cut(self._reused, fresh, needed)
            if cache is not fresh:
                self._take_over(fresh)
            fresh = model_kwargs[name] = cache
            self._copies, self._last = self._last.copies, None
        self._cache = fresh

    def _take_over(self, cache: Any) -> None:
        """Have transformers forget a static cache: before 5.15 it keeps the last one, and empties it for each call."""
        if vars(self.model).get("_cache") is cache:
            del self.model._cache

    @contextlib.contextmanager
    def reading(self, cache: Any, *, in_chunks: bool) -> Iterator[None]:
        """Around the forward of the prompt: afterwards, the rows of sliding layers are copied."""
        if cache is not self._cache or self._needed < self._window:  # all rows stay in the cache
            yield
        else:
            noted: rows.Layers = {}
            static = rows.length(cache) is not None
            with contextlib.nullcontext() if static and in_chunks else rows.noting(cache, noted, self._window):
                yield
            found = rows.of(cache)
            now = {index: noted.get(index) or found[index].copied() for index in rows.sliding(cache)}
            self._copies = conversation.tidied([*self._copies, now])
        # Before any code of the user's runs:
        if not self._seen:
            self._kept.settled, self._seen = True, self._kept.seen(self.model)
        for value in self._seen:
            if isinstance(value, digests.Number):
                value.hold_back()

    def end(self, output: Any) -> None:
        """Keep what ``generate`` has read and written. ``output``: what it returns."""
        import torch

        read = len(self._ids) - self._reused
        self._kept.count(read, self._reused)
        _log.debug("gemma4_compat: a prompt of %d tokens, %d of them held", len(self._ids), self._reused)
        cache, self._cache = self._cache, None
        plain = isinstance(output, torch.Tensor)
        # After `decode_fast` the caller gets another cache.
        returned = not plain and not (isinstance(output, dict) and cache_names.cache_in(output) is not cache)
        if cache is None or not self._seen or (returned and rows.length(cache) is not None):
            return  # a static cache that the caller has is the caller's
        self._take_over(cache)
        sequences = output if plain else output.sequences
        held = rows.held(cache)
        if 0 < held <= sequences.shape[1]:
            ids = sequences[0, :held].detach().to("cpu", copy=True)  # what the caller has may be written to
            found = (ids, self._items, self._seen, cache, self._copies, self._window)
            self._kept.put(conversation.Conversation(*found, returned=returned))
