"""``gemma4-compat doctor``."""

from __future__ import annotations

import contextlib
import platform
from typing import Annotated

import typer

import gemma4_compat
from gemma4_compat._common import terminal
from gemma4_compat._diagnostics import findings as _doctor
from gemma4_compat._diagnostics import text as _text
from gemma4_compat._engine import settings
from gemma4_compat.cli.app import Json, app, command, fail, print_json, say, tell

_FORMATS = ("text", "markdown", "github", "json")

_Format = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="|".join(_FORMATS),
        help="What to print: text; Markdown, for an issue or a job's summary; annotations of a GitHub workflow; JSON.",
    ),
]


@app.command()
@command("a reproduction")
def doctor(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Patches to examine; default: all.")] = None,
    as_json: Json = False,
    form: _Format = "text",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the summary and nothing else.")] = False,
    failed_only: Annotated[
        bool, typer.Option("--failed-only", help="Print only what needs attention, and the summary.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print what each patch leaves on a model.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder and say where it is.")] = False,
) -> None:
    """Reproduce each defect on a tiny Gemma 4, without and with the shim, in separate processes.

    Exit 0 if every defect of these versions is repaired, 1 if one remains or a patch failed, 2 on bad usage or with a
    library older than the oldest supported release.
    """
    if form not in _FORMATS:
        fail(f"--format {form!r} is unknown; use one of {', '.join(_FORMATS)}")
    form = "json" if as_json else form
    patches = _chosen(ids or [])
    versions = _doctor.stack()
    head = _text.heading(gemma4_compat.__version__, versions)
    progress = _Progress(len(patches), aside=form != "text", quiet=quiet, failed_only=failed_only, verbose=verbose)
    progress.begin(head)
    found = []
    # Closed at once when nobody reads what is said: the children and their folder do not outlive this.
    with contextlib.closing(_doctor.examine(patches, keep=keep, note=tell)) as examined:
        for finding in examined:
            found.append(finding)
            progress.add(finding)
    progress.end()
    order = {patch.id: index for index, patch in enumerate(patches)}
    found.sort(key=lambda finding: order[finding.id])
    good = all(finding.good for finding in found)
    shown = [item for item in found if not quiet and not (failed_only and item.good)]
    if form == "json":
        print_json(
            {
                "python": platform.python_version(),
                "versions": versions,
                "findings": [item.as_data() for item in (shown if failed_only else found)],
                "ok": good,
                "summary": _text.summary(found),
            }
        )
    elif form == "markdown":
        say(_text.markdown(head, found, shown))
    elif form == "github":
        say(_text.workflow(head, found))
    else:
        if shown:
            colour = terminal.has_colour()
            say(f"\n{_text.table(shown, terminal.width(), colour=colour)}\n", coloured=colour)
        say(terminal.fitted(_text.summary(found)))
    raise typer.Exit(0 if good else 1)


class _Progress:
    """Shows each finding while patches are examined, and on a terminal a line that is overwritten.

    Args:
        total: of findings.
        aside: write progress to standard error, because standard output is for the answer.
        quiet, failed_only, verbose: as the options.
    """

    def __init__(self, total: int, *, aside: bool, quiet: bool, failed_only: bool, verbose: bool) -> None:
        self._total, self._aside, self._quiet, self._failed_only = total, aside, quiet, failed_only
        self._verbose = verbose
        self._done = 0

    def begin(self, head: str) -> None:
        if not self._quiet:
            say(terminal.fitted(head), self._aside)
        self._overwrite("building tiny checkpoints")

    def add(self, finding: _doctor.Finding) -> None:
        self._done += 1
        count = f"[{self._done}/{self._total}]"
        if not self._quiet and not (self._failed_only and finding.good):
            self.end()
            width, colour = terminal.width(error=self._aside), terminal.has_colour(error=self._aside)
            text = _text.finding_text(finding, count, width, colour=colour, verbose=self._verbose)
            say("\n" + text, self._aside, coloured=colour)
        self._overwrite(f"{count} {finding.id}")

    def end(self) -> None:
        """Remove the line."""
        terminal.overwrite("")

    def _overwrite(self, line: str) -> None:
        terminal.overwrite(line if self._done < self._total else "")


def _chosen(ids: list[str]) -> list[gemma4_compat.Patch]:
    known = {patch.id: patch for patch in gemma4_compat.patches()}
    for patch_id in ids:
        if patch_id not in known:
            fail(settings.unknown_id(patch_id, known))
    return [patch for patch in known.values() if patch.id in ids or not ids]
