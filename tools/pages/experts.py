"""The table of bytes in docs/QUANTIZATION.md: ``python -m tools.pages.experts`` writes it, a test compares it."""

from __future__ import annotations

from gemma4_compat._gemma4.models import build
from gemma4_compat._gemma4.quantization.config import default_skip_modules, linear_names
from gemma4_compat._gemma4.quantization.experts import gigabytes, is_experts
from gemma4_compat._memory.blueprint import Blueprint, describe
from tools.pages.markers import ROOT, between

PAGE = ROOT / "docs" / "QUANTIZATION.md"
VARIANT = "26B-A4B"
_BEGIN, _END = (f"<!-- python -m tools.pages.experts: {word} -->" for word in ("begin", "end"))


def blueprint(quantization: str | None, *, experts: bool) -> Blueprint:
    model = build.on_meta(VARIANT)[0]
    names = linear_names(model, default_skip_modules(model)) if quantization else None
    return describe(model, quantization, names, experts=experts)


def bytes_of(found: Blueprint) -> int:
    return sum(block.stored.nbytes for block in found.blocks)


def table() -> str:
    model = build.on_meta(VARIANT)[0]
    plain = sum(
        weight.numel() * weight.element_size()
        for module in model.modules()
        if is_experts(module)
        for weight in module.parameters()
    )
    unquantized = {way: bytes_of(blueprint(way, experts=False)) for way in (None, "8bit", "4bit", "4bit-double")}
    rows = [("bf16", plain, unquantized[None]), ("8 bits", plain, unquantized["8bit"])]
    for way, title in (("4bit", "4 bits"), ("4bit-double", "4 bits, double quantization")):
        both = bytes_of(blueprint(way, experts=True))
        rows.append((title, plain, unquantized[way]))
        rows.append((f"**{title}, `quantize(experts=True)`**", both - (unquantized[way] - plain), both))
    lines = ["| 26B-A4B | experts | whole model |", "|---|---:|---:|"]
    lines += [f"| {title} | {gigabytes(experts)} | {gigabytes(total)} |" for title, experts, total in rows]
    found = blueprint("4bit", experts=True)
    layer = found.layers[0].experts
    assert found.experts is not None
    number, used, _ = found.experts
    loading = max(layer.loading for layer in found.layers)
    lines += [
        "",
        f"In addition, temporarily: {gigabytes(loading)} while loading (one parameter in bf16), "
        f"{gigabytes(layer)} for a prompt (a layer's experts, dequantized), {gigabytes(layer * used // number)} for a "
        f"decoded token ({used} of {number} experts).",
    ]
    return "\n".join(lines)


def page(text: str) -> str:
    """``text`` with the table as it is now."""
    return between(text, _BEGIN, _END, f"\n{table()}\n")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
