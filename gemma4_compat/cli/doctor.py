"""``gemma4-compat doctor``."""

from __future__ import annotations

import contextlib
import enum
import platform
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import gemma4_compat
from gemma4_compat._doctor.reproductions import diagnosis
from gemma4_compat._doctor.reproductions import findings as _doctor
from gemma4_compat._doctor.reproductions import show as _shown
from gemma4_compat._doctor.reproductions import text as _text
from gemma4_compat._engine.io import terminal
from gemma4_compat._lab.trained import Trained
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
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also print what each defect did here, and what its patch leaves on a model."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the summary and nothing else.")] = False,
    failed_only: Annotated[
        bool, typer.Option("--failed-only", help="Print only what needs attention, and the summary.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder and say where it is.")] = False,
    show: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Ask a trained tiny model, without and with the fix of this defect."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The trained model of --show; default: that of the checkout.")
    ] = None,
) -> None:
    """Reproduce each defect on a tiny Gemma 4, without and with the shim, in separate processes.

    Exit 0 if every defect of these versions is repaired, 1 if one remains or a patch failed, 2 on bad usage or with a
    library older than the oldest supported release.
    """
    if show is not None or model is not None:
        _show(show, model, others=bool(ids) or as_json or form != "text")
    if form not in _FORMATS:
        fail(f"--format {form!r} is unknown; use one of {', '.join(_FORMATS)}")
    form = "json" if as_json else form
    patches = diagnosis.chosen(ids or [])
    versions = _doctor.stack()
    head = _text.heading(gemma4_compat.__version__, versions)
    shows = _Shows.of(verbose=verbose or bool(ids), quiet=quiet, failed_only=failed_only)
    progress = _Progress(len(patches), shows, aside=form != "text", verbose=verbose)
    progress.begin(head)
    found = []
    # Closed at once when nobody reads what is said: the children and their folder do not outlive this.
    with contextlib.closing(_doctor.examine(patches, keep=keep, note=tell)) as examined:
        for finding in examined:
            found.append(finding)
            progress.add(finding)
    progress.end()
    result = diagnosis.Diagnosis(versions, diagnosis.ordered(found, patches), progress.seconds)
    found, good = list(result.findings), result.ok
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
    elif shows is _Shows.SCREEN:
        colour = terminal.has_colour()
        say("\n" + result.text(terminal.width(), more="--verbose", colour=colour), coloured=colour)
    else:
        if shown:
            colour = terminal.has_colour()
            say(f"\n{_text.table(shown, terminal.width(), colour=colour)}\n", coloured=colour)
        say(terminal.fitted(_text.summary(found)))
    raise typer.Exit(0 if good else 1)


def _show(patch_id: str | None, folder: Path | None, *, others: bool) -> NoReturn:
    if patch_id is None:
        patch_id = str(fail("--model is for --show ID: give both"))
    if others:
        fail("--show takes one ID and prints text: leave out other IDs, --json and --format")
    (patch,) = diagnosis.chosen([patch_id])
    _doctor.stack()
    tell("asking a trained tiny model, in a process without the shim and in one with it ...")
    terminal.overwrite("at work")
    shown = _shown.show(patch, Trained.find(folder))
    say(f"\n{shown.text()}")
    raise typer.Exit(0 if shown.good else 1)


class _Shows(enum.Enum):
    """How much is said about the findings."""

    SCREEN = enum.auto()  # what needs attention, the rest in numbers
    EACH = enum.auto()
    FAILED = enum.auto()
    NOTHING = enum.auto()  # but the summary

    @classmethod
    def of(cls, *, verbose: bool, quiet: bool, failed_only: bool) -> _Shows:
        """As the options ask; the one that asks for least counts."""
        return cls.NOTHING if quiet else cls.FAILED if failed_only else cls.EACH if verbose else cls.SCREEN


class _Progress:
    """What is done and what takes time: on a terminal a line that is overwritten, elsewhere a line for each tenth.

    Args:
        total: of findings.
        shows: which findings are shown as they come.
        aside: show them on standard error, because standard output is for the answer.
        verbose: also say what each patch leaves on models.
    """

    def __init__(self, total: int, shows: _Shows, *, aside: bool, verbose: bool) -> None:
        self._total, self._shows, self._aside, self._verbose = total, shows, aside, verbose
        self._done, self._began = 0, time.monotonic()
        self._tenths = {-(-total * tenth // 10) for tenth in range(1, 11)}

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def begin(self, head: str) -> None:
        if self._shows is not _Shows.NOTHING:
            say(terminal.fitted(head), self._aside)
        what = f"{self._total} defects" if self._total > 1 else "one defect"
        self._note(
            f"reproducing {what}, without and with the fix; first, libraries are imported and tiny models built",
            _Shows.SCREEN,
            _Shows.EACH,
        )

    def add(self, finding: _doctor.Finding) -> None:
        self._done += 1
        count = f"[{self._done}/{self._total}]"
        each = self._shows is _Shows.EACH or (self._shows is _Shows.FAILED and not finding.good)
        if each:
            self.end()
            width, colour = terminal.width(error=self._aside), terminal.has_colour(error=self._aside)
            text = _text.finding_text(finding, count, width, colour=colour, verbose=self._verbose)
            say("\n" + text, self._aside, coloured=colour)
        elif self._shows is _Shows.SCREEN and not finding.good:
            self.end()
            say(f"{count} {finding.id}: {finding.verdict.word}", True)
        done = f"{count} after {self.seconds:.0f} s"
        if self._done in self._tenths:
            self._note(done, _Shows.SCREEN)
        if self._done < self._total:
            terminal.overwrite(f"{done}: {finding.id}")

    def end(self) -> None:
        """Remove the line."""
        terminal.overwrite("")

    def _note(self, line: str, *shows: _Shows) -> None:
        """Progress on a terminal; elsewhere a line of its own, if this is among what ``shows`` it."""
        if terminal.width(error=True) is not None:
            terminal.overwrite(f"{line} ...")
        elif self._shows in shows:
            say(line, True)
