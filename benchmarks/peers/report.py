"""What peers.py's results say, as tables. Imports nothing upstream."""

from __future__ import annotations

import re
import statistics
from typing import Any

from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import kernel_times as kernels

NO_TIME = "no time"
#: What kernels do, by a part of their names; the first that fits counts.
KERNELS = (
    ("4-bit and 8-bit products", "gemm_4bit"),
    ("4-bit and 8-bit products", "mul_mat_vec_q"),
    ("4-bit and 8-bit products", "mul_mat_q"),
    ("inputs made 8-bit", "quantize_q8"),
    ("bf16 products", "nvjet"),
    ("bf16 products", "gemv"),
    ("bf16 products", "mul_mat_vec_f"),
    ("bf16 products", "splitKreduce"),
    ("attention", "fmha"),
    ("attention", "sdpa"),
    ("attention", "flash"),
    ("norms", "reduce_kernel"),
    ("norms", "rms_norm"),
    ("pointwise, fused", "fused_"),
    ("pointwise, fused", "triton_"),
    ("rows and copies", "gather"),
    ("rows and copies", "indexSelect"),
    ("rows and copies", "get_rows"),
    ("rows and copies", "Memcpy"),
    ("rows and copies", "cpy"),
    ("4-bit and 8-bit products", "product_"),
    ("attention", "attention_"),
    ("norms", "rows_"),
)


def summary(speed: Data) -> Data:
    """Of the turns so far."""
    turns = speed["rounds"]
    return {
        "tok_s": common.spread([turn["tok_s"] for turn in turns]),
        "first_token_s": statistics.median(turn["first_token_s"] for turn in turns),
        "first_call_s": speed["first"]["seconds"],
        "load_s": speed["load"]["load_s"],
        "card_gib": speed.get("card_gib"),
    }


def table(result: Data) -> str:
    """All of them, and what is not in them."""
    parts = [_speed(result), _kernels(result), _parts(result), _files(result)]
    if result["not_had"]:
        parts.append("\n".join(f"- Not measured: {name}; {why}." for name, why in result["not_had"].items()))
    return "\n\n".join(part for part in parts if part)


def _speed(result: Data) -> str:
    rows = []
    for entry in result["peers"].values():
        found = entry["speed"].get("summary")
        if found is None and entry["speed"].get("error") == NO_TIME:
            continue  # it is among what was not run
        if found is None:
            rows.append([_name(entry), f"no: {_cell(entry['speed'].get('error', 'not run'))}", *["-"] * 6])
            continue
        low, high = found["tok_s"]["quartiles"]
        rows.append(
            [
                _name(entry),
                f"{found['tok_s']['median']:.1f} ({low:.1f} to {high:.1f})",
                f"{1000 * found['first_token_s']:.0f} ms",
                _gib(found["card_gib"]),
                f"{found['tok_s']['median'] / found['card_gib']:.1f}" if found["card_gib"] else "-",
                f"{found['load_s']:.1f} s",
                f"{found['first_call_s']:.1f} s",
                _answers(entry.get("answers", {})),
            ]
        )
    titles = (
        "software",
        "tok/s",
        "first token",
        "on the card",
        "tok/s per GiB",
        "load",
        "first call",
        "answers, against bf16",
    )
    return _table(titles, rows)


def _parts(result: Data) -> str:
    rows = [
        [_name(entry), *(_works(entry.get(part)) for part in ("adapter", "offload")), _tool(entry.get("tool"))]
        for entry in result["peers"].values()
        if any(part in entry for part in ("adapter", "offload", "tool"))
    ]
    titles = ("software", "with a LoRA adapter", "half of the layers on the host", "its own benchmark")
    return _table(titles, rows)


def _kernels(result: Data) -> str:
    """What a token's time goes to, and the kernel that takes most of it."""
    rows, longest = [], []
    for entry in result["peers"].values():
        profile, found = entry.get("profile", {}), entry["speed"].get("summary")
        if "longest" not in profile or found is None:
            continue
        tok_s = profile.get("tok_s", found["tok_s"]["median"])
        times = (1000 / tok_s, profile["ms_a_token"], *kernels.spent(profile, KERNELS).values())
        how = [f"{key}={text}" for key, text in profile.get("environment", {}).items()]
        name = ", ".join([_name(entry), *how])
        rows.append([name, *(f"{ms:.2f}" for ms in times), f"{profile['kernels_a_token']:.0f}"])
        kernel, ms, count = _longest(profile)
        longest.append(
            f"{_name(entry)}: {100 * ms / profile['ms_a_token']:.0f} % of the kernels' time is `{kernel}`, "
            f"{count:.0f} launches a token, {1000 * ms / count:.1f} \N{MICRO SIGN}s each."
        )
    kinds = dict.fromkeys(kind for kind, _ in KERNELS)
    table = _table(("ms a token", "in all", "kernels", *kinds, "others", "number of kernels"), rows)
    return "\n\n".join([table, *longest]) if rows else ""


def _longest(profile: Data) -> tuple[str, float, float]:
    """The kernel that takes most of a token, whatever types it is compiled for; its milliseconds and launches."""
    spent: dict[str, list[float]] = {}
    for one in profile["longest"]:
        total = spent.setdefault(short(one["name"]), [0.0, 0.0])
        total[0] += one["ms"]
        total[1] += one["count"]
    kernel = max(spent, key=lambda name: spent[name][0])
    return kernel, *spent[kernel]


def short(kernel: str) -> str:
    """A kernel's name without what it returns, its namespaces and its types."""
    plain = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", plain)[0].rpartition("::")[2]


def _files(result: Data) -> str:
    rows = [
        [kind, f"{data['gib']:.2f} GiB", f"{data['seconds']:.0f} s"]
        for kind, data in result["gguf"].items()
        if "error" not in data
    ]
    return _table(("GGUF file", "size", "made in"), rows)


def _name(entry: Data) -> str:
    return f"{entry['software']}, {entry['what']}"


def _answers(found: Data) -> str:
    if "same_token" not in found:
        return "-"
    return f"{100 * found['same_token']:.0f} % the same likeliest token, divergence {found['divergence']:.2g}"


def _works(found: Data | None) -> str:
    if not found:
        return "-"
    if "error" in found:
        return f"no: {_cell(found['error'])}"
    return f"{found['tok_s']:.1f} tok/s"


def _tool(found: Data | None) -> str:
    if not found or "decode" not in found:
        return "-" if not found else f"no: {_cell(found.get('error', 'it said nothing'))}"
    return f"{found['decode']['tok_s']:.1f} tok/s"


def _gib(value: Any) -> str:
    return "-" if value is None else f"{value:.2f} GiB"


def _cell(text: str, limit: int = 160) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _table(titles: tuple[str, ...], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(line)} |" for line in (titles, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(titles), *lines[1:]])
