"""What fits in how much memory, and what the planner says of it: of results of trainers.py, without a GPU."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import Data

GIB = 2**30


def peaks(result: Data, way: str) -> dict[int, tuple[float, float]]:
    """By sequence, the largest peak of tensors and of reserved memory, in GiB; empty where memory was not measured."""
    found: dict[int, tuple[float, float]] = {}
    for run in result["runs"]:
        pair = (run["memory"]["peak_gib"], run["memory"]["peak_reserved_gib"])
        if run["way"] == way and None not in pair:
            before = found.get(run["sequence"], pair)
            found[run["sequence"]] = (max(before[0], pair[0]), max(before[1], pair[1]))
    return found


def candidates(peaks: dict[int, tuple[float, float]], budget: float) -> list[tuple[int, bool]]:
    """Sequences that may fit, the longest first, and whether their reserved memory says that they do.

    A sequence whose tensors alone take more cannot fit.
    """
    return [
        (sequence, reserved <= budget)
        for sequence, (tensors, reserved) in sorted(peaks.items(), reverse=True)
        if tensors <= budget
    ]


def write_config(shape: str, folder: Path) -> None:
    """The configuration of a shape, as a checkpoint without weights: all that a plan needs."""
    from benchmarks.decoding import models
    from gemma4_compat._gemma4.models import variants
    from gemma4_compat._lab import tiny_models

    variant, layers, _ = models.SHAPES[shape]
    if variant == "tiny":
        tiny_models.build_checkpoint(folder / "checkpoint")
        return
    config = variants.config(variant, layers=layers)
    kind = "Gemma4Unified" if variant == variants.UNIFIED else "Gemma4"
    config.architectures = [f"{kind}ForConditionalGeneration"]
    config.save_pretrained(folder / "checkpoint")


def planned_gib(folder: Path, where: str, sequence: int, chunked: bool, windows: bool, *, rank: int) -> float:
    """The peak that the planner expects of a step with the base so placed."""
    from benchmarks.decoding import models
    from benchmarks.small_card.measure import planned_use
    from gemma4_compat._gemma4.models import build as built
    from gemma4_compat._gemma4.quantization import config
    from gemma4_compat._plan import training_step

    model = built.on_meta(str(folder / "checkpoint"))[0]
    names = config.linear_names(model, models.skipped(folder))
    switches = {"chunked_loss": chunked, "sliding_windows": windows}
    step = training_step.Step(max_length=sequence, padding=False, r=rank, **switches)  # type: ignore[arg-type]
    use = planned_use(
        folder,
        models.device_map(where, folder),
        quantization="4bit-double",
        skip=models.skipped(folder),
        adapter=False,
        quantize_offloaded=True,
        training=training_step.measure(model, names, step).peak,
    )(sequence, sequence)
    return float(use.prefill) / GIB
