"""How long does an adapter take to load onto a 4-bit base that is split over GPU and CPU, and what does it leave on
the card: with the shim, and with upstream as it is?

python benchmarks/adapters/adapter_load.py --shape E2B|E4B --out FILE.json [--minutes N] [--rounds N] [--only A,B]

Random weights in the real shape (no network); a rank-16 LoRA adapter on every linear of the language model and both
towers, targeted by full names, so that upstream can load it, too. Two processes, one with the shim, stay alive; each
in its turn loads the base model, loads the adapter with ``PeftModel.from_pretrained``, and drops both. Who goes first
alternates. The base is new each time, because upstream places it anew. The first adapter load of a process pays for
what PEFT imports then, and is reported apart. Ratios are of the two loads of one round. A profile of one more load in
each process says where the time goes.

Exit code 1: with the shim a load raised, the towers left the CPU, or the card holds more than base and adapter + 1 %.

`--shape tiny` runs without a GPU, too: the main device is then the CPU, and "disk" the place of what is offloaded.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data, Order
from benchmarks.small_card import cases as small_card_cases
from benchmarks.small_card import device as small_card_device
from benchmarks.small_card import models as small_card_models
from benchmarks.small_card.cases import Case
from benchmarks.small_card.device import GIB

#: The control comes last: with little time left it is the one with the fewest rounds.
PLACEMENTS = {
    "towers": Case("ours", "towers on the CPU", ("towers",)),
    "table-towers": Case("ours", "per-layer table and towers on the CPU", ("table", "towers")),
    "all-gpu": Case("reference", "everything on the GPU"),
}
#: One round is a load with the shim and a load without.
ROUNDS = {"towers": 4, "table-towers": 3, "all-gpu": 3}
SIDES = {"ours": True, "upstream": False}
GOAL = 0.5
TOLERANCE = 1.01
TOP = 25


# In a worker


def load(order: Order) -> Data:
    """Load base and adapter; what each took of the card, and where the towers are afterwards."""
    from peft import PeftModel

    shape, folder = order["shape"], Path(order["folder"])
    small_card_device.forget_peak()
    left = small_card_device.memory()["resident_gib"]
    model = small_card_models.load(shape, PLACEMENTS[order["placement"]], folder)
    small_card_device.forget_peak()
    base = small_card_device.memory()["resident_gib"]
    entries = len(getattr(model, "hf_device_map", {}))
    profile = cProfile.Profile() if order.get("profile") else None
    gc.disable()
    small_card_device.synchronize()
    started = time.perf_counter()
    try:
        if profile is not None:
            profile.enable()
        adapted = PeftModel.from_pretrained(model, folder / "adapter-linear")
        small_card_device.synchronize()
        if profile is not None:
            profile.disable()
        seconds = time.perf_counter() - started
    finally:
        gc.enable()
    peak = small_card_device.memory()["peak_gib"]
    small_card_device.forget_peak()
    result: Data = {
        "seconds": seconds,
        "entries_before": entries,
        "entries": len(getattr(adapted, "hf_device_map", {})),
    }
    parameters = dict(adapted.named_parameters())
    result["towers_on"] = sorted(
        {value.device.type for name, value in parameters.items() if ".layers." in name and _of_tower(name)}
    )
    adapter = [value for name, value in parameters.items() if "lora_" in name]
    result["adapter_tensors"] = len(adapter)
    result["adapter_on_meta"] = sum(value.device.type == "meta" for value in adapter)
    if base is not None and left is not None and peak is not None:
        bytes_there = sum(value.nbytes for value in adapter if value.is_cuda)
        after = float(small_card_device.memory()["resident_gib"] or 0.0)
        result |= {
            "base_gib": base - left,
            "peak_gib": peak - left,
            "after_gib": after - left,
            "adapter_gib": bytes_there / GIB,
            "of_base_and_adapter": (after - left) / (base - left + bytes_there / GIB),
        }
    if profile is not None:
        result["profile"] = described(profile)
    del model, adapted, parameters, adapter
    small_card_device.forget_peak()
    return result


def _of_tower(name: str) -> bool:
    return "lora_" not in name and any(tower.rpartition(".")[2] in name for tower in small_card_cases.TOWERS)


def described(profile: cProfile.Profile) -> Data:
    """The most expensive functions, and the own time of each package; profiled time is longer than time is."""
    stats: Any = pstats.Stats(profile)
    rows = []
    packages: dict[str, float] = {}
    for (file, number, name), (_, calls, own, cumulative, _) in stats.stats.items():
        parts = Path(file).parts
        inside = next((n for n, part in enumerate(parts) if part in ("site-packages", "dist-packages")), None)
        if "gemma4_compat" in parts:
            path = "/".join(parts[len(parts) - parts[::-1].index("gemma4_compat") - 1 :])
        else:
            path = "/".join(parts[inside + 1 :] if inside is not None else parts[-2:])
        package = "built-in" if file == "~" else path.partition("/")[0]
        packages[package] = packages.get(package, 0.0) + own
        where = name if file == "~" else f"{path}:{number} {name}"
        rows.append({"function": where, "calls": calls, "own_s": own, "cumulative_s": cumulative})
    return {
        "total_s": stats.total_tt,
        "calls": stats.total_calls,
        "own_s_of_packages": dict(sorted(packages.items(), key=lambda item: -item[1])[:12]),
        "cumulative": sorted(rows, key=lambda row: -row["cumulative_s"])[:TOP],
        "own": sorted(rows, key=lambda row: -row["own_s"])[:TOP],
    }


def build(order: Order) -> Data:
    """The checkpoint and the adapters."""
    return small_card_models.build(order["shape"], Path(order["folder"]), everywhere=True)


# The parent


def schedule(rounds: dict[str, int]) -> list[str]:
    """Placements in the order of their rounds: each in turn, and the first one twice at the start."""
    left = dict(rounds)
    first = next(iter(left))
    order = [first]
    left[first] -= 1
    while any(left.values()):
        for name in list(left):
            if left[name]:
                order.append(name)
                left[name] -= 1
    return order


def summary(rounds: list[Data]) -> Data:
    """Of each placement: seconds, ratios of rounds after the first load of the process, and what is on the card."""
    found: Data = {}
    for name, case in PLACEMENTS.items():
        own = [entry for entry in rounds if entry["placement"] == name]
        steady = [entry for entry in own if not entry["first_in_process"]]
        good = [entry for entry in steady if all(entry[side]["error"] is None for side in SIDES)]
        ratios = [entry["ours"]["seconds"] / entry["upstream"]["seconds"] for entry in good]
        data: Data = {"what": case.what, "ratio": common.spread(ratios) if ratios else None}
        if ratios and "towers" in case.offload:
            data["goal"] = {"ratio": GOAL, "reached": data["ratio"]["median"] <= GOAL}
        for side in SIDES:
            ran = [entry[side] for entry in own if entry[side]["error"] is None]
            errors = [entry[side]["error"] for entry in own if entry[side]["error"] is not None]
            data[side] = {
                "error": errors[0] if errors else None,
                "first_in_process_s": [entry[side].get("seconds") for entry in own if entry["first_in_process"]],
                "seconds": [entry[side]["seconds"] for entry in steady if entry[side]["error"] is None],
            }
            if data[side]["seconds"]:
                data[side]["median_s"] = statistics.median(data[side]["seconds"])
            last = ran[-1] if ran else {}
            keys = ("base_gib", "peak_gib", "after_gib", "adapter_gib", "of_base_and_adapter", "towers_on")
            data[side] |= {key: last[key] for key in (*keys, "entries_before", "entries") if key in last}
        if own:
            found[name] = data
    return found


def problems(rounds: list[Data]) -> list[str]:
    """What the shim did not keep."""
    found = []
    for number, entry in enumerate(rounds):
        ours, name = entry["ours"], f"round {number}, {entry['placement']}"
        if ours["error"] is not None:
            found.append(f"{name}: {ours['error']}")
            continue
        if "towers" in PLACEMENTS[entry["placement"]].offload and ours["towers_on"] != ["meta"]:
            found.append(f"{name}: the towers are on {ours['towers_on']}")
        if ours.get("of_base_and_adapter", 0.0) > TOLERANCE:
            found.append(f"{name}: the card holds {ours['of_base_and_adapter']:.3f} of base and adapter")
        if ours["adapter_on_meta"]:
            found.append(f"{name}: {ours['adapter_on_meta']} adapter weights are on meta")
    return found


def line(entry: Data) -> str:
    parts = [f"{entry['placement']:<13}"]
    for side in SIDES:
        data = entry[side]
        text = data["error"][:70] if data["error"] is not None else f"{data['seconds']:.2f} s"
        if "after_gib" in data:
            text += f" {data['base_gib']:.2f} -> {data['after_gib']:.2f} GiB (peak {data['peak_gib']:.2f})"
        parts.append(f"{side} {text}")
    return "  ".join(parts) + ("  (first load of the processes)" if entry["first_in_process"] else "")


def measure(
    shape: str,
    wanted: list[str],
    *,
    out: Path | None,
    minutes: float,
    rounds: int | None,
    folder: Path | None,
    options: list[str],
    note: str | None,
) -> Data:
    """Build, and load in turns until all rounds are done or the time is up; ``out`` is written after each round."""
    script = Path(__file__)
    deadline = time.monotonic() + 60 * minutes
    result = common.header(script, sys.modules[__name__], shape, options, note)
    done: list[Data] = []
    with (
        common.temporary("adapter-load-", folder or small_card_models.work_folder(shape)) as work,
        common.workers(script, work) as start,
    ):
        sides = {side: start(shim) for side, shim in SIDES.items()}
        order = {"shape": shape, "folder": str(work)}
        built = start(True)({"do": "build", **order})
        if built["error"] is not None:
            raise SystemExit(f"the checkpoint could not be built: {built['error']}")
        result |= {key: value for key, value in built.items() if key != "error"}
        for worker in sides.values():
            worker.wait()
        longest = 0.0
        planned = schedule({name: rounds or ROUNDS[name] for name in wanted})
        for number, placement in enumerate(planned):
            # The profiles need about as long as a round.
            if time.monotonic() + 2.2 * longest > deadline:
                result["not_run"] = [f"round {n}, {name}" for n, name in enumerate(planned) if n >= number]
                break
            began = time.monotonic()
            entry: Data = {"placement": placement, "first_in_process": number == 0}
            turns = list(sides) if number % 2 == 0 else list(sides)[::-1]
            entry["order"] = turns
            for side in turns:
                entry[side] = sides[side]({"do": "load", "placement": placement, **order})
            longest = max(longest, time.monotonic() - began)
            done.append(entry)
            result |= {"summary": summary(done), "rounds": done, "problems": problems(done)}
            common.write(result, out)
            print(line(entry), flush=True)
        result["profile"] = {}
        for side, worker in sides.items():
            if time.monotonic() + 0.6 * longest > deadline:
                result["not_run"].append(f"profile, {side}")
                continue
            said = worker({"do": "load", "placement": "towers", "profile": True, **order})
            result["profile"][side] = said.get("profile", {"error": said["error"]})
        common.write(result, out)
    return result


ACTIONS: dict[str, Callable[[Order], Data]] = {"build": build, "load": load}


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(small_card_cases.SHAPES), minutes=2.5)
    parser.add_argument("--rounds", type=int, help=f"of each placement (default: {ROUNDS})")
    parser.add_argument("--only", help=f"these placements, separated by commas; all: {', '.join(PLACEMENTS)}")
    arguments = parser.parse_args(argv)
    if arguments.child:
        return common.serve(ACTIONS)
    if arguments.shape is None:
        parser.error("--shape is required")
    asked = arguments.only.split(",") if arguments.only else list(PLACEMENTS)
    if unknown := [name for name in asked if name not in PLACEMENTS]:
        parser.error(f"unknown placements: {', '.join(unknown)}")
    result = measure(
        arguments.shape,
        [name for name in PLACEMENTS if name in asked],
        out=arguments.out,
        minutes=arguments.minutes,
        rounds=arguments.rounds,
        folder=arguments.work,
        options=common.shown(arguments),
        note=arguments.note,
    )
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
