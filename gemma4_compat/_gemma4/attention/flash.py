"""Flash attention for a model with heads wider than a flash kernel takes.

The heads of Gemma 4's full-attention layers are 512 wide. These layers, and sliding layers whose mask flash kernels
cannot express (the tokens of an image attend to each other), run scaled dot product attention with a mask that it
takes; the other layers run flash. A four-dimensional mask tells a layer to do so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.runtime.views import PlainView
from gemma4_compat._gemma4.attention import layers, packing
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._gemma4.models import family

#: The widest head that flash kernels take.
WIDEST = 256
#: What most models run, and what each of their layers asks for: known without a look at the registry.
PLAIN = ("sdpa", "eager")


class Sdpa(PlainView):
    """A configuration that asks for scaled dot product attention and otherwise equals the given one."""

    _attn_implementation = "sdpa"


def is_flash(implementation: str | None) -> bool:
    """Whether this attention takes a flash kernel's masks: from a package, or from a kernel hub."""
    if implementation in PLAIN:
        return False
    from transformers import masking_utils

    known = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    return known.get(implementation) is masking_utils.flash_attention_mask


def is_plain(config: Any) -> bool:
    """Whether a configuration says that its text model runs no flash kernel; False if it takes more to tell.

    Called for each token: it bypasses upstream's checks of each name, which Dynamo cannot follow.
    """
    import torch

    if config is None or torch.compiler.is_compiling():
        return config is None
    own = object.__getattribute__(config, "__dict__")
    text = own["text_config"] if "text_config" in own else config  # noqa: SIM401
    name = "_attn_implementation_internal"
    return name in (own := object.__getattribute__(text, "__dict__")) and own[name] in PLAIN


def is_split(config: Any) -> bool:
    """Whether this is the configuration of a Gemma 4 text model in which only the narrow layers run flash."""
    if isinstance(config, Sdpa) or not str(getattr(config, "model_type", "")).startswith("gemma4"):
        return False
    return is_flash(config._attn_implementation) and (family.width_of_full_attention(config) or 0) > WIDEST


def full_mask(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The mask of full attention. ``arguments``: for ``create_causal_mask``, the function ``original``.

    A flash kernel separates packed sequences by their positions even if there is an empty cache, or a mask that hides
    nothing; so does this mask.
    """
    if sequences := _packed(arguments):
        arguments["and_mask_function"] = (
            sequences
            if (given := arguments.get("and_mask_function")) is None
            else lambda *at: given(*at) & sequences(*at)
        )
        arguments["position_ids"] = None  # from 5.23 on upstream would ask these functions about positions in a text
    return original(**{**arguments, "config": Sdpa(arguments["config"])})


def sliding_mask(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The mask of a sliding layer: a flash kernel's, or a four-dimensional one that no flash kernel can express.

    ``arguments``: for ``create_sliding_window_causal_mask``, the function ``original``.
    """
    import torch

    embeds: Any = arguments["inputs_embeds"]
    cache: Any = cache_names.cache_in(arguments)
    mask = arguments.get("attention_mask")
    batch, length = embeds.shape[:2]
    blocks = arguments.get("block_sequence_ids")
    by_sdpa = arguments | {"config": Sdpa(arguments["config"])}
    if length == 1:  # the last token sees no later token
        blocks = None
    elif any(arguments.get(name) is not None for name in ("or_mask_function", "and_mask_function")):
        return original(**by_sdpa)
    if (blocks is not None and bool((blocks >= 0).any())) or _packed_rows(arguments):
        return original(**by_sdpa)
    arguments = {name: value for name, value in arguments.items() if name != "block_sequence_ids"}
    if not getattr(cache, "is_compileable", False):
        return original(**arguments)
    # A static cache is longer than its contents; a mask as long as the contents tells a kernel where they end.
    if mask is None:
        seen = int(cache.get_seq_length())
        arguments["attention_mask"] = torch.ones(batch, seen + length, dtype=torch.bool, device=embeds.device)
    found = original(**arguments)
    if found is None and _unwritten(cache, length, arguments["attention_mask"].shape[1]):  # by an older transformers
        return original(**{**arguments, "config": Sdpa(arguments["config"])})
    return found


def _unwritten(cache: Any, length: int, written: int) -> bool:
    """Whether a sliding layer of the cache returns more keys than were ``written``."""
    kinds = getattr(cache, "is_sliding", [])
    layer = kinds.index(True) if True in kinds else 0
    return int(cache.get_mask_sizes(length, layer)[0]) > written


def _packed_rows(arguments: dict[str, Any]) -> bool:
    """Whether a row has several sequences, which a flash kernel tells apart only in one row without padding."""
    from transformers import masking_utils

    mask: Any = arguments.get("attention_mask")
    embeds, positions = arguments["inputs_embeds"], arguments.get("position_ids")
    cache = cache_names.cache_in(arguments)
    rows = embeds.shape[0]
    if positions is None or (rows == 1 and mask is None):
        return False
    if mask is None and cache is None:
        return masking_utils.find_packed_sequence_indices(positions) is not None
    found = packing.numbers(arguments["config"], embeds, mask, cache, positions)
    return found is not None and (rows > 1 or not bool(mask.all()))


def _packed(arguments: dict[str, Any]) -> Callable[..., Any] | None:
    """A mask function that separates packed sequences if flash kernels do and sdpa's masks do not."""
    import torch
    from transformers import masking_utils

    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    cache = cache_names.cache_in(arguments)
    batch, length = arguments["inputs_embeds"].shape[:2]
    if positions is None or batch > 1 or length == 1 or (mask is None and cache is None):
        return None
    if torch.compiler.is_compiling() or positions.shape[-1] != length:
        return None
    if mask is not None and (mask.ndim != 2 or mask.shape[1] != length or not bool(mask.all())):
        return None
    if cache is not None and int(cache.get_seq_length()) > 0:
        return None
    number = masking_utils.find_packed_sequence_indices(positions)
    if number is None:
        return None
    number = number.to(arguments["inputs_embeds"].device)

    def same(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return number[batch, query] == number[batch, key.clamp(max=length - 1)]  # a static cache is longer

    return same


@functools.lru_cache(maxsize=64)
def by_layer(flash: Callable[..., Any], sdpa: Callable[..., Any]) -> Callable[..., Any]:
    """The attention function of a Gemma 4: ``sdpa`` where ``flash`` cannot run, otherwise ``flash``.

    The same two always give the same function: if the lookup returns another, a graph of a decoding step is useless.
    """

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        wide = query.shape[-1] > WIDEST
        deep = attention_mask is not None and attention_mask.ndim == 4
        if not layers.is_text(module) or not (wide or deep) or kwargs.get("cache") is not None:
            return flash(module, query, key, value, attention_mask, **kwargs)
        mask = attention_mask if attention_mask is None or deep else _expanded(attention_mask, query, key)
        starts = kwargs.get("cu_seq_lens_q")
        if starts is not None:
            return _of_sequences(sdpa, starts, module, query, key, value, mask, **kwargs)
        return sdpa(module, query, key, value, mask, **kwargs)

    return attention


def _expanded(mask: Any, query: Any, key: Any) -> Any:
    """A flash kernel's mask, which marks the absent tokens, as a mask for sdpa; the last query sees the last key."""
    import torch

    mask = torch.nn.functional.pad(mask.bool(), (0, key.shape[2] - mask.shape[1]))[:, None, None]
    if query.shape[2] == 1:
        return mask
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=mask.device)
    return mask & seen.tril(key.shape[2] - query.shape[2])


def _of_sequences(
    sdpa: Callable[..., Any], starts: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
) -> Any:
    """Attention inside each sequence, as in flash kernels. Sequences begin at ``starts``, counted over all rows."""
    import torch

    batch, _, length, _ = query.shape
    where = torch.arange(batch * length, device=query.device)
    number = torch.bucketize(where, starts.to(query.device), right=True)
    inside = (number[:, None] == number) & (where[:, None] >= where)
    if batch == 1:
        return sdpa(module, query, key, value, inside[None, None] if mask is None else mask & inside, **kwargs)
    query, key, value = (
        each.transpose(0, 1).reshape(1, each.shape[1], batch * length, -1) for each in (query, key, value)
    )
    found, weights = sdpa(module, query, key, value, inside[None, None], **kwargs)
    return found.reshape(batch, length, *found.shape[2:]), weights
