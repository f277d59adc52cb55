"""The report of a merge as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gemma4_compat._errors import printable

if TYPE_CHECKING:
    from gemma4_compat._adapter_tools.merge.check import Parity
    from gemma4_compat._adapter_tools.merge.result import MergeReport


def report_text(report: MergeReport) -> str:
    """Everything a report says, one fact per line."""
    from gemma4_compat._engine.io.text import size_text

    start = report.start
    if report.quantization is not None:
        start += f", {report.quantization}" + (
            " (assumed: nothing says how it was quantized)" if report.assumed else ""
        )
    weights = report.adapters.items()
    weighted = " + ".join(f"{weight:g} * {name}" for name, weight in weights)
    given = weighted if any(weight != 1 for _, weight in weights) or len(weights) > 1 else report.adapter
    stored = report.quantized_as or report.dtype
    files = f"{len(report.files)} file{'s' * (len(report.files) != 1)}"
    lines = [
        f"base      {report.base} ({report.model_class}, {start})",
        f"adapter   {given} ({report.peft_type}, {report.modules} modules, {report.replaced} whole tensors)",
        f"merged    {report.out}: {size_text(report.nbytes)} in {stored}, {files}",
    ]
    if report.resumed:
        lines.append(f"          {len(report.resumed)} files were kept from a killed merge")
    if report.dequantized:
        lines.append(f"          {report.dequantized} weights rounded as in {report.quantization}")
    if report.untied:
        lines.append("          the head now has its own weights (tie_word_embeddings is false)")
    if report.dead:
        lines.append(
            f"          {len(report.dead)} keys of modules that are never used were dropped: {report.dead[0]}, ..."
        )
    if report.absent:
        lines.append(
            f"          {len(report.absent)} targeted modules without weights in the adapter: {report.absent[0]}, ..."
        )
    lines.append(f"time      {report.seconds['merge']:.1f} s, check {report.seconds['check']:.1f} s")
    lines.append("with      " + ", ".join(f"{name} {version}" for name, version in report.versions.items()))
    if report.parity is None:
        lines.append("parity    not measured (--check 0)")
    else:
        lines += _parity(report.parity)
    if report.quantized_parity is not None:
        lines += [f"in {report.quantized_as}", *_parity(report.quantized_parity)]
    return "\n".join(map(printable, lines))


#: A comparison that can hardly tell a merged adapter from none.
_LITTLE = (
    "one rounding changes these logits about as much as the adapter does, so the bound is loose and texts part early; "
    "random weights do that, and adapters with little effect"
)


def _parity(parity: Parity) -> list[str]:
    rows = [("merged against adapter-loaded", parity.difference, parity.difference_rms)]
    rows += [(parity.noise_of, parity.noise, parity.noise_rms)]
    rows += [("the adapter's whole effect", parity.effect, parity.effect_rms)]
    greedy = ", ".join(map(str, parity.greedy_equal))
    notes = [*parity.notes, *([_LITTLE] if parity.bound_rms is not None and parity.bound >= parity.effect else [])]
    return [
        f"parity    against {parity.reference}, {len(parity.prompts)} prompts, {parity.positions} positions",
        f"          {'difference of logits':<42}{'largest':>10}{'rms':>10}",
        *(f"          {name:<42}{largest:>10.3g}{rms:>10.3g}" for name, largest, rms in rows),
        f"          KL divergence {parity.kl_mean:.2e} nats on average, {parity.kl_max:.2e} at most",
        f"          greedy decoding, of {parity.greedy_tokens} tokens: the first {greedy} are the same",
        *(f"          note: {note}" for note in notes),
        f"verdict   {verdict(parity)}",
    ]


def verdict(parity: Parity) -> str:
    """Whether parity is within bounds, in one line."""
    bound = f"{parity.bound:.3g}" + ("" if parity.bound_rms is None else f" (rms {parity.bound_rms:.3g})")
    found = f"{parity.difference:.3g} (rms {parity.difference_rms:.3g})"
    if parity.ok:
        return f"within bounds: logits differ by {found}, the bound is {bound}"
    if math.isnan(parity.difference):
        return "parity is out of bounds: the logits are not numbers. In fp16 activations overflow; merge to bf16"
    return f"parity is out of bounds: logits differ by {found}, the bound is {bound}"
