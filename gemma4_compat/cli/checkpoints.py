"""A command about checkpoints: ``repair``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import gemma4_compat
from gemma4_compat.cli.app import Json, answer, app, command


@app.command()
@command("a repair")
def repair(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder of a checkpoint that save_pretrained wrote.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the repaired checkpoint; must not exist, or be empty.")
    ],
    original: Annotated[
        str,
        typer.Option("--from", metavar="ORIGINAL", help="Folder of the checkpoint it was made from, or a cached id."),
    ],
    max_shard_size: Annotated[str, typer.Option(help="Largest file with weights.")] = "5GB",
    as_json: Json = False,
) -> None:
    """Give a saved checkpoint back what servers ask for: keys and values of KV-shared layers, names of settings.

    transformers drops them on load; its outputs do not depend on them. Exit 0 if OUT was written, 2 on bad input,
    which includes a checkpoint that lacks nothing.
    """
    from gemma4_compat._adapter_tools.repair import report_text

    report = gemma4_compat.repair_checkpoint(checkpoint, original, out, max_shard_size=max_shard_size)
    answer(report, report_text, as_json=as_json)
