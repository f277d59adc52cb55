"""The table of packed layers in docs/QUANTIZATION.md: ``python -m tools.pages.packed`` writes it, a test compares."""

from __future__ import annotations

from gemma4_compat._gemma4.models import build, variants
from tools.pages.markers import ROOT, between

PAGE = ROOT / "docs" / "QUANTIZATION.md"
GROUPS = (32, 128, 0)
_BEGIN, _END = (f"<!-- python -m tools.pages.packed: {word} -->" for word in ("begin", "end"))


def row(variant: str) -> str:
    """A variant's cells: bf16, packed with a scale for so many columns (0: a row), and one layer's weight in bf16."""
    import torch

    model = build.on_meta(variant)[0]
    whole = sum(value.nbytes for value in model.parameters())
    linears = [
        module.weight
        for name, module in model.get_submodule("model.language_model.layers").named_modules()
        if type(module) is torch.nn.Linear and not name.endswith("router.proj")
    ]
    cells = [whole]
    for group in GROUPS:
        scales = sum(2 * len(weight) * (weight.shape[1] // group if group else 1) for weight in linears)
        packed = sum(weight.numel() // 2 for weight in linears) + scales
        cells.append(whole - sum(weight.nbytes for weight in linears) + packed)
    largest = max(weight.nbytes for weight in linears)
    return " | ".join([variant, *(f"{cell / 2**30:.1f} GiB" for cell in cells), f"{largest / 2**20:.0f} MiB"])


def table() -> str:
    lines = ["| | bf16 | groups of 32 | groups of 128 | rows | largest weight, unpacked |", f"|---|{'---:|' * 5}"]
    return "\n".join([*lines, *(f"| {row(variant)} |" for variant in variants.NAMES if variant != "26B-A4B")])


def page(text: str) -> str:
    """``text`` with the table as it is now."""
    return between(text, _BEGIN, _END, f"\n{table()}\n")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
