"""The report of an export as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemma4_compat._engine.io.text import size_text
from gemma4_compat._errors import printable

if TYPE_CHECKING:
    from gemma4_compat._adapter_tools.export.result import ExportReport


def report_text(report: ExportReport) -> str:
    """Everything a report says, one fact per line."""
    lora = "" if report.rank is None else f", rank {report.rank}, scale {report.scale:g}"
    lines = [
        f"adapter   {report.adapter}: {report.modules} modules{lora}",
        f"base      {report.base} ({report.model_class})",
        f"written   {report.out}: {', '.join(report.files)}, {size_text(report.nbytes)}, as {report.reader} reads it",
    ]
    for names, what in (
        (report.padded, "have a smaller rank and got zeros"),
        (report.rescaled, "had a different scale, which was folded into lora_B"),
        (report.added, "were added, because the reader needs them"),
    ):
        if names:
            lines.append(f"          {len(names)} modules {what}: {names[0]}, ...")
    if report.dead:
        lines.append(
            f"          {len(report.dead)} keys of modules that are never used were dropped: {report.dead[0]}, ..."
        )
    lines += [f"note      {note}" for note in report.notes]
    lines.append(f"load      {report.command}")
    return "\n".join(map(printable, lines))
