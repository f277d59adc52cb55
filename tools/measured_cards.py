"""Write reports in the form of ``gemma4-compat check`` from benchmarks here: the machines that were at hand.

python -m tools.measured_cards            write them into gemma4_compat/_plan/cards/measured_cards
python -m tools.measured_cards --check    exit 1 when a file is not what the results say (a test does this)

Only what a result holds is written; the rest is null. A report from somebody's own machine is a file of that folder as
``check`` wrote it; no tool is needed for it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.models import variants
from gemma4_compat._plan.cards import measured

ROOT = Path(__file__).resolve().parent.parent
_GIB = 1 << 30
#: File -> results, the first of which says what the machine was. Random weights in 4 bits, double quantization.
FILES = {
    "NVIDIA-H200-E2B.json": ("2026-11-24-h200-speed", "2026-11-24-h200-lora"),
    "NVIDIA-H200-E4B.json": ("2026-11-24-h200-speed", "2026-11-24-h200-lora"),
    "NVIDIA-H200-12B.json": ("2026-11-24-h200-speed",),
    "NVIDIA-H200-31B.json": ("2026-11-24-h200-speed",),
    "NVIDIA-H100-E2B.json": ("2026-11-26-h100-multiprocessors",),
    "NVIDIA-H100-E4B.json": ("2026-11-26-h100-multiprocessors",),
}
#: Cases of graph_decoding.py and multiprocessors.py -> what of the model is in host memory.
_AWAY = {"gpu": (), "host": ("towers",), "streamed": ("towers", "layers")}
_WITH_ADAPTER = "+lora"
#: Runs before this day replayed PyTorch's kernels: ``decode_fast`` is faster today, unless the bus limits it.
_CUSTOM_KERNELS = "2026-11-25"


def texts() -> dict[Path, str]:
    """Each file and its text."""
    return {measured.FOLDER / name: _text(name, folders) for name, folders in FILES.items()}


def _text(name: str, folders: tuple[str, ...]) -> str:
    shape = name.removesuffix(".json").split("-", 2)[2]
    files = [next((ROOT / "benchmarks" / "results" / folder).glob(f"*-{shape}.json")) for folder in folders]
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    text = variants.config(shape).get_text_config()
    placements: dict[str, dict[str, Any]] = {}
    for run in runs:
        for case, measured_case in _cases(run):
            base = case.removesuffix(_WITH_ADAPTER)
            if base in _AWAY:
                entry = placements.setdefault(base, _placement(shape, base))
                context = run.get("settings", {}).get("prompt", 64)
                replays = run["date"] >= _CUSTOM_KERNELS or base == "streamed"
                _add(entry, measured_case, adapter=case != base, context=context, replays=replays)
    report = {
        "schema": 1,
        "gemma4_compat": runs[0]["gemma4_compat"],
        "form": 1,
        "source": ", ".join(file.relative_to(ROOT).as_posix() for file in files),
        "date": runs[0]["date"],
        "quick": False,
        "seconds": None,
        "machine": _machine(runs[0]),
        "patches": {"off": [], "failed": []},
        "model": {
            "tiny": False,
            "model_class": f"Gemma4{'Unified' * (shape == variants.UNIFIED)}ForConditionalGeneration",
            "variant": shape,
            "parameters": runs[0]["parameters"],
            "layers": text.num_hidden_layers,
            "hidden": text.hidden_size,
            "vocabulary": text.vocab_size,
            "stored_quantized": False,
            "quantization": "4bit-double",
            "quantized_experts": False,
        },
        "adapter": None,
        "budget": None,
        "note": "random weights in the real shape",
        "context": 164,
        "placements": list(placements.values()),
        "merge": None,
        "verdict": {"ok": True, "text": "No answers were compared in these runs.", "problems": []},
    }
    return json.dumps(report, indent=1) + "\n"


def _cases(run: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The cases that were timed."""
    if "counts" in run:
        most = max(run["counts"], key=int)
        yield from run["counts"][most].items()
        return
    yield from ((name, case) for name, case in run["cases"].items() if "summary" in case.get("speed", {}))


def _placement(shape: str, case: str) -> dict[str, Any]:
    """Without measurements."""
    config = variants.config(shape)
    text = config.get_text_config()
    per_layer = getattr(text, "hidden_size_per_layer_input", 0)
    names = ["model.language_model.embed_tokens_per_layer"] if per_layer else []
    if shape == variants.UNIFIED:
        names += ["model.embed_vision", "model.embed_audio"]
    else:
        names += ["model.vision_tower"] + (["model.audio_tower"] if config.audio_config is not None else [])
    if "layers" in _AWAY[case]:
        names += [f"model.language_model.layers.{index}" for index in range(text.num_hidden_layers)]
    away = measured.away(dict.fromkeys(names, "cpu") if _AWAY[case] else {})
    return {
        "title": measured.title(away),
        "merged": False,
        "away": away,
        "planned": None,
        "loading_peak": None,
        "running_peak": None,
        "load_s": None,
        "seconds": None,
        "replayed": 0,
        "fused": 0,
        "speeds": [],
        "answers": [],
        "failures": [],
        "skipped": [],
    }


def _add(entry: dict[str, Any], case: dict[str, Any], *, adapter: bool, context: int, replays: bool) -> None:
    """Add what was measured; the speed of replays only if they are those of today."""
    speed: dict[str, Any] = {"adapter": adapter, "context": context}
    if "speed" in case:
        found, load = case["speed"]["summary"], case["load"]
        entry["replayed"] += sum(found["steps"]["replayed"])
        entry["fused"] = max([entry["fused"], *found["steps"].get("fused", [])])
        peaks = [found["peak_gib"][way] for way in ("eager", "replayed")]
        entry["running_peak"] = max(entry["running_peak"] or 0, round(max(peaks) * _GIB))
        before = entry["planned"] or {"prefill": 0, "decode": 0}
        planned = {name: round(load["planned_gib"][name] * _GIB) for name in ("prefill", "decode")}
        entry["planned"] = {"loading": None, **{name: max(planned[name], before[name]) for name in planned}}
        if not adapter:
            entry["load_s"], entry["loading_peak"] = load["load_s"], round(load["memory"]["peak_gib"] * _GIB)
        for way, name in (("eager", "eager"), ("fast", "replayed")):
            timed = way == "eager" or replays
            speed[f"{way}_tokens_s"] = found["tok_s"][name]["median"] if timed else None
            speed[f"{way}_first_token_s"] = found["first_token_s"][name] if timed else None
    else:
        speed |= {"eager_tokens_s": None, "eager_first_token_s": None}
        speed |= {"fast_tokens_s": statistics.median(case["rounds"]), "fast_first_token_s": None}
    entry["speeds"].append(speed)


def _machine(run: dict[str, Any]) -> dict[str, Any]:
    machine, copies = run["machine"], run["host_to_device_gib_s"]
    counts = run.get("counts", {})
    first = next(iter(counts[max(counts, key=int)].values())) if counts else {}
    return {
        "system": None,
        "machine": None,
        "python": machine["python"],
        "cores": None,
        "versions": machine["versions"],
        "gpu": {
            "name": machine["device"],
            "memory": None,
            "free": None,
            "multiprocessors": first.get("of"),
            "ghz": first["clock_mhz"] / 1000 if first else None,
            "capability": None,
            "driver": machine["driver"],
            "cuda": machine["cuda"],
        },
        "copies": {
            "pinned": round(copies["pinned"] * _GIB),
            "pageable": round(copies["pageable"] * _GIB),
            "device": None,
            "host": None,
        },
    }


def main() -> int:
    wanted = texts()
    stale = [file for file, text in wanted.items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        for file in stale:
            print(f"{file.relative_to(ROOT)} is stale; run python -m tools.measured_cards", file=sys.stderr)
        return 1 if stale else 0
    for file in stale:
        file.parent.mkdir(exist_ok=True)
        file.write_text(wanted[file], encoding="utf-8")
        print(f"wrote {file.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
