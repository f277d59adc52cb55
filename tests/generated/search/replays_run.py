"""What must hold for a replay sequence: each ``generate`` gives the bits of ``disable_compile=True``, or its error.

Both are asked of the same model, in the same state. A change that a library cannot make is skipped: what it has done
before it raised is what the model is like from then on.
"""

from __future__ import annotations

import contextlib
import gc
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._graphs import decoder
from tests.generated.search import replay_adapters, replay_around, replay_changes, run
from tests.generated.search.replay_showing import SHOWING, Shown
from tests.generated.search.replay_world import ReplayWorld
from tests.generated.search.run import Failure
from tests.generated.search.sequence import Operation, Sequence
from tests.generated.search.sequences_bench import SequenceBench
from tests.generated.search.sequences_run import Outcome, words

#: By name. Each is called with the world and the options of ``sequence.Operation``.
CHANGES: dict[str, Callable[..., None]] = {
    name: function
    for module in (replay_adapters, replay_changes, replay_around)
    for name, function in vars(module).items()
    if isinstance(function, FunctionType) and function.__module__ == module.__name__ and not name.startswith("_")
}
Tamper = Callable[[ReplayWorld, Operation], None]


@dataclass(frozen=True)
class Replayed(Outcome):
    """What became of a sequence; ``refused`` has the changes that a library could not make.

    Attributes:
        compared: calls of ``generate``.
        raised: those of them that raised, both ways.
        steps: that were replayed.
    """

    compared: int = 0
    raised: int = 0
    steps: int = 0


@contextlib.contextmanager
def bench(folder: Path | None = None) -> Iterator[SequenceBench]:
    """A bench in a temporary folder, or in ``folder``; steps on the CPU are recorded on tapes."""
    import transformers.models.gemma4.modeling_gemma4  # noqa: F401  (parts of PyTorch ask for the type of an event)

    from gemma4_compat._graphs.recording import RECORDERS
    from gemma4_compat._lab.stand_ins.tape import standing_in

    with (
        run.quiet(),
        standing_in(RECORDERS),
        tempfile.TemporaryDirectory(prefix="gemma4-replays-", dir=folder) as place,
    ):
        yield SequenceBench(Path(place))
    gc.collect()


def check(sequence: Sequence, bench: SequenceBench, *, tamper: Tamper | None = None) -> Replayed:
    """Run the sequence.

    Args:
        sequence: what to run.
        bench: where checkpoints are kept.
        tamper: is given the world after each change; for tests that plant a defect.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = ReplayWorld(bench, sequence.case)
        try:
            return _check(sequence, world, tamper)
        finally:
            world.close()


def _check(sequence: Sequence, world: ReplayWorld, tamper: Tamper | None) -> Replayed:
    refused: list[tuple[str, str]] = []
    compared = raised = steps = 0

    def outcome(failure: Failure | None, operations: int) -> Replayed:
        return Replayed(failure, operations, tuple(refused), None, compared, raised, steps)

    for position, step in enumerate(sequence.operations):
        _seed(position)
        if step.name not in SHOWING:
            try:
                CHANGES[step.name](world, **dict(step.options))
            except Exception as error:  # noqa: BLE001  (whatever the libraries raise)
                refused.append((step.name, f"{type(error).__name__}: {words(str(error))}"))
            if tamper is not None:
                tamper(world, step)
            continue
        before = decoder.statistics(world.base).replayed
        found, expected = SHOWING[step.name](world, **dict(step.options))
        compared, raised = compared + 1, raised + ("error" in expected)
        steps += decoder.statistics(world.base).replayed - before
        wrong = difference(expected, found)
        if wrong is not None:
            signature = f"{step.name}: {run.general(wrong[0])} differs"
            detail = f"operation {position} of {list(map(str, sequence.operations))}: {wrong[0]}: {wrong[1]}"
            return outcome(Failure("outputs", signature, detail), position)
    return outcome(None, len(sequence.operations))


def difference(expected: Shown, found: Shown) -> tuple[str, str] | None:
    """What is not the same, and how; None when all is."""
    import torch

    if expected.keys() != found.keys():
        missing, added = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        errors = [str(shown[name]) for shown in (found, expected) for name in shown if name.startswith("error")]
        return "what is shown", f"missing {missing[:4]}, added {added[:4]} {' '.join(errors)}"
    for name, value in expected.items():
        other = found[name]
        if not isinstance(value, torch.Tensor):
            if value != other:
                return name, f"{other}, not replayed {value}"
        elif (value.dtype, value.shape) != (other.dtype, other.shape):
            return name, f"{other.dtype} {tuple(other.shape)}, not replayed {value.dtype} {tuple(value.shape)}"
        elif not same_bits(value, other):
            off = float((value.double() - other.double()).abs().nan_to_num(float("inf")).max())
            return name, f"off by {off:.3g}, not replayed up to {float(value.double().abs().max()):.3g}"
    return None


def _seed(position: int) -> None:
    import torch

    torch.manual_seed(1000 + position)
    random.seed(1000 + position)
