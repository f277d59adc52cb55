"""``gemma4_compat.decode_fast``."""

from __future__ import annotations

from typing import Any, TypeVar

from gemma4_compat._decoding import decoder, obstacles
from gemma4_compat._decoding.recording import RECORDERS
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import family

_Model = TypeVar("_Model")


def decode_fast(model: _Model, *, enabled: bool = True) -> _Model:
    """Have ``generate`` of a Gemma 4 model replay its decoding step as one CUDA graph.

    >>> model = gemma4_compat.decode_fast(model)
    >>> model.generate(**inputs, max_new_tokens=200)

    It sets ``model.generation_config.cache_implementation = "static"``, and no more: ``generate`` then keeps keys and
    values in a cache of fixed size, and the patch ``transformers-graph-decoding`` replays the step that reads one
    token. The tokens are those of the same call with ``disable_compile=True``, which turns the replay off, bit by bit.
    Where transformers would compile the step instead (nothing quantized, nothing offloaded), it is replayed, too:
    that needs no minute of compiling.

    A model that cannot be replayed is left as it is, and a warning in the log says why: 8-bit weights, weights on
    disk, several GPUs, no GPU.

    Args:
        model: a transformers model for text generation, quantized, dispatched or not, or a PEFT model around one.
        enabled: False undoes it.

    Returns:
        ``model`` itself.

    Raises:
        Gemma4CompatError: it is no Gemma 4 model that generates.
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(inner, "generation_config", None)
    if not family.is_gemma4(inner) or config is None:
        raise Gemma4CompatError(
            f"decode_fast needs a Gemma 4 model with generate(), and {type(inner).__name__} is none. Load it with "
            "AutoModelForCausalLM or AutoModelForImageTextToText."
        )
    decoding = decoder.of(inner)
    if not enabled:
        decoding.preferred = False
        if config.cache_implementation == "static":
            config.cache_implementation = None
        return model
    if inner.device.type not in RECORDERS:
        decoding.reason(f"the model is on {inner.device}, and graphs are CUDA's")
        return model
    obstacle = obstacles.find_before_a_forward(inner)
    if obstacle is not None:
        decoding.reason(obstacle)
        return model
    decoding.preferred = True
    config.cache_implementation = "static"
    return model
