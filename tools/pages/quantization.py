"""The tables of docs/QUANTIZATION.md that come from benchmarks."""

from __future__ import annotations

import json
from typing import Any

from tools.pages.markers import ROOT, filled, shorten


def page() -> str:
    """docs/QUANTIZATION.md with its tables."""
    text = (ROOT / "docs" / "QUANTIZATION.md").read_text(encoding="utf-8")
    for name, content in (
        ("towers", towers_section()),
        ("tower features", tower_features_section()),
        ("modules to keep", keep_section()),
    ):
        text = filled(text, name, content)
    return text


def quantized_bytes() -> dict[str, Any]:
    file = ROOT / "benchmarks" / "results" / "quantized_bytes.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def towers_section() -> str:
    """Bytes of the towers, bf16 and quantized."""
    rows = ["| | tower | bf16 | 8-bit | 4-bit | 4-bit, double | saved by 4-bit |", "|---|---|---|---|---|---|---|"]
    for variant, found in quantized_bytes()["variants"].items():
        for path, nbytes in found["towers"].items():
            sizes = [f"{nbytes[key] / 2**20:.0f} MiB" for key in ("bf16", "8bit", "4bit", "4bit-double")]
            saved = f"{(nbytes['bf16'] - nbytes['4bit']) / 2**20:.0f} MiB"
            rows.append(f"| {' | '.join([variant, path.rpartition('.')[2], *sizes, saved])} |")
        if not found["towers"]:
            rows.append(f"| {variant} | has none | | | | | |")
    return "\n".join([*rows, "", "Parameters only (`python benchmarks/quantization/quantized_bytes.py`)."])


def keep_section() -> str:
    """The modules worth keeping, by variant."""
    found = quantized_bytes()["variants"]
    rows = ["| | module | how many | bf16 costs |", "|---|---|---|---|"]
    for variant, entry in found.items():
        for name, module in entry["keep"].items():
            cost = f"{module['cost'] / 2**20:.1f} MiB" if module["cost"] else "nothing"
            rows.append(f"| {variant} | `{name}` | {module['modules']} | {cost} |")
        total = sum(module["cost"] for module in entry["keep"].values())
        rows.append(f"| {variant} | together | | {total / 2**20:.1f} MiB |")
    return "\n".join(rows)


def tower_features_section() -> str:
    """The committed runs of benchmarks/quantization/towers.py."""
    parts = []
    for file in sorted((ROOT / "benchmarks" / "results" / "towers").glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        versions = ", ".join(f"{name} {text}" for name, text in run["versions"].items())
        parts += [
            f"{run['variant']}, {versions} (CPU, {run['date']}; `python benchmarks/quantization/towers.py --variant "
            f"{run['variant']}`; [raw](../{file.relative_to(ROOT).as_posix()})):",
            "",
            "| tower | stored as | distance to bf16 | of the weights themselves | added by kernels "
            "| two files differ by | without the shim |",
            "|---|---|---|---|---|---|---|",
        ]
        for quantization, modalities in run["with"].items():
            for modality, entry in modalities.items():
                without = run["without"][quantization][modality]
                keys = ("against_bf16", "dequantized_against_bf16", "against_dequantized", "contrast")
                numbers = [f"{entry[key]:.3f}" if key in entry else "" for key in keys]
                if "error" in without:
                    said = shorten(without["error"])
                elif "against_bf16" in without:
                    said = f"{without['against_bf16']:.3f} from bf16, two files {without['contrast']:.3f}"
                else:
                    said = ""
                parts.append(f"| {' | '.join([modality, quantization, *numbers, said])} |")
        parts.append("")
    return "\n".join(parts).rstrip()
