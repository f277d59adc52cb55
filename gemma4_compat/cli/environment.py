"""``gemma4-compat env``."""

from __future__ import annotations

import gemma4_compat
from gemma4_compat._doctor import environment
from gemma4_compat._engine.io import terminal
from gemma4_compat.cli.app import Json, app, command, print_json, say


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
