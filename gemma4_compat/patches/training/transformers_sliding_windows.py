"""Sliding layers compute long texts window by window, and training multiplies wide heads.

Symptom: silent: long prompts and training on long texts are slow, and take memory by the square of the length.

Cause: A token of a sliding layer sees the 512 or 1,024 tokens up to its own, and four or five of six layers slide. But
``sdpa_attention_forward`` computes attention over all pairs of tokens, with a mask that hides most of them. Heads of
full layers are 512 wide. On a GPU, PyTorch's only kernel for them that takes memory linear in the length has a slow
backward pass.

Fix: ``sdpa`` is given a block of queries with only the keys near it, and its part of the mask. The mask decides,
so padding, packed sequences, images whose tokens attend to each other, caches and chunked prefill work as well. A mask
that shows more than the window is left to one call. Blocks begin at the tiles of kernels, so that results keep
their bits. Without gradients, the first call of a shape computes both ways; unless the bits are equal, that shape is
always left to one call. In training, gradients of keys and values are sums in another order, with an error that is not
larger; so training needs ``train_fast``, or ``GEMMA4_COMPAT_ENABLE=transformers-sliding-windows`` for every model and
for prompts. Both leave out the comparison.
Used from where at most half of the scores remains (2,048 tokens with a window of 512); on GPUs from 4,096 tokens if
asked for, and from 16,384 otherwise. If asked for, in training on a GPU, full layers whose heads are wider than
256 are computed by matrix products, a block of queries at a time, if PyTorch multiplies 16-bit tensors into float32
there (CUDA, torch 2.8 or newer). With deterministic algorithms all layers are, sliding ones many windows at a time.
After ``train_fast``, layers of packed texts that are computed in these ways get the number of each token's text in
place of a mask of all pairs of tokens, so that one captured graph serves texts with any boundaries.

Remove when: transformers computes the sliding layers of Gemma 4 by windows with ``sdpa``.
"""

import functools
from typing import Any

from gemma4_compat._engine import dormant
from gemma4_compat._gemma4.attention import block_layout, masks, packing, windows
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

# The sdpa that blocks run is the repaired one.
PATCH = Patch("F104", kind="speed", severity="speed", affected=">=5.5.0", after="transformers-cudnn-padding")

_KINDS = {"full_attention", "sliding_attention"}


@PATCH.replaces("transformers.modeling_utils", "AttentionInterface.__getitem__", affected="<5.7.0", dormant=True)
@PATCH.replaces("transformers.modeling_utils", "AttentionInterface.get_interface", affected=">=5.7.0", dormant=True)
def attention_function(original: Original, self: Any, key: str | None, *default: Any) -> Any:
    import torch

    from gemma4_compat._gemma4.attention import products

    found = original(self, key, *default)
    if key != "sdpa":
        return found
    if torch.compiler.is_compiling():  # a layer by itself may be: what its model made is no mask
        return functools.partial(packing.written_out, found)
    if products.are_fused is None:
        from gemma4_compat._kernels.match import custom, shares

        custom.operators()
        products.are_fused = shares.compute
    return windows.over(found)


@PATCH.replaces("transformers.masking_utils", "create_causal_mask", dormant=True)
def full_mask(original: Original, *args: Any, **kwargs: Any) -> Any:
    found = None if args else windows.instead_of_mask(False, kwargs)
    return original(*args, **kwargs) if found is None else found


@PATCH.replaces("transformers.masking_utils", "create_sliding_window_causal_mask", dormant=True)
def sliding_mask(original: Original, *args: Any, **kwargs: Any) -> Any:
    found = None if args else windows.instead_of_mask(True, kwargs)
    return original(*args, **kwargs) if found is None else found


@PATCH.replaces("transformers.masking_utils", "create_masks_for_generate", dormant=True)
def masks_by_kind(original: Original, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(masks.NAMES, args)) | kwargs  # older releases give them by place
    config = given["config"].get_text_config() if len(args) <= len(masks.NAMES) and "config" in given else None
    if config is None or windows.trained(config) is None or set(config.layer_types) != _KINDS:
        return original(*args, **kwargs)
    return masks.by_kind({**given, "config": config})


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextModel.forward", group="gemma4")
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedTextModel.forward", group="gemma4_unified")
def text_model(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """From the first long text on, layers ask for a function of ours."""
    given = kwargs["inputs_embeds"] if "inputs_embeds" in kwargs else None  # noqa: SIM401  # a token costs no call
    if given is None:
        given = kwargs["input_ids"] if "input_ids" in kwargs else args[0] if args else None
    if given is not None and given.shape[1] > 1:
        _activate_for(self, given, cache_names.cache_in(kwargs))
    return original(self, *args, **kwargs)


def _activate_for(model: Any, given: Any, cache: Any) -> None:
    """Activate the patch if the text may be long enough: with fewer keys, no block is shorter than all of them."""
    import torch

    tokens, window = given.shape[1], getattr(model.config, "sliding_window", None)
    enough = tokens >= windows.least(given.device.type, enabled=windows.is_asked(model))
    if window and enough and not torch.compiler.is_compiling():
        seen = getattr(cache, "get_seq_length", None)  # that of continuous batching has none, nor windows
        known = 0 if seen is None else int(seen())
        if tokens + known >= 2 * max(window, block_layout.UNIT):
            dormant.activate(windows.ID)


def reproduce(workspace: Workspace) -> Outcome:
    """Which part of the scores of sliding layers is computed, by a second prompt of a length that the patch is for."""
    import torch

    from gemma4_compat._lab import scenarios

    model = workspace.load_text()
    length = 2048 if torch.device(workspace.main).type == "cpu" else 16_384
    ids = torch.randint(3, 240, (1, length), generator=torch.Generator().manual_seed(1)).to(workspace.main)
    sliding = [
        module
        for module in model.modules()
        if type(module).__name__.endswith("TextAttention") and getattr(module, "is_sliding", False)
    ]

    def count(query: Any, key: Any, *_: Any, **__: Any) -> int:
        return query[..., 0].numel() * key.shape[2] if query.shape[3] == sliding[0].head_dim else 0

    with torch.no_grad():
        model(input_ids=ids, use_cache=False)  # the first prompt is also computed as before, to compare
        with scenarios.noted(torch.nn.functional, "scaled_dot_product_attention", count) as counts:
            model(input_ids=ids, use_cache=False)
    scores = sum(counts)
    whole = len(sliding) * model.config.get_text_config().num_attention_heads * length**2
    return Outcome(
        2 * scores > whole,
        f"{length:,} tokens: sliding layers compute {100 * scores / whole:.0f}% of the scores of all pairs",
    )
