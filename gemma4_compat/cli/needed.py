"""``gemma4-compat needed``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import gemma4_compat
from gemma4_compat._engine.io import terminal
from gemma4_compat._needed import files, judge
from gemma4_compat._needed import report as _needed_report
from gemma4_compat.cli.app import Json, Verbose, app, command, print_json, say


@app.command()
@command("this command")
def needed(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help=f"{files.ACCEPTED}; default: what is installed.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
    fail_if_droppable: Annotated[
        bool, typer.Option("--fail-if-droppable", help="Exit 1 if no patch is needed any more, so that CI tells you.")
    ] = False,
) -> None:
    """Say how many patches a stack still needs, and which (--verbose). Imports no library.

    Exit 0 with an answer, 2 if FILE cannot be understood.
    """
    assessment = judge.assess(file, gemma4_compat.patches())
    if as_json:
        print_json(_needed_report.assessment_data(assessment))
    elif verbose:
        say(_needed_report.assessment_text(assessment, terminal.width()))
    else:
        say(assessment.text(terminal.width()))
    raise typer.Exit(1 if fail_if_droppable and assessment.droppable else 0)
