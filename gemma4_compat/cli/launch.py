"""Commands about programs that are started with the shim: ``run``, ``enable``, ``disable``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gemma4_compat._doctor.explain import imports
from gemma4_compat._doctor.launch import environment, program
from gemma4_compat.cli.app import Command, Json, app, command, print_json, say, tell


class _Verbatim(Command):
    """Passes everything that follows to the program, including options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args[:1] in (["--"], ["-h"], ["--help"], []) else ["--", *args])


@app.command(cls=_Verbatim)
@command("this command")
def run(
    words: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="A program, a script.py, or options of Python: -m MODULE, -c CODE."),
    ],
) -> None:
    """Start any program with the shim in it and in every Python that it starts.

    The program replaces this command: exit code, signals and terminal are its own. This Python runs scripts, and
    whatever begins with a dash. Exit 127 if the program does not exist, 126 if it cannot be executed.
    """
    if wrong := imports.torchvision():
        tell(wrong)
    try:
        code = program.execute(words)
    except program.CannotStartError as error:
        tell(str(error))
        code = error.code
    raise typer.Exit(code)


@app.command()
@command("this command")
def enable(as_json: Json = False) -> None:
    """Load the shim in every Python of this environment, by a file in site-packages. `status` shows if it is on."""
    _answer(*environment.enable(), as_json)


@app.command()
@command("this command")
def disable(as_json: Json = False) -> None:
    """Remove the file that `enable` wrote."""
    _answer(*environment.disable(), as_json)


def _answer(found: environment.Startup, changed: bool, as_json: bool) -> None:
    if as_json:
        print_json({"changed": changed, "startup": found.as_data()})
    else:
        say(("" if changed else "nothing to change\n") + f"start-up hook: {found.text()}")
