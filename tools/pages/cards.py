"""docs/CARDS.md: what was measured on which card, from the reports in gemma4_compat/_plan/cards/measured_cards."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from gemma4_compat._engine.io.text import size_text
from gemma4_compat._plan.cards import measured

_GIB = 1 << 30


def section() -> str:
    """A table of the cards, and a table of each report."""
    reports = sorted(measured.reports(), key=lambda report: (_name(report), report.model.parameters))
    cards = ["| card | memory | host to card | from |", "|---|---:|---:|---|"]
    cards += [_card(list(group)) for _, group in itertools.groupby(reports, key=_name)]
    return "\n".join([*cards, *(line for report in reports for line in _report(report))])


def _name(report: Any) -> str:
    return "no GPU" if report.machine.gpu is None else str(report.machine.gpu.name)


def _card(reports: list[Any]) -> str:
    memory = max((report.machine.gpu.memory or 0 for report in reports if report.machine.gpu), default=0)
    buses = [report.machine.copies.pinned for report in reports if report.machine.copies.pinned]
    bus = f"{statistics.median(buses) / _GIB:.1f} GiB/s" if buses else ""
    who = {"check" if report.source == "check" else "benchmarks of this repository" for report in reports}
    return f"| {_name(reports[0])} | {_size(memory)} | {bus} | {', '.join(sorted(who))} |"


def _report(report: Any) -> Iterator[str]:
    model = report.model
    yield ""
    yield f"## {model.variant or model.model_class} on {_name(report)}"
    yield ""
    versions = report.machine.versions
    releases = f"torch {versions.get('torch')}, transformers {versions.get('transformers')}"
    yield f"{model.quantization or 'bf16'}, {releases}, {report.date}. {report.verdict.text}"
    yield ""
    yield "| placement | adapter | after | tokens a second | without `decode_fast` | first token | peak | planned |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for placement in report.placements:
        peak = _size(placement.running_peak)
        planned = _size(max(placement.planned.prefill, placement.planned.decode) if placement.planned else None)
        for speed in placement.speeds:
            first = speed.fast_first_token_s or speed.eager_first_token_s
            yield (
                f"| {placement.title} | {'yes' if speed.adapter else ''} | {speed.context} | "
                f"{_number(speed.fast_tokens_s)} | {_number(speed.eager_tokens_s)} | "
                f"{'' if first is None else f'{first:.2f} s'} | {peak} | {planned} |"
            )
            peak = planned = ""


def _size(nbytes: int | None) -> str:
    return size_text(nbytes) if nbytes else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
