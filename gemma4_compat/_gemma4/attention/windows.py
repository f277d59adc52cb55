"""Attention of a sliding layer by blocks of queries, each with the keys that it may see.

A query of a sliding layer sees a window of keys, 512 or 1,024. Upstream gives all queries and all keys to one call of
``scaled_dot_product_attention``, with a mask. Here a block of queries, as long as a window, gets its own keys and
those of a window before, also later ones if the mask shows them: tokens of an image attend to each other. The mask
decides, whatever made it: if a query sees a key that its block lacks, all is computed by one call. In training that
``train_fast`` asked for, :func:`instead_of_mask` gives texts in one row what takes no memory for all pairs.

Blocks of queries and of keys begin and end where the tiles of a kernel do, at multiples of :data:`UNIT`, so that a
kernel adds the same numbers in the same order. Whether a result has the bits of one call depends on the kernel, so
:func:`_has_the_bits` tries it. In gradients of keys and values the order of the sums always differs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gemma4_compat._engine import dormant, settings
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._engine.runtime.selftest import SelfTests
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.attention import layers, masks, packing, tracing
from gemma4_compat._gemma4.attention.block_layout import UNIT, Layout
from gemma4_compat._gemma4.cache import cache_names

ID = "transformers-sliding-windows"

#: Queries of a block, at least, if there are gradients on the CPU: its kernel rounds those of keys and values once for
#: each tile of queries, and takes larger tiles from 768 queries on.
ROUNDED = 1024
#: Queries from which windows are used, by device. On a CPU they win as soon as half of the scores remain. On a GPU
#: with the switch: what benchmarks/training/sliding_windows.py says of an H200. Without it the first prompt of a
#: shape is computed both ways, and no plan counts that: only where windows save a quarter of the time.
LEAST = {"cpu": 0}
LEAST_ON_GPU, _LEAST_UNASKED = 4_096, 16_384
#: Where :mod:`products` compute attention in training.
MULTIPLYING = ("cuda", "gpu")
#: Units of keys after a block that may be tried: an image has at most 1,120 tokens.
_AFTER = range(4)

_TEXT_MODELS = ("Gemma4TextModel", "Gemma4UnifiedTextModel")
#: Text models that ``train_fast`` asked something of, by the id of their configuration, which is all that masks know.
_asked_models: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

_inside = threading.local()
_tests = SelfTests(limit=1024)


def each_inside(manager: contextlib.AbstractContextManager[Any]) -> contextlib.AbstractContextManager[None]:
    """Inside, this thread enters ``manager`` around each call of attention of a Gemma 4, once the patch is awake."""
    return in_place.here(_inside, manager=manager)


def planned() -> contextlib.AbstractContextManager[None]:
    """Inside, this thread computes tensors without memory by windows, as with the opt-in on a GPU.

    Their masks show what those of a text show: nobody can read them.
    """
    dormant.activate(ID)  # texts may be shorter than those for which it is
    return in_place.here(_inside, planned=True)


def _is_planned() -> bool:
    return getattr(_inside, "planned", False)


@functools.lru_cache(maxsize=16)
def over(found: Callable[..., Any]) -> Callable[..., Any]:
    """The attention function of a Gemma 4 that runs ``found`` by windows where it can; another ``found`` as it is.

    The same function for the same ``found``: a captured decoding step is useless when another function is looked up.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from gemma4_compat._gemma4.attention import unseen_keys

    if found is not sdpa_attention_forward and found is not unseen_keys.attention:
        return found  # what another library has registered
    return functools.partial(attention, found)


def attention(
    whole: Callable[..., Any], module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any
) -> Any:
    """What ``whole`` computes, transformers' function for ``sdpa``; see there for the arguments.

    Unless asked for, by windows only if no gradient is needed and the bits are the same.
    """
    manager = getattr(_inside, "manager", None)
    if manager is None or not layers.is_text(module):
        return _attention(whole, module, query, key, value, attention_mask, **kwargs)
    with manager:
        return _attention(whole, module, query, key, value, attention_mask, **kwargs)


def _attention(
    whole: Callable[..., Any], module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    given = (module, query, key, value, attention_mask)
    by_text = packing.is_by_text(attention_mask)
    if by_text:
        whole = functools.partial(packing.written_out, whole)
    if query.shape[2] == 1:
        return whole(*given, **kwargs)
    by_windows, by_products = _asked(module)
    if by_products and _may_multiply(*given, **kwargs):
        from gemma4_compat._gemma4.attention import products

        scaling = kwargs["scaling"] if kwargs.get("scaling") is not None else query.shape[3] ** -0.5
        window = getattr(module, "sliding_window", None)
        every = _is_replayed(module, query)
        return products.attention(query, key, value, attention_mask, scaling, window=window, every=every), None
    if attention_mask is None or not _can_be(*given, enabled=by_windows, **kwargs):
        return whole(*given, **kwargs)
    gradients = _gradients(query, key, value)
    if not by_windows and (gradients or by_text):
        return whole(*given, **kwargs)
    block = _block(module, query, gradients)
    layout = tracing.once(attention_mask, attached.LAYOUT, _layout, module.sliding_window, block)
    if layout is None:
        return whole(*given, **kwargs)
    blocks = tracing.made(attention_mask, attached.WINDOWS, packing.blocks, len(query), layout, module.sliding_window)
    if not (by_windows or _has_the_bits(whole, layout, blocks, given, **kwargs)):
        return whole(*given, **kwargs)
    return _by_windows(whole, layout, blocks, given, **kwargs), None


def _asked(module: Any) -> tuple[bool, bool]:
    """Whether windows and products are asked for: by ``train_fast`` in training, else for the whole process."""
    asked: tuple[bool, bool, float] | None = vars(module).get(attached.TRAINED_ATTENTION) if module.training else None
    return asked[:2] if asked is not None else (_is_planned() or settings.is_enabled(ID),) * 2


def ask(model: Any, *, windows: bool, products: bool) -> None:
    """Have training compute the text layers of a model this way, whatever GEMMA4_COMPAT_ENABLE says."""
    for module in _asking(model):
        vars(module)[attached.TRAINED_ATTENTION] = windows, products, 0
        if (windows or products) and type(module).__name__ in _TEXT_MODELS:
            _asked_models[id(module.config)] = module
            dormant.activate(ID)  # masks are made before the text model is called


def replay(module: Any, tokens: float) -> None:
    """Say that graphs may serve batches of up to so many tokens, over all rows, of a layer that is asked something.

    Its products must then not depend on padding, or on where texts begin.
    """
    if attached.TRAINED_ATTENTION in vars(module):
        vars(module)[attached.TRAINED_ATTENTION] = *vars(module)[attached.TRAINED_ATTENTION][:2], tokens


def _is_replayed(module: Any, query: Any) -> bool:
    """Whether a graph may serve these queries, (rows, heads, queries, width)."""
    *_, tokens = vars(module).get(attached.TRAINED_ATTENTION, (0,))
    return bool(query[:, 0, :, 0].numel() <= tokens)


def forget(model: Any) -> None:
    """Take the marks off; GEMMA4_COMPAT_ENABLE decides."""
    for module in _asking(model):
        if vars(module).pop(attached.TRAINED_ATTENTION, None) is not None:
            _asked_models.pop(id(getattr(module, "config", None)), None)


def trained(config: Any) -> Any:
    """The text model of this configuration if it trains, and ``train_fast`` asked something of it; else None."""
    import torch

    model = None if torch.compiler.is_compiling() else _asked_models.get(id(config))
    return model if model is not None and model.config is config and model.training else None


def instead_of_mask(sliding: bool, given: Mapping[str, Any]) -> Any:
    """:func:`packing.by_text` for a training step with several texts in a row, if its layers take that; else None.

    Args:
        sliding: whether it is for the sliding layers, or for the others.
        given: what transformers' function that makes the mask is called with, by name.
    """
    config, embeds = given.get("config"), given.get("inputs_embeds")
    model = trained(config)
    if model is None or not tracing.is_real(embeds) or tracing.is_traced(embeds):
        return None
    if not getattr(config, "is_causal", True):
        return None
    by_windows, by_products = _asked(model)
    if any(given.get(name) is not None for name in masks.FUNCTIONS) or not _is_looked_up(config):
        return None
    by_blocks = sliding and by_windows and _slides(config, embeds)
    if not (by_blocks or (by_products and _multiplies(embeds))):
        return None
    texts = _texts(config, embeds, given)
    images = given.get(masks.IMAGES)  # the 12B always has them: -1 for other tokens
    return None if texts is None or (images is not None and bool((images >= 0).any())) else packing.by_text(*texts)


def _texts(config: Any, tokens: Any, given: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """What :func:`packing.by_text` takes, of rows that hold several texts; else None. ``tokens``: or embeddings."""
    from transformers import masking_utils

    arguments = given.get("attention_mask"), cache_names.cache_in(given), given.get("position_ids")
    found = masking_utils._preprocess_mask_arguments(config, tokens, *arguments, given.get("layer_idx") or 0)
    early, mask, texts, length, keys, *_ = found
    if early or texts is None or length != keys or (mask is not None and mask.shape != texts.shape):
        return None
    return texts, mask


def are_texts(config: Any, given: Mapping[str, Any], types: Any) -> bool:
    """Whether a training step that ``train_fast`` asked something of packs texts, and types of tokens mark no image.

    Masks of packed texts are the same without the types, and :func:`instead_of_mask` may then stand for them.

    Args:
        config: of the text model.
        given: what the multimodal model is called with, by name.
        types: of its tokens, ``mm_token_type_ids``. They are read, and so are positions, which waits for the GPU.
    """
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    tokens: Any = embeds if ids is None else ids
    if trained(config) is None or given.get("position_ids") is None or isinstance(given.get("attention_mask"), dict):
        return False
    if not all(tracing.is_real(one) and not tracing.is_traced(one) for one in (tokens, types)):
        return False
    if not _is_looked_up(config) or types.shape != tokens.shape[:2] or bool(((types == 1) | (types == 2)).any()):
        return False
    return _texts(config, tokens, given) is not None


def _is_looked_up(config: Any) -> bool:
    """Whether the layers of this configuration find :func:`attention`, and transformers' masks."""
    from transformers import masking_utils, modeling_utils

    if config._attn_implementation != "sdpa":
        return False
    found = modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
    making = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    return getattr(found, "func", None) is attention and making is masking_utils.sdpa_mask


def _slides(config: Any, embeds: Any) -> bool:
    """Whether sliding layers have windows for such a text. ``embeds``: (rows, tokens, width)."""
    import torch

    tokens, block = embeds.shape[1], _block(config, embeds, torch.is_grad_enabled())
    enough = tokens >= least(_device(embeds), enabled=True)
    return enough and Layout.of(int(config.sliding_window), block, tokens, tokens, 0) is not None


def _multiplies(embeds: Any) -> bool:
    """Whether layers have products for it."""
    import torch

    from gemma4_compat._gemma4.attention import products

    device = embeds.device
    if device.type not in MULTIPLYING:
        return False
    cast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if cast else embeds.dtype
    return dtype in products.DTYPES and products.work(device, dtype)


def _asking(model: Any) -> Iterator[Any]:
    return (one for one in model.modules() if layers.is_text(one) or type(one).__name__ in _TEXT_MODELS)


def is_asked(model: Any) -> bool:
    """Whether windows or products are asked for in a text model as it is now."""
    return any(_asked(model))


def unavailable() -> str | None:
    """Why neither can be had; None if they can."""
    return None if dormant.is_installed(ID) else f"the patch {ID} is off"


def _gradients(*tensors: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def least(device: str, *, enabled: bool) -> int:
    """Queries from which windows are used on a device."""
    return LEAST.get(device, LEAST_ON_GPU if enabled else _LEAST_UNASKED)


def _device(tensor: Any) -> str:
    return "gpu" if _is_planned() else tensor.device.type


def _block(module: Any, query: Any, gradients: bool) -> int:
    """Queries of a block."""
    unit = ROUNDED if gradients and _device(query) == "cpu" else UNIT
    return -(-int(module.sliding_window) // unit) * unit


def _can_be(module: Any, query: Any, key: Any, value: Any, mask: Any, *, enabled: bool, **kwargs: Any) -> bool:
    """Whether a sliding layer of a Gemma 4 computes so much that blocks of it take at most half of that."""
    import torch

    if torch.compiler.is_compiling() or not layers.is_text(module) or not getattr(module, "sliding_window", None):
        return False
    tensors = (query, key, value, mask)
    if any(not (_is_planned() or tracing.is_real(tensor)) or tensor.ndim != 4 for tensor in tensors):
        return False
    queries, keys = query.shape[2], key.shape[2]
    block = _block(module, query, _gradients(query, key, value))
    if queries < least(_device(query), enabled=enabled) or 2 * queries * block > queries * keys:
        return False
    if (
        not packing.fits(mask, query, keys)
        or mask.requires_grad
        or kwargs.get("dropout")
        or kwargs.get("position_bias") is not None
    ):
        return False
    return not tracing.is_traced(query)


def _may_multiply(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> bool:
    """Whether :mod:`products` compute a layer that trains."""
    import torch

    if _device(query) not in MULTIPLYING or torch.compiler.is_compiling():
        return False
    from gemma4_compat._gemma4.attention import products

    if not products.serve(module, query, key, value, mask, **kwargs):
        return False
    if _is_planned():
        return products.are_known()
    real = all(map(tracing.is_real, (query, key, value, *(() if mask is None else (mask,)))))
    return real and not tracing.is_traced(query) and products.work(query.device, query.dtype)


def _layout(mask: Any, window: int, block: int) -> Layout | None:
    """The layout for a mask. None if the mask shows a key outside of its blocks, or if that is too much."""
    by_text = packing.is_by_text(mask)
    queries, keys = mask.shape[3 if by_text else 2], mask.shape[3]
    for after in _AFTER:
        layout = Layout.of(window, block, queries, keys, after * UNIT)
        if layout is None:
            break
        early, late = (False, False) if by_text or _is_planned() else _sees_outside(mask, layout)
        if early:
            break
        if not late:
            return layout
    return None


def _sees_outside(mask: Any, layout: Layout) -> list[bool]:
    """Whether a query sees a key before those of its block, and whether one after them."""
    import torch

    parts = [(mask[:, :, query, : key.start], mask[:, :, query, key.stop :]) for query, key in layout]
    seen = [torch.stack([_seen(part).any() for part in side]).any() for side in zip(*parts)]
    return torch.stack(seen).tolist()  # type: ignore[no-any-return]


def _seen(mask: Any) -> Any:
    return mask if not mask.is_floating_point() else mask != float("-inf")


def _by_windows(whole: Callable[..., Any], layout: Layout, blocks: Any, given: tuple[Any, ...], **kwargs: Any) -> Any:
    """(rows, queries, heads, width), as ``whole`` gives it for ``given``. ``blocks``: the mask of whole blocks."""
    import torch

    from gemma4_compat._gemma4.attention.gathered import gathered

    module, query, key, value, mask = given
    rows, heads, _, width = query.shape
    layer, found = layers.OneGroup(module), []
    head, tail = layout.head, layout.tail
    middle = query[:, :, head[0].stop : tail[0].start].reshape(rows, heads, layout.count, layout.block, width)
    queries = (query[:, :, head[0]], middle.transpose(1, 2).flatten(0, 1), query[:, :, tail[0]])
    first, last = (packing.part(mask, *part, module.sliding_window) for part in (head, tail))
    seen = (first, blocks, last)
    keys, values = (gathered(tensor, layout, heads // key.shape[1]) for tensor in (key, value))
    for part in zip(queries, keys, values, seen):
        if part[0].shape[2] > 0:
            computed = whole(layer, *part, **kwargs)[0]
            found.append(computed.reshape(rows, -1, heads, value.shape[3]))
    return torch.cat(found, dim=1)


def _has_the_bits(
    whole: Callable[..., Any], layout: Layout, blocks: Any, given: tuple[Any, ...], **kwargs: Any
) -> bool:
    """Whether one call has the same bits. The first call of a kind computes both.

    The values are drawn at random: the same value everywhere would hide the order of sums.
    """
    import torch

    module, query, key, value, mask = given
    kind = (
        layout,
        *((tensor.device, tensor.dtype, tensor.shape, tensor.stride()) for tensor in (query, key, value)),
        (mask.dtype, mask.shape),
        kwargs.get("scaling"),
        whole,
        _kernels(query.device.type),
    )

    def trial() -> bool:
        generator = torch.Generator(value.device).manual_seed(0)
        drawn = torch.empty_like(value).normal_(generator=generator)
        expected = whole(module, query, key, drawn, mask, **kwargs)[0]
        found = _by_windows(whole, layout, blocks, (module, query, key, drawn, mask), **kwargs)
        return bool(torch.equal(expected, found))

    return _tests.passes(kind, value.device, trial)


def _kernels(device: str) -> tuple[Any, ...]:
    """The settings that say which kernel computes it, and how."""
    import torch

    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.get_num_threads() if device == "cpu" else None,
    )
