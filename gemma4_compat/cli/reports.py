"""Commands that import no library: ``env``, ``reproduce``, ``needed``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import gemma4_compat
from gemma4_compat._doctor import environment
from gemma4_compat._doctor.reproductions import script
from gemma4_compat._engine import settings, versions
from gemma4_compat._engine.io import terminal
from gemma4_compat._needed import files, judge
from gemma4_compat._needed import report as _needed_report
from gemma4_compat.cli.app import Json, Verbose, app, command, fail, print_json, say


@app.command()
@command("this command")
def env(as_json: Json = False) -> None:
    """Print what a bug report needs: releases, platform, settings, states of patches. Imports no library.

    Does not ask the GPU, and does not read variables that could hold a secret.
    """
    data = environment.collect(gemma4_compat.__version__, gemma4_compat.status())
    if as_json:
        print_json(data)
    else:
        width = terminal.width()
        say(environment.text(data, width and width - 2))


@app.command()
@command("this command")
def reproduce(
    patch_id: Annotated[str, typer.Argument(metavar="ID", help="A patch; `list --verbose` shows every id.")],
    as_report: Annotated[
        bool, typer.Option("--report", help="Print the text of a report instead, in Markdown.")
    ] = False,
) -> None:
    """Print a script that shows a defect with upstream calls only, to report it to the library's maintainers.

    `gemma4-compat reproduce ID > bug.py`. Exit 2 if the reproduction needs a part of the repair.
    """
    known = {patch.id: patch for patch in gemma4_compat.patches()}
    if patch_id not in known:
        fail(settings.unknown_id(patch_id, known))
    patch = known[patch_id]
    if as_report:
        names = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")
        found = {name: release for name in names if (release := versions.installed(name)) is not None}
        parts = script.report(patch, found).split("\n\n")
        say(
            "\n\n".join(part if part.startswith("#") else terminal.fitted(part) for part in parts)
        )  # a heading is a line
    else:
        say(script.script(patch))


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
