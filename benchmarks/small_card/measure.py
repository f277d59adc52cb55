"""One case of small_card.py, measured in the process that has loaded it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gemma4_compat
from benchmarks.small_card.cases import CASES, PAIRED, SHAPES, Case
from benchmarks.small_card.device import GIB, SLOW_S, forget_peak, main_device, memory, synchronize, timed
from benchmarks.small_card.models import NEW_TOKENS, PROMPT, Clock, generate, load, outputs, prompt, quantization

RUNS = 3
#: How often a case and everything on the GPU are timed in turns, and the tokens of a turn.
TURNS = 6
TURN_TOKENS = 16


def speed(model: Any, shape: str, first: Clock, *, quick: bool) -> dict[str, Any]:
    """Prefill and decode, each with what it took of the card. ``first`` is a generate that has already run."""
    prefill = {}
    for length in SHAPES[shape].prefill:
        forget_peak()
        ids = prompt(model, length)
        seconds, runs = timed(lambda ids=ids: model(input_ids=ids, logits_to_keep=1), runs=1 if quick else RUNS)
        prefill[str(length)] = {"ms": 1000 * seconds, "runs": runs, **memory()}
    forget_peak()
    slow = first.times[-1] - first.times[0] > SLOW_S
    rates = [generate(model)[1].tokens_per_second for _ in range(1 if quick or slow else RUNS)]
    decode = {"tok_s": statistics.median(rates), "tok_s_of_runs": rates, **memory()}
    return {"prefill": prefill, "decode": decode}


def paired(model: Any, case: Case, shape: str, folder: Path) -> dict[str, Any]:
    """Speed as a share of everything on the GPU, both in this process and in turns: machines drift within seconds.

    The reference has the same adapter. What else runs on the host can only slow a turn down, so the best turn of each
    counts: ``share`` is of decode speed (case / reference), ``times`` of prefill time (case / reference). All turns
    are in the result.
    """
    from peft import PeftModel

    whole = load(shape, CASES[case.reference_outputs if not case.adapter else "all-gpu"], folder)
    if case.adapter:
        whole = PeftModel.from_pretrained(whole, folder / "adapter").eval()

    def rate(which: Any) -> float:
        return float(generate(which, TURN_TOKENS)[1].tokens_per_second)

    def seconds(which: Any, ids: Any) -> float:
        synchronize()
        started = time.perf_counter()
        which(input_ids=ids, logits_to_keep=1)
        synchronize()
        return time.perf_counter() - started

    rate(whole)
    rates = [(rate(whole), rate(model)) for _ in range(TURNS)]
    times = {}
    for length in SHAPES[shape].prefill:
        ids = prompt(model, length)
        seconds(whole, ids), seconds(model, ids)
        times[str(length)] = [(seconds(whole, ids), seconds(model, ids)) for _ in range(TURNS // 2)]
    return {
        "share": max(own for _, own in rates) / max(reference for reference, _ in rates),
        "times": {
            length: min(own for _, own in turns) / min(reference for reference, _ in turns)
            for length, turns in times.items()
        },
        "tok_s_of_turns": rates,
        "seconds_of_turns": times,
    }


def streamed_bytes(model: Any) -> int:
    """Bytes of offloaded decoder layers, scales included: what a token brings over the bus."""
    from gemma4_compat._gemma4.quantization.bytes import stored_bytes

    return sum(
        stored_bytes(parameter)
        for name, parameter in model.named_parameters()
        if ".layers." in name and "language_model" in name and parameter.device.type == "meta"
    )


def predicted(shape: str, case: Case, folder: Path, placement: dict[str, Any]) -> dict[str, Any]:
    """GiB that the planner's model of memory gives for this placement, phase by phase, as they are measured."""
    use = planned_use(
        folder,
        placement,
        quantization="4bit-double" if case.double else "4bit",
        skip=quantization(shape, case).llm_int8_skip_modules,
        adapter=case.adapter,
        quantize_offloaded=case.quantize or case.budget is not None,
    )
    lengths = SHAPES[shape].prefill
    return {
        "load": use(PROMPT, PROMPT).loading / GIB,
        "prefill": {str(length): use(length, length).prefill / GIB for length in lengths},
        "decode": use(PROMPT + NEW_TOKENS, PROMPT).decode / GIB,
    }


def planned_use(
    folder: Path,
    placement: dict[str, Any],
    *,
    quantization: str | None,
    skip: list[str],
    adapter: bool,
    quantize_offloaded: bool,
    experts: bool = False,
    training: int | None = None,
    **load: Any,
) -> Callable[[int, int], Any]:
    """The planner's model of memory for a placement of the checkpoint in ``folder``: what the main device uses for a
    context and a prompt of so many tokens. ``load``: further fields of the planner's ``Load``; ``training``: bytes of
    a training step instead.
    """
    import torch
    import transformers
    from transformers import AutoConfig

    from gemma4_compat._gemma4.quantization import config
    from gemma4_compat._lab import tiny_models
    from gemma4_compat._memory import blueprint as blueprints
    from gemma4_compat._memory import use as uses
    from gemma4_compat._memory.formulas import Load, TrainingLoad

    checkpoint = folder / "checkpoint"
    with torch.device("meta"):
        built = getattr(transformers, tiny_models.class_name(checkpoint))(AutoConfig.from_pretrained(checkpoint))
    model = built.to(torch.bfloat16)
    blueprint = blueprints.describe(
        model,
        quantization,
        config.linear_names(model, skip),
        adapter=blueprints.adapter_sizes(folder / "adapter") if adapter else None,
        experts=experts,
    ).offloading(quantized=quantize_offloaded)

    def place(name: str) -> str:
        """Of the longest entry at or above ``name``."""
        parts = name.split(".")
        above = [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
        return str(next(placement[key] for key in above if key in placement))

    away = [block for block in blueprint.blocks if place(block.name) in _away()]
    resident = [block for block in blueprint.blocks if block not in away]
    share = uses.Share(
        resident=resident,
        streamed=[block for block in away if block.kind == "layer"],
        evicted=[block for block in away if block.kind != "layer"],
    )

    def use(context: int, tokens: int) -> uses.Use:
        if training is not None:
            return uses.use_of(blueprint, share, TrainingLoad(step=training), budget=0)
        return uses.use_of(blueprint, share, Load(context=context, prompt=tokens, **load), budget=0)

    return use


def _away() -> tuple[str, ...]:
    """Places that are not where the model computes."""
    return ("disk",) if main_device() == "cpu" else ("cpu", "disk")


def run(name: str, shape: str, folder: Path, *, quick: bool, say: Callable[[dict[str, Any]], None]) -> None:
    """Measure one case; what is known is said at once, so that a crash leaves it."""
    import torch
    from peft import PeftModel

    from gemma4_compat._lab.workspace import difference

    again = name == "all-gpu-again"
    case = CASES["all-gpu" if again else name]
    forget_peak()
    started = time.perf_counter()
    model = load(shape, case, folder)
    synchronize()
    load_seconds = time.perf_counter() - started
    placement = {key: str(value) for key, value in getattr(model, "hf_device_map", {}).items()}
    say(
        {
            "load": {"seconds": load_seconds, **memory()},
            "quantized_modules": sum(type(item).__name__ == "Params4bit" for item in model.parameters()),
            "offloaded": {
                place: [key for key, value in placement.items() if value == place]
                for place in _away()
                if place in placement.values()
            },
        }
    )
    if case.budget is not None:
        say({"budget_gib": SHAPES[shape].budgets[case.budget]})
    if case.who == "ours":
        off = {key: str(status.state) for key, status in gemma4_compat.status().items() if status.state != "applied"}
        say({"patches_not_applied": off})
        say({"predicted_gib": predicted(shape, case, folder, placement)})
    if case.adapter:
        started = time.perf_counter()
        model = PeftModel.from_pretrained(model, folder / "adapter").eval()
        synchronize()
        say({"adapter_load": {"seconds": time.perf_counter() - started, **memory()}})
    with torch.no_grad():
        seen, clock = outputs(model)
        if case.who == "reference":
            if not again:
                torch.save(seen, folder / f"{name}.pt")
            else:
                say({"parity": difference(torch.load(folder / "all-gpu.pt", weights_only=False), seen)})
        else:
            parity = difference(torch.load(folder / f"{case.reference_outputs}.pt", weights_only=False), seen)
            say({"parity": parity, "streamed_bytes": streamed_bytes(model)})
        if name in ("all-gpu-single", "all-gpu-bf16"):
            return
        in_turns = case.who == "ours" and name in PAIRED and not quick
        say(speed(model, shape, clock, quick=quick or in_turns))
        if in_turns:
            say({"paired": paired(model, case, shape, folder)})
        if name == "all-gpu" and not quick:
            model = PeftModel.from_pretrained(model, folder / "adapter").eval()
            seen, clock = outputs(model)
            torch.save(seen, folder / "all-gpu-adapter.pt")
            say({"with_adapter": speed(model, shape, clock, quick=True)})
