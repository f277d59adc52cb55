"""``gemma4_compat.statistics``: how a model decoded and trained, and what this package has left on it."""

from __future__ import annotations

import dataclasses
from typing import Any

from gemma4_compat._engine.io import arguments
from gemma4_compat._gemma4.accelerate import listing
from gemma4_compat._gemma4.accelerate.listing import Attached
from gemma4_compat._graphs import decoder
from gemma4_compat._graphs.statistics import DecodingStatistics, TrainingStatistics
from gemma4_compat._training import fast


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What :func:`statistics` returns. ``str``, and so ``print``, gives it as text.

    Attributes:
        decoding: how steps of ``generate`` ran, and prompts after ``decode_fast``; what ``reuse_prefix`` saved. The
            model's own object: later calls go on counting in it.
        training: how decoder layers ran in training steps after ``train_fast``; a copy.
        attached: what this package has left on the model.
    """

    decoding: DecodingStatistics
    training: TrainingStatistics
    attached: Attached

    def __str__(self) -> str:
        parts = {"decoding": _counted(self.decoding), "training": _counted(self.training)}
        parts["attached"] = str(self.attached).splitlines()
        return "\n".join(line for name, lines in parts.items() for line in (name, *(f"    {one}" for one in lines)))


def statistics(model: Any) -> Statistics:
    """How a model decoded and trained, and what this package has left on it. Changes nothing.

    >>> counted = gemma4_compat.statistics(model)
    >>> counted.decoding.replayed, counted.decoding.captured, counted.decoding.reasons
    (199, 1, ())
    >>> print(counted)

    ``.attached`` has an entry for each kind of attribute, hook and replaced method, with its places; the same things
    in all layers are one entry. Modules, parameters, buffers, quantization states, accelerate's hooks and the model's
    quantizer are looked at; hooks of accelerate itself are not listed. ``revert()`` restores functions of the
    libraries and leaves what is listed, so that a dispatched model still works. The hooks of an offload go with
    accelerate's (``remove_hook_from_submodules``), its methods with the next cast or move. ``gemma4-compat doctor
    --verbose`` says what each patch may leave.

    Args:
        model: a ``torch.nn.Module``: a transformers model, plain, quantized, dispatched or not, or one that PEFT, DDP
            or another wrapper is around.

    Raises:
        Gemma4CompatError: ``model`` is not a module.
    """
    model = arguments.model(model, "statistics")
    return Statistics(decoder.statistics(model), fast.statistics(model), listing.attached(model))


def _counted(found: Any) -> list[str]:
    """A line for each field that has something to say."""
    lines: list[str] = []
    for one in dataclasses.fields(found):
        name, value = one.name.replace("_", " "), getattr(found, one.name)
        if isinstance(value, dict):
            lines += [f"{name}: {key}: {count:,}" for key, count in value.items()]
        elif isinstance(value, tuple):
            lines += [f"{name}: {each}" for each in value]
        elif value:
            lines.append(f"{name}: {value:,.1f}" if isinstance(value, float) else f"{name}: {value:,}")
    return lines or ["nothing"]
