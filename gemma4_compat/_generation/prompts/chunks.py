"""A prompt in chunks, after ``decode_fast``, where the memory that is left does not hold one that is read at once.

Chunks round differently from one forward. So they are read only if one forward is estimated not to fit, unless
the bits are to be PyTorch's, and in any case where it has run out of memory. The cache then holds again what it held.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._gemma4.cache import cache_names, prefill
from gemma4_compat._generation.prompts import prompts
from gemma4_compat._generation.prompts.room import Room
from gemma4_compat._graphs import decoder, static_caches

_log = logging.getLogger("gemma4_compat")


def may_be_cut(model: Any, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> int:
    """How many new tokens of ``input_ids`` (batch, tokens) transformers can read in chunks; 0 if it cannot.

    Images can be cut where they are encoded before, sounds and embeddings never; nor can a prompt of which outputs of
    every position are asked for, or that several processes read together.
    """
    import torch

    cache, text = cache_names.cache_in(model_kwargs), model.config.get_text_config()
    if cache is None or not static_caches.is_static(cache):
        return 0
    held, new = static_caches.held(cache), prefill.new_tokens(input_ids, generation_config, model_kwargs)
    if held is None or not 1 < new <= input_ids.shape[1] or (held and _before("5.22")):
        return 0
    given = dict(model_kwargs)
    if given.pop("mm_encoder_outputs", None) and _before("5.23"):
        return 0
    configs = (generation_config, model.config, text)
    if any(getattr(config, name, False) for config in configs for name in prompts.RECORDED):
        return 0
    if not prompts.is_text(given) or any(given.get(name) is not None for name in _media()):
        return 0
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        return 0
    return new


def read(
    decoding: decoder.Decoding,
    model_kwargs: dict[str, Any],
    room: Room,
    at_once: Callable[[], Any],
    in_chunks: Callable[[int], Any],
    *,
    estimated: bool,
) -> Any:
    """Read a prompt that :func:`may_be_cut`.

    Args:
        decoding: of the model.
        model_kwargs: as ``_prefill`` gets them.
        room: its memory.
        at_once: reads it in one forward, or in buckets.
        in_chunks: reads it in chunks of that many tokens.
        estimated: whether an estimate is enough to read chunks; otherwise memory must have run out.

    Raises:
        torch.OutOfMemoryError: the smallest chunk does not fit either, with all graphs given back.
    """
    import torch

    cache, given, size = cache_names.cache_in(model_kwargs), dict(model_kwargs), None
    if estimated and not room.fits():
        size = next(iter(room.sizes()), None)
        if size is not None:
            _tell(decoding, size, "at once it would take more memory than is left")
    # Windows that hold something are copied to the host, unless there is room for two such forwards.
    spacious = static_caches.held(cache) and size is None and room.fits(times=2)
    before, last = None if spacious else static_caches.Held(cache), False
    with contextlib.ExitStack() as stack:
        while True:
            try:
                return at_once() if size is None else in_chunks(size)
            except torch.OutOfMemoryError:
                if before is None or last or not (_smaller(room, size) or decoding.captured):
                    raise
            # Not in the handler: the error holds what the forward had.
            before.restore()
            model_kwargs.clear()
            model_kwargs.update(given)
            with decoding.lock.held():
                decoding.prompts.release()
            smaller = _smaller(room, size)
            if smaller:
                size = smaller[0]
                _tell(decoding, size, "it ran out of memory")
            else:  # once more, without any graph
                decoding.give_back()
                stack.enter_context(decoding.prompts.paused())
                last = True


def _smaller(room: Room, size: int | None) -> list[int]:
    """Chunks to try after one of this size, or a prompt that is read at once, the largest that fits first."""
    return [one for one in room.sizes() if size is None or one < size]


def _tell(decoding: decoder.Decoding, size: int, why: str) -> None:
    """Say that chunks are read: once for a model as a warning, later at level DEBUG."""
    level = logging.DEBUG if decoding.statistics.prompts_in_chunks else logging.WARNING
    decoding.statistics.prompts_in_chunks += 1
    text = "gemma4_compat: a prompt is read in chunks of %d tokens, which round differently (docs/DECODING.md): %s"
    _log.log(level, text, size, why)


def _before(version: str) -> bool:
    return versions.admits(f"<{version}", versions.current("transformers") or "0")


def _media() -> tuple[str, ...]:
    """Inputs that belong to media as a whole, as this transformers names them."""
    from transformers.generation import utils

    found: tuple[str, ...] = getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())
    return found
