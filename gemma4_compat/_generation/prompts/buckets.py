"""Prompts of any length by the graphs of a few sizes, ``decode_fast(any_length=True)``.

All tokens but the last are read in buckets, each padded on the right to a power of two. What it does to the
cache depends on numbers in tensors only: how many of its tokens are real, and where a sliding layer's window starts.
So one graph serves a size, whatever the cache holds. KV-shared layers do not run, as nobody reads their results.
The last token is read as a decoded one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemma4_compat._engine import dormant
from gemma4_compat._gemma4.cache import cache_names, prefill
from gemma4_compat._generation.prompts import overflow
from gemma4_compat._generation.prompts.prompts import MASKS, MAX_TOKENS, RECORDED, Prompt, is_text
from gemma4_compat._graphs import static_caches
from gemma4_compat._offload.transfer import streaming

#: Tokens of a bucket, for each row.
SIZES = (32, 64, 128, 256, 512, 1024, 2048)
#: Buckets of up to so many tokens take little memory; above, a second bucket is better than much padding.
SMALL = 512
#: Caches for buckets are as long as a multiple of this, or of a sixteenth of what is needed: graphs serve one length.
UNIT = 1024
_OWN = ("window", "real")  # inputs that the model does not get


class Bucket(Prompt):
    """A forward of some tokens of a prompt and of padding after them, whose logits nobody reads.

    Args:
        decoding: of the model.
        model: of transformers.
        inputs: of the model, and two tensors: ``window``, where in the old window and the new tokens the new window
            of a sliding layer is; ``real``, how many tokens are no padding.
        cache: a static cache.
        real: the same number.
    """

    def __init__(self, decoding: Any, model: Any, inputs: dict[str, Any], cache: Any, real: int) -> None:
        super().__init__(decoding, model, inputs, cache, static_caches.tensors(cache))
        self.added = real

    def forward(self, inputs: dict[str, Any]) -> Any:
        given = {name: value for name, value in inputs.items() if name not in _OWN}
        with static_caches.updated_by(self.cache, inputs["window"], inputs["real"], self.added):
            return self.model(**given)

    def _update_modes(self) -> tuple[Any, ...]:
        return ("bucket",)


def read(given: Any, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """Read what is new of a prompt.

    Args:
        given: the ``call.Decoder`` of this ``generate``.
        input_ids: (batch, tokens).
        generation_config: as ``GenerationMixin._prefill`` gets it.
        model_kwargs: the same.

    Returns:
        the model's output for the last token; None if the prompt has to be read as usual, and nothing has run then.
    """
    model, cache = given.model, cache_names.cache_in(model_kwargs)
    held, new = static_caches.held(cache), prefill.new_tokens(input_ids, generation_config, model_kwargs)
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if held is None or not 1 < new <= input_ids.shape[1] or not _is_plain(model, generation_config, model_kwargs):
        return None
    shaped = [tensor for tensor in (mask, positions) if tensor is not None]
    if positions is None or any(tensor.shape[1:] != (held + new,) for tensor in shaped):
        return None
    ids, positions = input_ids[:, -new:], positions[:, -new:]
    for start, end, size in cut(new - 1, given.largest_bucket(len(input_ids), cache)):
        part = _padded(ids[:, start:end], size), _padded(positions[:, start:end], size)
        inputs = _inputs(model, cache, *part, mask, held + start, end - start)
        if not given.read_bucket(inputs, end - start, first=start == 0):
            return None
    inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **model_kwargs)
    outputs = given(**inputs, return_dict=True)
    overflow.check(model, outputs, generation_config)
    return outputs


def room(tokens: int) -> int:
    """The length of a cache for so many tokens: one of few."""
    unit = UNIT
    while 16 * unit < tokens:
        unit *= 2
    return -(-tokens // unit) * unit


def _is_plain(model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether this is text whose last logits are asked for, and attention takes masks of this module."""
    text = model.config.get_text_config()
    configs = (generation_config, model.config, text)
    if any(getattr(config, name, False) for config in configs for name in RECORDED):
        return False
    if any(map(streaming.is_streamed, model.get_decoder().layers)):
        return False  # each bucket would bring the layers from the host
    return is_text(model_kwargs) and text._attn_implementation == "sdpa"


def cut(tokens: int, largest: int) -> Iterator[tuple[int, int, int]]:
    """Begin, end and padded size of each bucket of a row, of at most ``largest`` tokens.

    More than :data:`SMALL` tokens that would fill less than three quarters of a bucket are two buckets.
    """
    start = 0
    while start < tokens:
        left = min(tokens - start, largest)
        size = next(size for size in SIZES if size >= left)
        if size > SMALL and 4 * left <= 3 * size:
            size //= 2
        end = start + min(left, size)
        yield start, end, size
        start = end


def sizes(rows: int) -> list[int]:
    """The sizes of buckets of so many rows, the largest first: long ones have :data:`prompts.MAX_TOKENS` in all."""
    return [size for size in reversed(SIZES) if size <= SMALL or size * rows <= MAX_TOKENS]


def _padded(tokens: Any, size: int) -> Any:
    """The tokens and zeros after them, in a tensor of their own, whose strides do not tell how long the prompt is."""
    made = tokens.new_zeros((len(tokens), size))
    made[:, : tokens.shape[1]] = tokens
    return made


def _inputs(model: Any, cache: Any, ids: Any, positions: Any, mask: Any, held: int, real: int) -> dict[str, Any]:
    """The inputs of a bucket.

    Args:
        model: of transformers.
        cache: holds ``held`` tokens.
        ids: (batch, size), padded on the right.
        positions: the same.
        mask: (batch, tokens), 0 for padding on the left; None without padding.
        held: see ``cache``.
        real: tokens of the bucket.
    """
    import torch

    device, size = ids.device, ids.shape[1]
    full, slots = static_caches.length(cache), static_caches.window(cache)
    query = torch.arange(held, held + size, device=device)[:, None]
    dropped = max(held - slots, 0)  # of a full window: its first slot has this token
    slot = torch.arange(slots, device=device)
    near = torch.cat((slot + dropped, query[:, 0]))  # which token is in which slot of a window, then the new ones
    there = torch.cat((slot + dropped < held, torch.ones(size, dtype=torch.bool, device=device)))
    every = torch.arange(full, device=device)
    masks = {
        MASKS[0]: every <= query,
        MASKS[1]: there & (near <= query) & (query - near < model.config.get_text_config().sliding_window),
    }
    if mask is not None:
        seen = torch.nn.functional.pad(mask.bool(), (0, max(full, held + size) - mask.shape[1]), value=True)
        columns = {MASKS[0]: seen[:, :full], MASKS[1]: seen[:, near]}
        masks = {name: masks[name] & columns[name][:, None] for name in MASKS}
    else:
        masks = {name: made.expand(len(ids), *made.shape) for name, made in masks.items()}
    total = held + real
    if total <= slots:
        window = torch.where(slot < held, slot, slots + slot - held).clamp_(max=slots + size - 1)
    else:
        window = torch.where(slot < slots - real, slot + (total - slots - dropped), slot + real)
    inputs = {
        "input_ids": ids,
        "position_ids": positions,
        "attention_mask": {name: made[:, None].contiguous() for name, made in masks.items()},
        cache_names.of(type(model).forward): cache,
        "use_cache": True,
        "logits_to_keep": 1,
        "return_dict": True,
        "window": window,
        "real": torch.full((), real, device=device),
    }
    return inputs | ({prefill.UNREAD: True} if _skips_shared_layers(model) else {})


def _skips_shared_layers(model: Any) -> bool:
    """Whether the patch ``transformers-unread-chunks`` is there to skip KV-shared layers."""
    if not getattr(model.config.get_text_config(), "num_kv_shared_layers", 0):
        return False
    if not dormant.is_installed(prefill.UNREAD_PATCH):
        return False
    dormant.activate(prefill.UNREAD_PATCH)
    return all(type(layer).__name__ == prefill.UNREAD_LAYER for layer in model.get_decoder().layers)
