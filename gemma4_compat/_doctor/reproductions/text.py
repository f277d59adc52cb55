"""The findings of doctor as text, Markdown and annotations of GitHub's workflows."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence

from gemma4_compat._doctor.reproductions.findings import Finding
from gemma4_compat._engine.io.text import table_text, wrapped
from gemma4_compat._engine.reports.words import Verdict
from gemma4_compat._errors import printable
from gemma4_compat._gemma4.accelerate import attached

_LONGEST = 160
#: How many reproductions are named that took longest.
_LONGEST_TIMES = 5
#: The order of the summary: good verdicts come first.
_ORDER = sorted(Verdict, key=lambda verdict: not verdict.good)


def heading(package: str, versions: Mapping[str, str]) -> str:
    """The first line: what is examined."""
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"gemma4_compat {package} on Python {platform.python_version()}: {listed}"


def finding_text(
    finding: Finding, count: str = "", width: int | None = None, *, colour: bool = False, verbose: bool = False
) -> str:
    """One finding in a few lines, after ``count`` ("[3/82]"); ``verbose``: with what its patch leaves on models."""
    left = attached.of_patch(finding.id) if verbose else []
    rows = [
        ("without the fix", _shorten(finding.without["detail"])),
        ("with the fix", _shorten(finding.with_shim["detail"])),
        ("verdict", finding.verdict.cell),
        *([("report", finding.report)] if finding.report else []),
        *(("leaves", f"{item.shown} on {item.on}: {item.purpose}") for item in left),
    ]
    lines = table_text(rows, width=width and width - 2, colour=colour).split("\n")
    head = wrapped(printable(f"{count} {finding.id} ({_libraries(finding)})".lstrip()), width)
    return "\n".join([head, *(f"  {line}" for line in lines)])


def table(found: Sequence[Finding], width: int | None = None, *, colour: bool = False) -> str:
    """A line for each finding."""
    rows = [("patch", "parity", "verdict"), *((item.id, _parity(item), item.verdict.cell) for item in found)]
    return table_text(rows, header=True, width=width, colour=colour)


def times(found: Sequence[Finding], seconds: float) -> str:
    """How long the examination took, and which reproductions took longest."""
    each = {item.id: (item.without["seconds"] or 0) + (item.with_shim["seconds"] or 0) for item in found}
    longest = sorted(each, key=each.__getitem__, reverse=True)[:_LONGEST_TIMES]
    return f"It took {seconds:.0f} s. Longest: {', '.join(f'{name} {each[name]:.1f} s' for name in longest)}."


def summary(found: Sequence[Finding]) -> str:
    """One sentence: how many of which verdict, and what that means."""
    count = Counter(item.verdict for item in found)
    counted = ", ".join(f"{count[one]} {one.word}" for one in _ORDER if count[one]) or "nothing examined"
    bad = [item.id for item in found if not item.good]
    if not bad:
        return f"{counted}: this stack is fine."
    return f"{counted}: this stack is not fine, because of {', '.join(bad)}."


def markdown(head: str, found: Sequence[Finding], shown: Sequence[Finding]) -> str:
    """A page of Markdown about the ``shown`` findings; the summary counts all of them."""
    lines = [f"### {_cell(summary(found))}", "", _cell(head)]
    if shown:
        lines += ["", "| patch | verdict | parity | without the shim | with it |", "|---|---|---|---|---|"]
    for item in shown:
        details = (_cell(_shorten(result["detail"])) for result in (item.without, item.with_shim))
        verdict = item.verdict.word if item.good else f"**{item.verdict.word}**"
        lines.append(" | ".join([f"| `{item.id}`", verdict, _parity(item), *details]) + " |")
    lines += [f"\n{_cell(item.report)}" for item in shown if item.report]
    return "\n".join(lines)


def workflow(head: str, found: Sequence[Finding]) -> str:
    """Commands of a GitHub workflow: an error for each finding that is not good, and a notice with the summary."""
    lines = []
    for item in found:
        if not item.good or item.report:
            detail = _spoken(item.with_shim["detail"])
            said = f"{item.verdict.word}: {detail}" + (f"\n{item.report}" if item.report else "")
            lines.append(f"::{'warning' if item.good else 'error'} title={_property(item.id)}::{_data(said)}")
    return "\n".join([*lines, f"::notice title=gemma4-compat doctor::{_data(summary(found))}%0A{_data(head)}"])


def _libraries(finding: Finding) -> str:
    return ", ".join(f"{name} {version}" for name, version in finding.versions.items())


def _parity(finding: Finding) -> str:
    parity = finding.with_shim["parity"]
    return "-" if parity is None else "bit-exact" if parity == 0 else f"{parity:.3g}"


def _spoken(text: str) -> str:
    """The detail of a result; an error without a message is not left at its colon."""
    name = text.rstrip().removesuffix(":")
    return text if text.rstrip() == name or " " in name else f"{name} (without a message)"


def _shorten(text: str) -> str:
    text = printable(_spoken(text))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _cell(text: str) -> str:
    """Text that Markdown shows as it is."""
    shown = printable(text).replace("\\", "\\\\")
    for char in "|`*_<>[]#":
        shown = shown.replace(char, f"\\{char}")
    return shown


def _data(text: str) -> str:
    lines = (printable(line) for line in text.split("\n"))
    return "%0A".join(line.replace("%", "%25") for line in lines)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
