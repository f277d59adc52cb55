"""``gemma4-compat reproduce``."""

from __future__ import annotations

from typing import Annotated

import typer

import gemma4_compat
from gemma4_compat._doctor.reproductions import script
from gemma4_compat._engine import settings, versions
from gemma4_compat._engine.io import terminal
from gemma4_compat.cli.app import app, command, fail, say


@app.command()
@command("this command")
def reproduce(
    patch_id: Annotated[str, typer.Argument(metavar="ID", help="A patch; `list` shows every id.")],
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
        say("\n\n".join(terminal.fitted(part) for part in script.report(patch, found).split("\n\n")))
    else:
        say(script.script(patch))
