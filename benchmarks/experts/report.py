"""What the results of experts.py, experts_loading.py and disk_reads.py say, as tables. Imports nothing upstream."""

from __future__ import annotations

import statistics

from benchmarks.common import Data
from benchmarks.decoding import kernel_times as kernels
from gemma4_compat._plan import text

WHAT = {
    "card": "everything on the card",
    "experts": "experts of all layers in host memory",
    "layers": "all layers in host memory, without experts streamed",
    "whole": "all layers in host memory, streamed as a whole",
    "disk": "experts of all layers on disk",
    "upstream": "upstream: everything on the card, experts in bf16",
}
CHUNKED = "8192 in chunks"
SPEEDS = ("eager", "separate_kernels", "replayed")
TRAINED = ("tokens_s", "peak_gib", "peak_reserved_gib")
#: What kernels do, by a part of their names.
KERNELS = (
    ("experts, read and dequantized", "experts_"),
    ("pointwise, fused", "fused_"),
    ("rows of experts", "indexSelectSmallIndex"),
    ("copies of layers", "Memcpy HtoD"),
    ("attention", "fmha"),
    ("attention", "sdpa"),
    ("4-bit layers", "gemm_4bit"),
    ("dequantizing experts", "kDequantizeBlockwise"),
    ("copies of rows", "gather_kernel"),
    ("norms", "reduce_kernel"),
    ("bf16 products", "nvjet"),
)
#: Those of a plan, and half of the slowest one: bytes a second that a pinned copy gets, about.
BUSES = {"6 GiB/s (PCIe 3 x8)": 6 << 30, **text.BUSES}


def table(run: Data) -> str:
    """A row for each placement; what the time of a step goes to; what other buses allow."""
    rows = []
    for name, case in run["cases"].items():
        memory, speed, bits = (case.get(part) or {} for part in ("memory", "speed", "bits"))
        if not any((memory, speed, bits)):
            continue
        differ = [value for value in bits.values() if isinstance(value, float)]
        rows.append(
            [
                WHAT.get(name) or f"{name.partition(':')[2]} GiB of VRAM",
                _number(memory.get("loaded_gib", (case.get("build") or {}).get("resident_gib"))),
                *(_number(memory.get(length, {}).get("peak_gib")) for length in ("2048", "8192")),
                _number(next((value["peak_gib"] for key, value in memory.items() if CHUNKED in key), None)),
                *(_number(speed.get(way, {}).get("tok_s"), ".1f") for way in SPEEDS),
                str(max(differ)) if differ else "-",
            ]
        )
    titles = (
        *("placement", "VRAM loaded, GiB", "peak, prompt of 2,048 tokens", "of 8,192", "of 8,192 in chunks"),
        *("tok/s eager", "replayed, experts by many kernels", "tok/s replayed", "largest difference from the card"),
    )
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n\n".join(filter(None, (_joined(lines), _profile(run), _buses(run), _training(run), _cold(run))))


def _joined(lines: list[list[str] | tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _profile(run: Data) -> str:
    """Milliseconds of the kernels of a replayed step; copies of layers run beside them."""
    found = {name: case["profile"] for name, case in run["cases"].items() if case.get("profile")}
    if not found:
        return ""
    rows: list[list[str]] = []
    for name, profile in found.items():
        times = (profile["ms_a_token"], *kernels.spent(profile, KERNELS).values())
        shown = [_number(value, ".1f") for value in times]
        rows.append([WHAT.get(name) or name, *shown, _number(profile["kernels_a_token"], ".0f")])
    kinds = dict.fromkeys(kind for kind, _ in KERNELS)
    titles = ("ms a token", "kernels", *kinds, "others", "number of kernels")
    return _joined([titles, ("---",) * len(titles), *rows])


def _buses(run: Data) -> str:
    """Computed: the step of experts on the card, then what it brings over the bus."""
    cases = {name: case["speed"] for name, case in run["cases"].items() if "replayed" in (case.get("speed") or {})}
    if "card" not in cases or len(cases) < 2:
        return ""
    computing = 1 / cases["card"]["replayed"]["tok_s"]
    rows = []
    for name, speed in cases.items():
        brought = sum(speed["bytes_a_token"].values())
        if brought:
            allowed = [1 / (computing + brought / bus) for bus in BUSES.values()]
            rows.append(
                [
                    WHAT.get(name) or f"{name.partition(':')[2]} GiB of VRAM",
                    *(_number(value, ".1f") for value in (brought / (1 << 20), speed["replayed"]["tok_s"], *allowed)),
                ]
            )
    titles = ("computed, tok/s", "MiB a token", "measured here", *BUSES)
    return _joined([titles, ("---",) * len(titles), *rows])


def _training(run: Data) -> str:
    """Steps of QLoRA."""
    rows = []
    for name, case in run["cases"].items():
        for length, found in (case.get("training") or {}).items():
            rows.append(
                [
                    WHAT.get(name) or name,
                    f"{int(length):,}",
                    _number(statistics.median(found["seconds"])),
                    *(_number(found[key], ".0f" if key == "tokens_s" else ".2f") for key in TRAINED),
                ]
            )
    titles = ("steps of QLoRA", "tokens", "seconds", "tokens a second", "VRAM peak, GiB", "reserved")
    return _joined([titles, ("---",) * len(titles), *rows]) if rows else ""


def _cold(run: Data) -> str:
    """Forwards of a token with experts on disk."""
    found = (run["cases"].get("disk") or {}).get("cold")
    if not found:
        return ""
    return (
        f"Experts on disk, forwards of a token, median of {len(found['seconds']['cold'])}: "
        f"{_number(found['tok_s']['warm'], '.1f')} tokens a second once the experts that it takes are in memory, "
        f"{_number(found['tok_s']['cold'], '.1f')} while nothing of the files is (at most "
        f"{found['resident_before']:.1%} of them was). Files are read there in order at "
        f"{_number(found['read_gib_s'], '.1f')} GiB/s, and a token takes "
        f"{_number(sum(run['cases']['disk']['speed']['bytes_a_token'].values()) / (1 << 20), '.0f')} MiB."
    )


LOADED = {
    "upstream": "upstream, on the card: experts in bf16",
    "card": "4-bit experts, on the card",
    "host": "4-bit experts in host memory",
    "saved": "the same, from the saved 4-bit checkpoint",
}


def loading(run: Data) -> str:
    """A row for each way to load a mixture of experts."""
    rows = []
    for way, found in run["ways"].items():
        values = [_number(found[key]) for key in ("seconds", "resident_gib", "peak_gib", "host_peak_gib", "host_gib")]
        rows.append([LOADED[way], *values, _number(found.get("experts_stored_gib"))])
    titles = (
        *("loaded", "seconds", "VRAM, GiB", "peak while loading", "host memory, peak while loading, GiB"),
        *("host memory, loaded", "experts in 4 bits, GiB"),
    )
    return _joined([titles, ("---",) * len(titles), *rows])


READ = {
    "experts": "8 of 128 experts of a layer of the 26B-A4B, 4-bit",
    "prompt": "rows of E2B's per-layer table, 512 tokens",
    "token": "rows of E2B's per-layer table, 1 token",
}


def disk_reads(run: Data) -> str:
    """A row for each kind of read."""
    rows = []
    for case, found in run["cases"].items():
        median, low, high = found["cold_times_as_fast"]
        times = [
            _number(found[f"{kind}_{way}_ms"], ".1f") for kind in ("cold", "warm") for way in ("plain", "announced")
        ]
        rows.append(
            [READ[case], f"{found['bytes'] / (1 << 20):.2f}", *times, f"{median:.1f} ({low:.1f} to {high:.1f})"]
        )
    titles = (
        *(
            "read of a mapped file",
            "MiB",
            "cold, ms",
            "cold, announced, ms",
            "in memory, ms",
            "in memory, announced, ms",
        ),
        "cold: times as fast, announced",
    )
    lines = [titles, ("---",) * len(titles), *rows]
    said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in run["disk"].items())
    return f"{_joined(lines)}\n\nThe disk: {run['read_gib_s']:.2f} GiB/s in order; {said}."


def _number(value: float | None, shown: str = ".2f") -> str:
    return "-" if value is None else format(value, shown)
