"""Attention of a sliding layer by blocks of queries, each with the keys that it may see.

A query of a sliding layer sees a window of keys, 512 or 1,024. Upstream gives all queries and all keys to one call of
``scaled_dot_product_attention``, with a mask. Here a block of queries, as long as a window, gets its own keys and
those of a window before, also later ones if the mask shows them: tokens of an image attend to each other. The mask
decides, whatever made it: if a query sees a key that its block lacks, all is computed by one call.

Blocks of queries and of keys begin and end where the tiles of a kernel do, at multiples of :data:`UNIT`, so that a
kernel adds the same numbers in the same order. Whether a result has the bits of one call depends on the kernel, so
:func:`_has_the_bits` tries it. In gradients of keys and values the order of the sums always differs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._engine import dormant, settings
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._engine.runtime.selftest import SelfTests
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.attention import layers, tracing
from gemma4_compat._gemma4.attention.block_layout import UNIT, Layout

ID = "transformers-sliding-windows"

#: Queries of a block, at least, if there are gradients on the CPU: its kernel rounds those of keys and values once for
#: each tile of queries, and takes larger tiles from 768 queries on.
ROUNDED = 1024
#: Queries from which windows are used, by device. On a CPU they win as soon as half of the scores remain. On a GPU
#: with the switch: what benchmarks/training/sliding_windows.py says of an H200. Without it the first prompt of a
#: shape is computed both ways, and no plan counts that: only where windows save a quarter of the time.
LEAST = {"cpu": 0}
LEAST_ON_GPU, _LEAST_UNASKED = 4_096, 16_384
#: Queries from which :mod:`products` compute attention of wide heads in training, by device.
LEAST_TO_MULTIPLY = {"cuda": LEAST_ON_GPU, "gpu": LEAST_ON_GPU}
#: Units of keys after a block that may be tried: an image has at most 1,120 tokens.
_AFTER = range(4)

_TEXT_MODELS = ("Gemma4TextModel", "Gemma4UnifiedTextModel")

_inside = threading.local()
_tests = SelfTests(limit=1024)


def each_inside(manager: contextlib.AbstractContextManager[Any]) -> contextlib.AbstractContextManager[None]:
    """Inside, this thread enters ``manager`` around each call of attention of a Gemma 4, once the patch is awake."""
    return in_place.here(_inside, manager=manager)


def planned() -> contextlib.AbstractContextManager[None]:
    """Inside, this thread computes tensors without memory by windows, as with the opt-in on a GPU.

    Their masks show what those of a text show: nobody can read them.
    """
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
    if query.shape[2] == 1:
        return whole(*given, **kwargs)
    by_windows, by_products = _asked(module)
    if by_products and _may_multiply(*given, **kwargs):
        from gemma4_compat._gemma4.attention import products

        scaling = kwargs["scaling"] if kwargs.get("scaling") is not None else query.shape[3] ** -0.5
        return products.attention(query, key, value, attention_mask, scaling), None
    if attention_mask is None or not _can_be(*given, enabled=by_windows, **kwargs):
        return whole(*given, **kwargs)
    gradients = _gradients(query, key, value)
    if gradients and not by_windows:
        return whole(*given, **kwargs)
    block = _block(module, query, gradients)
    layout = tracing.once(attention_mask, attached.LAYOUT, _layout, module.sliding_window, block)
    if layout is None:
        return whole(*given, **kwargs)
    blocks = tracing.made(attention_mask, attached.WINDOWS, _of_blocks, len(query), layout)
    if not (by_windows or _has_the_bits(whole, layout, blocks, given, **kwargs)):
        return whole(*given, **kwargs)
    return _by_windows(whole, layout, blocks, given, **kwargs), None


def _asked(module: Any) -> tuple[bool, bool]:
    """Whether windows and products are asked for: by ``train_fast`` in training, else for the whole process."""
    asked: tuple[bool, bool] | None = vars(module).get(attached.TRAINED_ATTENTION) if module.training else None
    return asked if asked is not None else (_is_planned() or settings.is_enabled(ID),) * 2


def ask(model: Any, *, windows: bool, products: bool) -> None:
    """Have training compute the text layers of a model this way, whatever GEMMA4_COMPAT_ENABLE says."""
    for module in _asking(model):
        vars(module)[attached.TRAINED_ATTENTION] = windows, products


def forget(model: Any) -> None:
    """Take the marks off; GEMMA4_COMPAT_ENABLE decides."""
    for module in _asking(model):
        vars(module).pop(attached.TRAINED_ATTENTION, None)


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
    rows, heads, queries, _ = query.shape
    keys = key.shape[2]
    block = _block(module, query, _gradients(query, key, value))
    if queries < least(_device(query), enabled=enabled) or 2 * queries * block > queries * keys:
        return False
    if mask.shape[2:] != (queries, keys) or mask.shape[0] not in (1, rows) or mask.shape[1] not in (1, heads):
        return False
    if mask.requires_grad or kwargs.get("dropout") or kwargs.get("position_bias") is not None:
        return False
    return not tracing.is_traced(query)


def _may_multiply(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> bool:
    """Whether a layer that trains has wide heads, and so many tokens that :mod:`products` take less time."""
    import torch

    if query.shape[2] < LEAST_TO_MULTIPLY.get(_device(query), query.shape[2] + 1) or torch.compiler.is_compiling():
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
    for after in _AFTER:
        layout = Layout.of(window, block, mask.shape[2], mask.shape[3], after * UNIT)
        if layout is None:
            break
        early, late = (False, False) if _is_planned() else _sees_outside(mask, layout)
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


def _of_blocks(mask: Any, rows: int, layout: Layout) -> Any:
    """The mask of whole blocks, (rows * blocks, heads, queries, keys)."""
    import torch

    mask = mask.expand(rows, -1, -1, -1)
    return torch.stack([mask[:, :, query, key] for query, key in layout.middle()], dim=1).flatten(0, 1)


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
    masks = (mask[:, :, head[0], head[1]], blocks, mask[:, :, tail[0], tail[1]])
    keys, values = (gathered(tensor, layout, heads // key.shape[1]) for tensor in (key, value))
    for part in zip(queries, keys, values, masks):
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
