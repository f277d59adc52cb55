"""What must hold for a sequence: each operation shows what it shows on one device, or is refused.

The split model goes first. Where it raises, the model on one device must raise at the same operation, too; then, or
where only that one raises, the sequence ends and has held: what upstream cannot do on one device is no failure. An
operation that raises :class:`gemma4_compat.Gemma4CompatError` is *refused*: the model on one device leaves it out, and
whatever follows must still be the same. So a refusal that comes after something was changed is found.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gemma4_compat import Gemma4CompatError
from tests.generated.search import run
from tests.generated.search.operations import OPERATIONS
from tests.generated.search.run import Failure
from tests.generated.search.sequence import Operation, Sequence
from tests.generated.search.sequence_shrinking import simplifications, size
from tests.generated.search.sequences_bench import SequenceBench, World

Tamper = Callable[[World, Operation], None]
DISABLE = "GEMMA4_COMPAT_DISABLE"
#: What upstream refuses of a split model before it changes anything.
REFUSED_UPSTREAM = ("You can't move a model that has some modules offloaded",)


@dataclass
class Trace:
    """What a world went through: what each operation showed, and how it ended."""

    shown: list[dict[str, Any] | None] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)  # by position: the message
    error: Exception | None = None  # of the operation after the last that is in ``shown``
    loading: bool = False  # the error came before the first operation


@dataclass(frozen=True)
class Outcome:
    """What became of a sequence.

    Attributes:
        failure: what is wrong; None where it held.
        operations: how many were compared.
        refused: the operations that were refused, and the words.
        cut: the operation that one device cannot do either, and its error.
    """

    failure: Failure | None = None
    operations: int = 0
    refused: tuple[tuple[str, str], ...] = ()
    cut: tuple[str, str] | None = None


@contextlib.contextmanager
def bench(folder: Path | None = None) -> Iterator[SequenceBench]:
    """A bench in a temporary folder, or in ``folder``."""
    with run.quiet(), tempfile.TemporaryDirectory(prefix="gemma4-sequences-", dir=folder) as place:
        yield SequenceBench(Path(place))
    gc.collect()


def check(sequence: Sequence, bench: SequenceBench, *, tamper: Tamper | None = None) -> Outcome:
    """Run the sequence.

    Args:
        sequence: what to run.
        bench: where checkpoints and adapters are kept.
        tamper: is given the split world after each operation; for tests that plant a defect.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        split = perform(sequence, bench, split=True, tamper=tamper)
        whole = perform(sequence, bench, split=False, skip=split.refused, stop=len(split.shown) + 1)
    return compare(sequence, split, whole)


#: Patches that repair a defect of a model on one device, so outputs differ without them. They stay on when the shim is
#: taken away. Each with what is wrong without it, and where.
REPAIRED: dict[str, str] = {
    "bitsandbytes-cpu-packing": "CPUs with AVX512-BF16: state_dict(), a load of an adapter or a training step after a "
    "forward find 4-bit weights with other scales",
    "bitsandbytes-cpu-strides": "CPUs with AVX512-BF16: an audio tower in 4-bit returns garbage",
    "peft-adalora-ranks": "PEFT 0.21: an adapter loaded with is_trainable=False onto a bf16 base is trained",
    "peft-adapter-names": "a call with adapter_names that fails leaves its hooks; other modules get the rows' names",
    "peft-frozen-adapters": "disable_adapter() makes adapters that were loaded for inference trainable",
    "peft-kbit-dtypes": "prepare_model_for_kbit_training makes float32 of embeddings, experts and unquantized layers",
    "transformers-accumulation-weights": "microbatches count alike, however many tokens they have",
    "transformers-adapter-names": "images and sounds of several rows get the names of the rows",
    "transformers-attention-weights": "attentions asked of sdpa are an empty tuple",
    "transformers-audio-mask": "transformers < 5.20: with eager attention the audio tower attends to what is masked",
    "transformers-image-masks-unified": "12B: the tokens of an image see each other in full layers, too",
    "transformers-image-types": "12B, 26B-A4B, 31B: without mm_token_type_ids an image is read from left to right",
    "transformers-packed-texts": "texts packed into one row see one another",
    "transformers-quantized-router": "4- and 8-bit: routers are quantized and send tokens to other experts",
    "transformers-reentrant-checkpointing": "use_reentrant=True: wrong gradients where layers share keys and values",
    "transformers-rotary-cast": "a cast rounds the float32 frequencies of rotary embeddings",
    "transformers-sliding-cache": "transformers < 5.14: sliding layers of a model without KV-shared layers cache the "
    "whole text; the masked keys change the order of the sums",
    "transformers-static-images": "12B, 26B-A4B, 31B: with a static cache image tokens do not attend to each other",
    "transformers-vision-masks": "26B-A4B, 31B in 5.13 to 5.16: masks of images have another layer's size",
}


def check_one_device(sequence: Sequence, bench: SequenceBench, *, tamper: Tamper | None = None) -> Outcome:
    """The sequence on one device with the shim, against the same without it, but for :data:`REPAIRED`.

    Where it raises without the shim, the sequence ends and has held.
    """
    steps = tuple(step for step in sequence.operations if step.name != "undo_and_install")
    sequence = replace(sequence, operations=steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on = perform(sequence, bench, split=False, tamper=tamper)
        with repaired_alone():
            off = perform(sequence, bench, split=False, skip=on.refused, stop=len(on.shown) + 1)
    return compare(sequence, on, off)


@contextlib.contextmanager
def repaired_alone() -> Iterator[None]:
    """Without the shim but for :data:`REPAIRED`: all is undone once, for each undoing looks at every module."""
    import gemma4_compat

    before = os.environ.get(DISABLE)
    gemma4_compat.revert()
    os.environ[DISABLE] = ",".join(gemma4_compat.status().keys() - REPAIRED.keys())
    try:
        gemma4_compat.install()
        yield
    finally:
        os.environ.pop(DISABLE)
        if before is not None:
            os.environ[DISABLE] = before
        gemma4_compat.install()


def perform(
    sequence: Sequence,
    bench: SequenceBench,
    *,
    split: bool,
    skip: Any = (),
    stop: int | None = None,
    tamper: Tamper | None = None,
) -> Trace:
    """Do the operations, on one device or split, until one raises."""
    trace = Trace()
    world: World | None = None
    try:
        trace.loading = True
        _seed(-1)
        world = World(bench, sequence.case, split=split)
        trace.loading = False
        for position, step in enumerate(sequence.operations[:stop]):
            if position in skip:
                trace.shown.append(None)
                continue
            _seed(position)
            try:
                shown = OPERATIONS[step.name](world, **dict(step.options))
            except (Gemma4CompatError, RuntimeError) as error:
                ours = isinstance(error, Gemma4CompatError) or str(error).startswith(REFUSED_UPSTREAM)
                if not (split and ours):
                    raise
                trace.refused[position] = str(error)
                shown = None
            trace.shown.append(_kept(shown))
            if tamper is not None:
                tamper(world, step)
    except Exception as error:  # noqa: BLE001  (whatever the libraries raise is what is searched for)
        trace.error = error
    finally:
        if world is not None:
            world.close()
    return trace


def compare(sequence: Sequence, split: Trace, whole: Trace) -> Outcome:
    """The split model's trace against that of one device."""
    names = [str(step) for step in sequence.operations]
    refused = tuple((sequence.operations[position].name, text) for position, text in split.refused.items())
    compared = min(len(split.shown), len(whole.shown))
    for position in range(compared):
        if position in split.refused:
            continue
        wrong = difference(whole.shown[position], split.shown[position])
        if wrong is not None:
            signature = f"{sequence.operations[position].name}: {run.general(wrong[0])} differs"
            detail = f"operation {position} of {names}: {wrong[0]}: {wrong[1]}"
            return Outcome(Failure("outputs", signature, detail), position, refused)
    if whole.error is not None and (whole.loading or len(whole.shown) <= len(split.shown)):
        what = "load" if whole.loading else sequence.operations[len(whole.shown)].name
        return Outcome(None, compared, refused, (what, f"{type(whole.error).__name__}: {words(str(whole.error))}"))
    if split.error is not None:
        what = "load" if split.loading else sequence.operations[len(split.shown)].name
        failure = run.raised(what, split.error)
        detail = f"operation {len(split.shown)} of {names}: {failure.detail}"
        return Outcome(Failure("run", failure.signature, detail), compared, refused)
    return Outcome(None, compared, refused)


def difference(expected: dict[str, Any] | None, found: dict[str, Any] | None) -> tuple[str, str] | None:
    """What is not the same in two things that an operation showed: its name, and how; None when all is.

    A tensor on meta is an offloaded one in a ``state_dict``; it has nothing to compare.
    """
    import torch

    expected, found = expected or {}, found or {}
    if expected.keys() != found.keys():
        missing, added = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        return "what is shown", f"missing {missing[:6]}, added {added[:6]}"
    for name, value in expected.items():
        other = found[name]
        if not isinstance(value, torch.Tensor):
            if value != other:
                return name, f"{other}, on one device {value}"
            continue
        if other.device.type == "meta":
            continue
        if value.dtype != other.dtype or value.shape != other.shape:
            return name, f"{other.dtype} {tuple(other.shape)}, on one device {value.dtype} {tuple(value.shape)}"
        if not _same(value, other):
            return name, f"off by {_distance(value, other):.3g}, on one device up to {_largest(value):.3g}"
    return None


def _same(a: Any, b: Any) -> bool:
    import torch

    if a.dtype.is_floating_point:
        return bool(torch.allclose(a.float(), b.float(), rtol=0, atol=0, equal_nan=True))
    return bool(torch.equal(a, b))


def _distance(a: Any, b: Any) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _largest(a: Any) -> float:
    return float(a.double().abs().max()) if a.numel() else 0.0


def _kept(shown: dict[str, Any] | None) -> dict[str, Any] | None:
    """Copies: what an operation showed may be changed by a later one."""
    import torch

    if shown is None:
        return None
    return {
        name: value.detach().cpu().clone()
        if isinstance(value, torch.Tensor) and value.device.type != "meta"
        else value
        for name, value in shown.items()
    }


def words(text: str) -> str:
    """A message without what differs between sequences."""
    return run.general(" ".join(text.split()))[:200]


def _seed(position: int) -> None:
    import torch

    torch.manual_seed(1000 + position)
    random.seed(1000 + position)


def shrink(
    sequence: Sequence,
    failure: Failure,
    bench: SequenceBench,
    *,
    attempts: int = 150,
    tamper: Tamper | None = None,
    check: Callable[..., Outcome] = check,
) -> Sequence:
    """The smallest sequence found, greedily, that fails with the same signature."""
    whole = check(sequence, bench, tamper=tamper)
    if whole.failure is not None and whole.failure.signature == failure.signature:
        sequence = Sequence(case=sequence.case, operations=sequence.operations[: whole.operations + 1])
    progress = True
    while progress:
        progress = False
        for simpler in simplifications(sequence):
            if size(simpler) >= size(sequence):
                continue
            if attempts == 0:
                return sequence
            attempts -= 1
            found = check(simpler, bench, tamper=tamper).failure
            if found is not None and found.signature == failure.signature:
                sequence, progress = simpler, True
                break
    return sequence
