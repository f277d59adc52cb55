"""How many tokens of a prompt one forward reads: for a plan, and for a model that is about to read one.

Chunks round differently from one forward. So after ``decode_fast`` they are read only if one forward is estimated not
to fit, unless the bits are to be PyTorch's, and in any case where it has run out of memory. The cache then holds again
what it held.

A chunk of c tokens brings what is streamed (B bytes) over a bus of s bytes a second once, while it computes for c t
seconds. So it takes the longer of B / s and c t, and a larger chunk wins until c = B / (s t). A 4-bit weight is half a
byte and two operations per token; at f operations a second that makes f / (4 s) tokens: some 600 for 3e13 operations
and 12 GiB/s, 2,000 for 4e14 and 49. A chunk brings all experts and computes few for a token: 8 of 128 ask for 16 times
as many tokens. All this is computed, not measured. So the largest chunk that fits is taken where anything is streamed.
Otherwise larger chunks gain little, and those of up to ``prompts.MAX_TOKENS`` are replayed as a CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._gemma4 import host
from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._gemma4.cache import cache_names, prefill
from gemma4_compat._generation.prompts import prompts
from gemma4_compat._graphs import decoder, static_caches
from gemma4_compat._memory import formulas
from gemma4_compat._memory.blueprint import Blueprint, describe
from gemma4_compat._memory.formulas import Load
from gemma4_compat._memory.use import Share, reading

#: Tokens of a chunk, for each sequence.
SIZES = (8192, 4096, 2048, 1024, 512, 256, 128)
#: Tokens of a prompt, over all rows, whose memory nobody has to know in advance.
_FEW = 512
_AWAY = ("cpu", "disk")
_log = logging.getLogger("gemma4_compat")


def sizes(*, tokens: int, batch: int, streams: bool) -> list[int]:
    """The chunks in which a prompt may be read, the largest first.

    Args:
        tokens: of the prompt, for each sequence.
        batch: sequences.
        streams: whether each chunk brings weights over the bus.
    """
    most = SIZES[0] if streams else max(prompts.MAX_TOKENS // batch, SIZES[-1])
    return [size for size in SIZES if size < tokens and size <= most]


def first_that_fits(found: list[int], fits: Callable[[int], bool]) -> int | None:
    """The first of these sizes that fits; the last if none does; None without any."""
    return next(filter(fits, found), found[-1] if found else None)


class Room:
    """The memory for a prompt that a model on one accelerator is about to read into a static cache.

    Args:
        model: of transformers.
        cache: static.
        batch: sequences.
        new: tokens that are read, for each sequence.
    """

    def __init__(self, model: Any, cache: Any, batch: int, new: int) -> None:
        self._model, self._cache, self._new = model, cache, new
        self._decoding = decoder.of(model)
        self._load = Load(
            context=static_caches.length(cache),
            batch=batch,
            prompt=(static_caches.held(cache) or 0) + new,
            attention="eager" if model.config.get_text_config()._attn_implementation == "eager" else "sdpa",
            fast=True,
        )

    def fits(self, chunk: int | None = None, *, times: int = 1) -> bool:
        """Whether a forward that reads a chunk, or all that is new, fits so many times. True if nobody knows."""
        if self._load.batch * self._new <= _FEW:
            return True
        free = self.free()
        return free is None or times * self.needed(chunk) <= free

    def sizes(self) -> list[int]:
        """The chunks in which the prompt may be read, the largest that fits first."""
        known = self._shapes
        streams = known is not None and bool(known[1].streamed or known[1].looked_up)
        found = sizes(tokens=self._new, batch=self._load.batch, streams=streams)
        first = first_that_fits(found, self.fits)
        return [size for size in found if first is not None and size <= first]

    def needed(self, chunk: int | None = None) -> int:
        """Bytes of a forward that reads a chunk, or all that is new; 0 if nobody knows."""
        if self._shapes is None:
            return 0
        cut, share = self._shapes
        tokens = self._new if chunk is None else min(chunk, self._new)
        load = replace(self._load, own_attention=self._own)
        load = replace(load, prefill_chunk=None if tokens == self._load.prompt else tokens)
        found = reading(cut, share, load)
        if static_caches.tensors(self._cache) is not None or self._decoding.memory_of(self._cache) is not None:
            found -= sum(formulas.kv_cache(block, load, cut.item, prefill=False) for block in share.computed)
        return found

    @functools.cached_property
    def _own(self) -> bool:
        """Whether kernels of this package compute attention; with PyTorch's a forward takes more."""
        import torch

        found = (block.attention for block in self._shapes[1].computed) if self._shapes else ()
        heads = {(one.heads, one.kv_heads, one.head_dim) for one in found if one is not None}
        try:
            return prompts.computes_attention(self._decoding, self._model, self._cache, heads)
        except torch.OutOfMemoryError:  # no room to try them
            return False

    def free(self) -> int | None:
        """Bytes that PyTorch can still allocate, graphs of prompts given back; None if nobody knows."""
        if host.free_memory(self._model.device) is None or self._shapes is None:
            return None
        (cut, share), kept = self._shapes, 0
        if any(self._decoding.steps.graphs()):
            streamed = share.stream_sizes(few=cut.experts is not None)
            kept = formulas.graph(cut, share.computed, streamed, self._load, head=True)
        return host.free_memory(self._model.device, kept)

    @property
    def _shapes(self) -> tuple[Blueprint, Share] | None:
        """The model as blocks, looked at once after each ``decode_fast``; None if it cannot."""
        if self._decoding.shapes is None:
            try:
                self._decoding.shapes = shapes(self._model)
            except Exception as error:  # noqa: BLE001  # a model of the user's: it is read as it would be without this
                _log.debug("gemma4_compat: the memory of prompts is not known: %s", error)
                self._decoding.shapes = ()
        return self._decoding.shapes or None


def shapes(model: Any) -> tuple[Blueprint, Share]:
    """A loaded model's blocks, and which of them its one accelerator has."""
    placement: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {}
    cut = describe(model)

    def is_away(name: str) -> bool:
        entry = device_maps.entry_for(name, placement)
        return entry is not None and placement[entry] in _AWAY

    away = [block for block in cut.blocks if is_away(block.name)]
    resident = [block for block in cut.blocks if not is_away(block.name)]
    return cut, Share(
        resident=resident,
        looked_up=[block for block in resident if block.experts_stored is not None and is_away(block.experts_name)],
        streamed=[block for block in away if block.kind == "layer"],
        evicted=[block for block in away if block.kind != "layer"],
    )


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
    if decoding.head is not None and not room.fits(times=2):
        decoding.give_back_head()  # what it takes must not have a prompt be read in other chunks
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
