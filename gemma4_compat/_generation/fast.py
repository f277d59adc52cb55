"""``gemma4_compat.decode_fast``."""

from __future__ import annotations

import gc
from typing import Any, TypeVar

from gemma4_compat._engine import dormant
from gemma4_compat._engine.io import arguments
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.models import family, walk
from gemma4_compat._generation.prefix_cache import session
from gemma4_compat._generation.prompts import embedded
from gemma4_compat._graphs import decoder, unsupported
from gemma4_compat._graphs.recording import RECORDERS

_Model = TypeVar("_Model")


def decode_fast(
    model: _Model,
    *,
    enabled: bool = True,
    exact: bool = False,
    any_length: bool = False,
    assistants: bool = False,
    reuse_prefix: bool = False,
    graphs: bool = True,
) -> _Model:
    """Have ``generate`` of a Gemma 4 model replay its decoding step, and prompts of known lengths, as CUDA graphs.

    >>> model = gemma4_compat.decode_fast(model)
    >>> model.generate(**inputs, max_new_tokens=200)

    Applies to ``generate`` calls that set no cache and use no assistant model. They keep keys and values in a static
    cache of fixed size from then on, and the patch ``transformers-graph-decoding`` replays the step that reads one
    token. With ``return_dict_in_generate=True`` they return the dynamic cache that they would return without this, for
    a next turn. ``disable_compile=True`` turns the replay off for one call, and PyTorch's kernels compute its tokens.
    The step is also replayed where transformers would compile it (nothing quantized, nothing offloaded): a replay
    needs no minute of compiling. ``model.generation_config`` stays as it is, and a copy of the model decodes without
    replays.

    A prompt that does not fit into the memory that is left is read in chunks, which round differently; with ``exact``
    only after a forward ran out of memory. ``prefill_chunk_size`` wins.

    A model that cannot be replayed is left as it is, and a warning in the log says why: 8-bit weights, weights on
    disk, several GPUs, no GPU. Each call states everything: an option that it does not name has its default again.

    Args:
        model: a transformers model for text generation, quantized, dispatched or not, or a PEFT model around one.
        enabled: False undoes it, and releases the graphs and the memory that the model keeps for them.
        exact: True for the bits of PyTorch and bitsandbytes: tokens and logits are those of the same call with
            ``disable_compile=True``. By default, kernels of this package compute attention and the linear layers
            (4-bit, unquantized and LoRA) of decoded tokens, which is faster, above all in long texts. Compared with
            float64, the errors of their attention and of their 4-bit products are not larger than those of PyTorch and
            bitsandbytes. Bits do not depend on where weights are, on the length of the cache, on earlier calls or on
            the rest of the batch (up to 64 rows; 4-bit weights before bitsandbytes 0.50: one). A near-tie between
            two tokens may fall the other way than in PyTorch. docs/DECODING_NUMERICS.md says what these kernels leave
            to PyTorch. A change of ``exact`` releases the graphs.
        any_length: True to read prompts of text in buckets of a few sizes, which are replayed whatever the length of
            the prompt. By default a prompt is replayed if one of its length was read before, and its bits are those of
            a prompt without a replay. Buckets round differently, as chunks do (``prefill_chunk_size``, which wins).
            Where layers are streamed from host memory, prompts are read at once anyway.
        assistants: True to replay also what ``generate`` does with ``assistant_model=`` (an assistant of Gemma 4) or
            ``prompt_lookup_num_tokens=``. Tokens, greedy and sampled, are those of the same call without them. How
            many tokens are drafted at once is decided by measuring, in place of ``num_assistant_tokens``; with experts
            (26B-A4B) none, unless all are in 4 bits, without an adapter on them and not on disk.
        reuse_prefix: True to read only what is new of a prompt that begins like the last conversation: with the same
            tokens, images and sounds. The model keeps the cache of the last ``generate``, and cuts it to the longest
            common prefix, so pass the whole history every time, as without this. Logits differ in rounding from those
            of a prompt that is read at once. A prompt is read from its beginning if weights, active adapters,
            attributes, hooks or the attention implementation have changed, or if you have written to the cache that
            the last call returned. Not noticed: what is written through ``.data`` into a part of a weight that is in
            host memory, and what a hook of yours reads elsewhere. Call this again afterwards, which forgets the
            conversation. Batches, beams, padding, videos, assistants, and calls with ``adapter_names`` or a cache of
            the caller's read their prompts as without this.
        graphs: False for only ``reuse_prefix``, with or without a GPU; ``generate`` then decodes as without this.

    Returns:
        ``model`` itself.

    Raises:
        Gemma4CompatError: it is not a Gemma 4 model that generates, or ``any_length`` or ``assistants`` is asked for
            with ``exact`` or without ``graphs``.
    """
    inner = walk.unwrapped(model)
    if family.has_parts(inner) and not family.is_gemma4(inner):
        raise Gemma4CompatError(
            "decode_fast replays how a Gemma 4 writes one token after another, which "
            f"{type(inner).__name__} does not do; it runs without decode_fast."
        )
    if not family.is_gemma4(inner) or getattr(inner, "generation_config", None) is None:
        raise Gemma4CompatError(
            f"decode_fast requires a Gemma 4 model with generate(); got {arguments.shown(inner)}. Load it with "
            "AutoModelForCausalLM or AutoModelForImageTextToText."
        )
    if exact and any_length:
        raise Gemma4CompatError(
            "decode_fast got exact=True and any_length=True, but prompts in buckets do not have the bits of prompts "
            "that are read at once. Leave out one of the two."
        )
    if exact and assistants:
        raise Gemma4CompatError(
            "decode_fast got exact=True and assistants=True, but in PyTorch a token differs bitwise if "
            "several are read at once. Leave out one of the two."
        )
    if not graphs and (any_length or assistants):
        raise Gemma4CompatError(
            "decode_fast got graphs=False and "
            f"{'any_length' if any_length else 'assistants'}=True, which replays graphs. Leave out one of the two."
        )
    session.forget(inner)
    if enabled and reuse_prefix:
        session.ask(inner)
    decoding = decoder.of(inner)
    decoding.owned = False  # the caller has the model as well
    graphs = enabled and graphs
    reason = _unsupported_reason(inner) if graphs else None
    if reason is not None:
        decoding.reason(reason)
    if graphs and reason is None and not decoding.preferred and inner.device.type == "cuda":
        gc.collect()  # what loading has left, which takes Python 0.3 s in the first text otherwise
    decoding.preferred = graphs and reason is None
    if decoding.preferred:
        dormant.activate(embedded.PATCH)
    custom = decoding.preferred and not exact
    if not graphs or custom != decoding.custom:
        decoding.clear()
    decoding.custom, decoding.any_length, decoding.assistants = custom, custom and any_length, custom and assistants
    return model


def _unsupported_reason(model: Any) -> str | None:
    if model.device.type not in RECORDERS:
        return f"the model is on {model.device}, and graphs need CUDA"
    return unsupported.lasting_reason(model)
