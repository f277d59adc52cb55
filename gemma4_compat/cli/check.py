"""``gemma4-compat check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import gemma4_compat
from gemma4_compat._doctor.check import report as _report
from gemma4_compat._doctor.check import run, text
from gemma4_compat._doctor.reproductions import findings
from gemma4_compat._engine.io import files, terminal
from gemma4_compat._gemma4.checkpoint import folders
from gemma4_compat._gemma4.models import variants
from gemma4_compat._gemma4.quantization import config
from gemma4_compat._plan import budgets
from gemma4_compat.cli.app import app, command, fail, say, tell

_REPORT = "gemma4-compat-check.json"


@app.command()
@command("a check")
def check(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A checkpoint's folder, or a cached id; default: a tiny model with random weights."
        ),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="A saved PEFT adapter's folder, or a cached id.")] = None,
    vram: Annotated[
        str | None, typer.Option(help="What PyTorch may allocate, such as 10GiB; default: what is free on the GPU.")
    ] = None,
    image: Annotated[Path | None, typer.Option(help="A picture to ask about; default: one of random values.")] = None,
    minutes: Annotated[float, typer.Option(help="When to stop.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Check two placements, with short answers.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Also merge the adapter and check the merged model.")] = False,
    context: Annotated[
        int, typer.Option(help="Tokens per sequence, prompt and answer together.", show_default=True)
    ] = 4096,
    quantize: Annotated[str, typer.Option(help="4bit, 4bit-double, 8bit or none.")] = "4bit",
    download: Annotated[
        bool, typer.Option("--download", help="Download MODEL and the adapter if they are not in the cache.")
    ] = False,
    json_file: Annotated[
        Path, typer.Option("--json", metavar="FILE", help="Where to write the report as JSON; - prints it.")
    ] = Path(_REPORT),
) -> None:
    """Check on this machine that a model gives the same answers wherever its weights are, and how fast it is.

    Loads MODEL in several placements (everything on the card, what `plan` proposes, smaller ones), each in a process
    of its own, and compares logits and tokens bit by bit. The report holds no paths, names or texts. Exit 0 if all
    is as it should be, 1 if not, 2 on bad usage.
    """
    said = terminal.width(error=True) is None
    tell(f"checking {'a tiny model with random weights' if model is None else model}, at most {minutes:g} minutes")
    settings = run.Settings(
        folder=None if model is None else _folder(_variant(model), "model", download=download),
        adapter=None if adapter is None else _folder(adapter, "adapter", download=download),
        vram=vram,
        image=image,
        context=context,
        quantize=quantize,
        merge=merge,
        minutes=minutes,
        quick=quick,
    )
    _refuse(settings)
    printed = str(json_file) == "-"
    if not printed:
        _report.refuse_unwritable(json_file)

    def progress(line: str, begins: bool) -> None:
        terminal.overwrite(line)
        if said and begins:
            tell(line)

    found = run.Check(settings, progress).run()
    terminal.overwrite("")
    data = _report.data(found)
    width, colour = terminal.width(error=printed), terminal.has_colour(error=printed)
    say("\n" + text.report_text(found, data, width, colour=colour) + "\n", printed, coloured=colour)
    written = _report.json_text(data, gemma4_compat.__version__)
    if printed:
        say(written)
    else:
        _report.write(json_file, written)
        say(f"The report is in {json_file}: it holds no paths, names or texts, and can go into an issue.\n")
    say(terminal.fitted(data["verdict"]["text"]), printed)
    raise typer.Exit(0 if data["verdict"]["ok"] else 1)


def _refuse(settings: run.Settings) -> None:
    findings.stack("a check needs")
    if not settings.minutes > 0:
        fail(f"--minutes is {settings.minutes:g}; it must be more than 0")
    if settings.context < 64:
        fail(f"--context is {settings.context}; it must be at least 64")
    if settings.vram is not None:
        budgets.of(settings.vram, None)
    if settings.merge and settings.adapter is None and settings.folder is not None:
        fail("--merge merges an adapter; give one with --adapter")
    if settings.image is not None and not files.exists(settings.image):
        fail(f"--image {str(settings.image)!r} is not a file; give a picture, or leave it out")
    if settings.quantize != "none":
        config.check(settings.quantize, or_none=True)


def _variant(model: str) -> str:
    """The id on the hub of a released variant that was given by its short name."""
    short = variants.find(model) if "/" not in model and not Path(model).exists() else None
    return model if short is None else f"google/gemma-4-{short}-it"


def _folder(given: str, what: str, *, download: bool) -> Path:
    if download and folders.may_be_id(given) and not Path(given).exists():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        tell(f"downloading the {what} {given}")
        try:
            return Path(snapshot_download(given))
        except (HFValidationError, HfHubHTTPError, OSError) as error:
            fail(f"the {what} {given!r} cannot be downloaded: {str(error).splitlines()[0]}")
    return folders.local(given, what).resolve()
