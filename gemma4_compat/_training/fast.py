"""``gemma4_compat.train_fast``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar

from gemma4_compat._engine.io import arguments
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.models import family
from gemma4_compat._graphs.statistics import TrainingStatistics
from gemma4_compat._training import parts
from gemma4_compat._training.captured import layers

_Model = TypeVar("_Model")
_log = logging.getLogger("gemma4_compat")


def train_fast(
    model: _Model,
    *,
    max_tokens: int = layers.MAX_TOKENS,
    loss: bool | Literal["auto", "always"] = "auto",
    mlp: bool | int | Literal["auto"] = "auto",
    windows: bool | Literal["auto"] = "auto",
    products: bool | Literal["auto"] = "auto",
    graphs: bool = True,
    enabled: bool = True,
) -> _Model:
    """Make training steps of a Gemma 4 model faster and smaller; one line in the log says what was turned on.

    >>> model = gemma4_compat.train_fast(model, max_tokens=8192)  # the longest batch, over all its rows
    >>> trainer.train()

    Nothing changes outside of training mode. Losses and gradients differ from those of upstream by rounding;
    docs/TRAINING.md has the measured bounds of each part, and what it leaves as it is. Each part can be named off, and
    ``loss=False, mlp=False, windows=False, products=False`` leaves the bits of a step with checkpointing. Each call
    states everything: a part that it does not name is "auto" again.

    Args:
        model: a transformers model, quantized, dispatched or not, or a PEFT model, DDP or another wrapper around one.
        max_tokens: the most tokens of a batch, over all its rows. Longer batches train, without graphs.
        loss: compute the loss a few tokens at a time, so that the logits of all tokens never exist at once;
            ``outputs.logits`` is None then. "auto": where the model has a head. "always": also after
            ``model.eval()``, as in ``Trainer.evaluate`` without ``compute_metrics``.
        mlp: compute MLPs and norms a few tokens at a time, which costs one more forward of the MLPs in each step.
            "auto": if a batch of ``max_tokens`` would not fit into the memory that is free on the GPU now; graphs then
            replay batches of up to 2,048 tokens. A number: the tokens of a chunk, in place of 2,048.
        windows: compute sliding layers by windows, from 4,096 tokens on (E2B, E4B on a CPU: 2,048). "auto": yes.
        products: compute attention by matrix products, in 16 bits on a GPU, in place of windows. Gradients are added
            in one order, so two runs have the same bits. "auto": yes.
        graphs: replay each decoder layer as CUDA graphs. A layer is captured in the fourth call with tensors of the
            same shapes, for up to four shapes: pad to a few lengths (``pad_to_multiple_of``), or pack. Layers whose
            weights are offloaded but not streamed, and a model without a GPU, run as before; the log says why.
        enabled: False undoes everything, and releases the graphs and their memory.

    Returns:
        ``model`` itself.

    Raises:
        Gemma4CompatError: it is not a Gemma 4 model with text layers, a part that you name (other than by "auto")
            cannot be turned on, or an argument makes no sense.
    """
    found = layers.decoder_layers(model)
    if not found or not any(family.is_gemma4(module) for module in model.modules()):  # type: ignore[attr-defined]
        raise Gemma4CompatError(f"train_fast requires a Gemma 4 model with text layers; got {arguments.shown(model)}")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise Gemma4CompatError(f"max_tokens is a number of tokens of a batch, 1 or more; got {max_tokens!r}")
    named = {"loss": loss, "mlp": mlp, "windows": windows, "products": products}
    chosen = parts.chosen(model, max_tokens, named) if enabled else None
    parts.forget(model)
    for layer in found:
        before = vars(layer).pop(attached.TRAINING, None)
        if before is not None:
            before.clear()
        in_place.restore(layer, "forward", forward)
    if chosen is None:
        return model
    parts.ask(model, chosen, named)
    said = chosen.said
    if graphs:
        most = min(max_tokens, layers.MAX_TOKENS) if chosen.is_short else max_tokens
        training = layers.Training(found, most)
        for layer in found:
            attach(layer, training)
        said = [*said, f"decoder layers as CUDA graphs in batches of up to {most:,} tokens"]
    _log.warning("train_fast: %s.", "; ".join([f"on: {', '.join(said) or 'nothing'}", *chosen.off]))
    return model


def attach(layer: Any, training: layers.Training) -> None:
    """Have a decoder layer ask ``training`` in each forward."""
    vars(layer)[attached.TRAINING] = training
    in_place.replace(layer, "forward", functools.partial(forward, layer))


def forward(layer: Any, below: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """A decoder layer's forward: replayed in training steps where that is possible."""
    training: layers.Training | None = vars(layer).get(attached.TRAINING)
    return below(*given, **named) if training is None else training.forward(layer, below, given, named)


def statistics(model: Any) -> TrainingStatistics:
    """How the decoder layers of a model ran in training steps since ``train_fast``: a copy, all zero without it."""
    found = (vars(layer).get(attached.TRAINING) for layer in layers.decoder_layers(model))
    return replace(next((one.statistics for one in found if one is not None), TrainingStatistics()))
