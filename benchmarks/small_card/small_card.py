"""What does Gemma 4 on a small card cost: VRAM, speed and parity of each placement, against everything on the GPU?

python benchmarks/small_card/small_card.py --shape E2B|E4B --out FILE.json [--cases A,B] [--quick] [--minutes N]

Random weights in the real shape (no network), 4-bit with double quantization, towers in bf16. Each case runs in a
process of its own, and the file is written after each. Everything on the GPU is measured first and again last, and
shares refer to the mean of the two, because machines drift: compare inside one run only. A case that crashes is a
result. Exit code 1: a case with the shim on raised, or its outputs are not those of the same weights on the GPU, or
there was no time for it.

`--shape tiny` runs without a GPU, too: the main device is then the CPU, and "disk" the place of what is offloaded.
"""

from __future__ import annotations

import argparse
import datetime
import json
import queue
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gemma4_compat  # noqa: E402
from benchmarks import common  # noqa: E402
from benchmarks.common import MARK  # noqa: E402
from benchmarks.small_card import measure as small_card_measure  # noqa: E402
from benchmarks.small_card import models as small_card_models  # noqa: E402  (imports gemma4_compat before the libraries, as a user would)
from benchmarks.small_card.cases import CASES, LAYERS, QUICK, SHAPES, layer_names, selected  # noqa: E402

CASE_TIMEOUT_S = 170


def child() -> int:
    """Import everything, wait for one line of JSON that says what to do, do it."""
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    from transformers import Gemma4ForConditionalGeneration  # noqa: F401

    line = sys.stdin.readline()
    if not line:
        return 0
    order = json.loads(line)
    folder = Path(order["folder"])

    def say(data: dict[str, Any]) -> None:
        print(f"{MARK}{json.dumps(data)}", flush=True)

    say({})  # the next child may start its imports
    try:
        if order["name"] == "build":
            say(small_card_models.build(order["shape"], folder))
        else:
            small_card_measure.run(order["name"], order["shape"], folder, quick=order["quick"], say=say)
    except Exception as error:  # noqa: BLE001  (a crash is a result)
        say({"error": common.told(error, folder)})
    return 0


class Child(common.Process):
    """A process that has its imports behind it when it is told what to do; it takes one order."""

    def __call__(self, order: dict[str, Any], timeout: float, begun: Callable[[], None]) -> dict[str, Any]:
        """What it says, merged. ``begun`` is called as soon as it has started on the order."""
        end, first = time.monotonic() + timeout, True
        result: dict[str, Any] = {}
        self.send(order)
        while True:
            try:
                line = self.said(end - time.monotonic())
            except queue.Empty:
                result["error"] = f"no end after {timeout:.0f} s"
                break
            if line is None:
                if ended := self.end():
                    result["error"] = ended
                break
            if line.startswith(MARK):
                result.update(json.loads(line.removeprefix(MARK)))
                if first:
                    first = False
                    begun()
        self.close()
        return result


class Children:
    """Runs orders one after another; the next one's process imports while the one before loads its model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = 0
        self.waiting: dict[bool, Child] = {}

    def start(self, shim: bool) -> None:
        """Have a process with these settings ready."""
        if shim not in self.waiting:
            self.started += 1
            self.waiting[shim] = Child(Path(__file__), shim=shim, log=self.folder / f"log-{self.started}.txt")

    def run(self, order: dict[str, Any], *, shim: bool, following: bool | None, timeout: float) -> dict[str, Any]:
        """The answer to an order. ``following``: the settings of the next one; None: there is none."""
        self.start(shim)
        started = time.monotonic()
        order = {"folder": str(self.folder), **order}
        begun = (lambda: None) if following is None else (lambda: self.start(following))
        result = self.waiting.pop(shim)(order, timeout, begun)
        return {"error": None, **result, "wall_s": time.monotonic() - started}

    def close(self) -> None:
        """End what is still waiting."""
        for process in self.waiting.values():
            process.close()


def shares(cases: dict[str, Any]) -> dict[str, Any]:
    """Everything on the GPU, first and last, with their mean, which the shares refer to; adds shares to the cases."""
    both = [cases[name] for name in ("all-gpu", "all-gpu-again") if "decode" in cases.get(name, {})]
    if not both:
        return {}
    rates = [entry["decode"]["tok_s"] for entry in both]
    lengths = [length for length in both[0]["prefill"] if all(length in entry["prefill"] for entry in both)]
    times = {length: [entry["prefill"][length]["ms"] for entry in both] for length in lengths}
    for entry in cases.values():
        if "decode" in entry and "earlier_run" not in entry:
            entry["decode_share"] = entry["decode"]["tok_s"] / statistics.mean(rates)
            entry["prefill_times"] = {
                length: entry["prefill"][length]["ms"] / statistics.mean(times[length])
                for length in lengths
                if length in entry["prefill"]
            }
        if "paired" in entry:
            entry["decode_share"], entry["prefill_times"] = entry["paired"]["share"], entry["paired"]["times"]
    return {"decode_tok_s": rates, "decode_tok_s_mean": statistics.mean(rates), "prefill_ms": times}


def problems(cases: dict[str, Any]) -> list[str]:
    """What makes the run a failure: cases with the shim on that raised or do not agree, and references that failed."""
    found = []
    for name, entry in cases.items():
        if entry["who"] == "upstream":
            continue
        if entry["error"] is not None:
            found.append(f"{name}: {entry['error']}")
        elif entry.get("parity", 0.0) != 0.0:
            found.append(f"{name}: outputs differ by {entry['parity']} from the same weights on the GPU")
    return found


def line(name: str, entry: dict[str, Any]) -> str:
    if entry["error"] is not None:
        return f"{name:<22} {entry['error'][:150]}"
    parts = [f"{name:<22} load {entry['load']['seconds']:6.1f} s"]
    if "decode" in entry:
        decode = entry["decode"]
        peak = "" if decode["peak_gib"] is None else f"{decode['resident_gib']:.2f}/{decode['peak_gib']:.2f} GiB "
        parts.append(f"decode {decode['tok_s']:7.2f} tok/s {peak}")
    if "paired" in entry:
        times = " ".join(f"{value:.2f}" for value in entry["paired"]["times"].values())
        parts.append(f"share {entry['paired']['share']:.3f} prefill x {times}")
    if "parity" in entry:
        parts.append(f"parity {entry['parity']}")
    return "  ".join([*parts, f"({entry['wall_s']:.0f} s)"])


def measure(
    shape: str,
    wanted: list[str],
    *,
    out: Path | None = None,
    quick: bool = False,
    minutes: float = 8.5,
    folder: Path | None = None,
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the checkpoint, run the cases, and write ``out`` after each one.

    Cases of an ``earlier`` result of the same shape that are not run again stay, with the shares of their own run.
    """
    deadline = time.monotonic() + 60 * minutes
    result: dict[str, Any] = {
        "question": common.question(sys.modules[__name__]),
        "shape": shape,
        "date": datetime.date.today().isoformat(),
        "gemma4_compat": gemma4_compat.__version__,
        "settings": {
            "prompt": small_card_models.PROMPT,
            "new_tokens": small_card_models.NEW_TOKENS,
            "runs": 1 if quick else small_card_measure.RUNS,
            "quick": quick,
        },
        "reference": {},
        "problems": [],
    }
    cases: dict[str, Any] = {}
    for name, entry in (earlier or {}).get("cases", {}).items():
        if entry["error"] is None and not name.startswith("all-gpu"):
            cases[name] = {**entry, "earlier_run": entry.get("earlier_run", (earlier or {})["reference"])}

    def write() -> None:
        result["reference"] = shares(cases)
        result["problems"] = problems(cases)
        result["cases"] = cases
        common.write(result, out)

    with common.temporary("small-card-", folder or small_card_models.work_folder(shape)) as work:
        children = Children(work)
        try:
            built = children.run({"name": "build", "shape": shape}, shim=True, following=True, timeout=CASE_TIMEOUT_S)
            error, seconds = built.pop("error"), built.pop("wall_s")
            if error is not None:
                raise SystemExit(f"the checkpoint could not be built: {error}")
            result.update(built)
            print(f"built {built['parameters'] / 1e9:.2f} billion parameters in {seconds:.0f} s", flush=True)
            names = [*selected(wanted, shape, gpu=built["host_to_device_gib_s"] is not None), "all-gpu-again"]
            reserve = 0.0
            for name, after in zip(names, [*names[1:], None]):
                case = CASES["all-gpu" if name == "all-gpu-again" else name]
                entry: dict[str, Any] = {"who": case.who, "what": case.what, "error": None}
                if case.offload:
                    parts = [part for part in case.offload if part in LAYERS]
                    entry["layers"] = sum(len(layer_names(shape, part)) for part in parts)
                left = deadline - time.monotonic() - (0 if after is None else reserve)
                if left < 0.7 * reserve and after is not None:
                    cases[name] = {**entry, "error": "not run: no time left"}
                else:
                    shim = CASES[after].who != "upstream" if after in CASES else True
                    order = {"name": name, "shape": shape, "quick": quick}
                    entry |= children.run(
                        order,
                        shim=case.who != "upstream",
                        following=None if after is None else shim,
                        timeout=CASE_TIMEOUT_S if after is None else min(CASE_TIMEOUT_S, max(left, 20.0)),
                    )
                    cases[name] = entry
                    if name == "all-gpu":
                        reserve = entry["wall_s"]
                write()
                print(line(name, cases[name]), flush=True)
                if name == "all-gpu" and cases[name]["error"] is not None:
                    break  # nothing to compare with
        finally:
            children.close()
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="what is built")
    parser.add_argument("--cases", help=f"separated by commas; default: all of {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} only, each timed once")
    parser.add_argument("--minutes", type=float, default=8.5, help="start no case that would end later (default: 8.5)")
    parser.add_argument("--out", type=Path, help="write the result here after every case")
    parser.add_argument("--add-to", type=Path, help="keep the cases of this earlier result that are not run again")
    parser.add_argument("--work", type=Path, help="folder for the checkpoint (default: /dev/shm, or a temporary one)")
    arguments = parser.parse_args(argv)
    if arguments.child:
        return child()
    if arguments.shape is None:
        parser.error("--shape is required")
    wanted = arguments.cases.split(",") if arguments.cases else list(QUICK if arguments.quick else CASES)
    if unknown := [name for name in wanted if name not in CASES]:
        parser.error(f"unknown cases: {', '.join(unknown)}")
    earlier = None
    if arguments.add_to is not None:
        earlier = json.loads(arguments.add_to.read_text(encoding="utf-8"))
        if earlier["shape"] != arguments.shape:
            parser.error(f"{arguments.add_to} holds a result of {earlier['shape']}, not of {arguments.shape}")
    result = measure(
        arguments.shape,
        wanted,
        out=arguments.out,
        quick=arguments.quick,
        minutes=arguments.minutes,
        folder=arguments.work,
        earlier=earlier,
    )
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
