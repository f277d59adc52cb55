"""``gemma4_compat.train_fast``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from gemma4_compat._accelerate import attached
from gemma4_compat._common import arguments, in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._graphs.statistics import TrainingStatistics
from gemma4_compat._models import family
from gemma4_compat._training.captured import layers

_Model = TypeVar("_Model")


def train_fast(model: _Model, *, max_tokens: int = layers.MAX_TOKENS, enabled: bool = True) -> _Model:
    """Have training steps of short sequences replay each decoder layer of a Gemma 4 model as CUDA graphs.

    >>> model = gemma4_compat.train_fast(model)
    >>> trainer.train()

    A short step waits for Python: a layer launches hundreds of kernels, each from Python. With this, a call of a layer
    with tensors of the same shapes as three calls before is captured, and replayed from then on: its forward as one
    graph, its backward pass as another. The second computes the layer again, as checkpointing does, with or without
    checkpointing. Loss and gradients have the bits of the same step with checkpointing.

    Weights may be changed in place, as optimizers do. Another adapter, weight, hook or setting is noticed, and so is a
    weight that is frozen or no longer frozen: everything is captured again. The first four shapes that come back are
    captured: pad to one length, or to a few (``pad_to_multiple_of``), or pack.

    A layer runs as before, and a warning in the log says why, if its weights are offloaded, sharded or 8-bit, if it
    draws random numbers (dropout), if a hook of yours looks into it, if experts are chosen on the host, if
    checkpointing offloads what it keeps, if the call has a cache that holds tokens, and without a GPU. A backward pass
    with ``create_graph=True`` runs without graphs as well. Before transformers 5.23 checkpointing must be off, which
    takes more memory until a shape is captured. Batches of more than ``max_tokens``, and calls without gradients, run
    as before without a word. A deep copy and a pickle of the model train without replays.

    With ``GEMMA4_COMPAT_ENABLE=transformers-sliding-windows``, layers leave out blocks of keys that no query sees. A
    graph then serves only batches whose masks show the same blocks. In packed batches these differ, so full layers run
    as before.

    Args:
        model: a transformers model, quantized, dispatched or not, or a PEFT model, DDP or another wrapper around one.
        max_tokens: the most tokens of a batch that is replayed, over all its rows. Longer steps gain less, and their
            graphs take more memory (``gemma4-compat plan-training MODEL --max-length NUMBER --train-fast``).
        enabled: False undoes it, and releases the graphs and their memory.

    Returns:
        ``model`` itself.

    Raises:
        Gemma4CompatError: it is not a Gemma 4 model with text layers, or ``max_tokens`` is not a positive integer.
    """
    found = layers.decoder_layers(model)
    if not found or not any(family.is_gemma4(module) for module in model.modules()):  # type: ignore[attr-defined]
        raise Gemma4CompatError(f"train_fast requires a Gemma 4 model with text layers; got {arguments.shown(model)}")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise Gemma4CompatError(f"max_tokens is a number of tokens of a batch, 1 or more; got {max_tokens!r}")
    training = layers.Training(found, max_tokens)
    for layer in found:
        before = vars(layer).pop(attached.TRAINING, None)
        if before is not None:
            before.clear()
        if enabled:
            attach(layer, training)
        else:
            in_place.restore(layer, "forward", forward)
    return model


def attach(layer: Any, training: layers.Training) -> None:
    """Have a decoder layer ask ``training`` in each forward."""
    vars(layer)[attached.TRAINING] = training
    in_place.replace(layer, "forward", functools.partial(forward, layer))


def forward(layer: Any, below: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """A decoder layer's forward: replayed in training steps where that is possible."""
    training: layers.Training | None = vars(layer).get(attached.TRAINING)
    return below(*given, **named) if training is None else training.forward(layer, below, given, named)


def training_statistics(model: Any) -> TrainingStatistics:
    """How the decoder layers of a model ran in training steps since ``train_fast``.

    Args:
        model: as given to :func:`train_fast`, or a wrapper around it.

    Returns:
        a copy; all zero for a model without ``train_fast``.

    Raises:
        Gemma4CompatError: ``model`` is not a module.
    """
    model = arguments.model(model, "training_statistics")
    found = (vars(layer).get(attached.TRAINING) for layer in layers.decoder_layers(model))
    return replace(next((one.statistics for one in found if one is not None), TrainingStatistics()))
