"""Commands about patches: ``status``, ``list``, ``explain``. They import no library."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import gemma4_compat
from gemma4_compat._doctor.explain import answers, common_errors, explanation, imports, messages
from gemma4_compat._doctor.launch import environment
from gemma4_compat._engine import settings
from gemma4_compat._engine.io import terminal
from gemma4_compat._engine.reports import report as _report
from gemma4_compat.cli.app import Json, Verbose, app, command, fail, print_json, say, tell
from gemma4_compat.patches import registry

#: Bytes of standard input: a log of days, not a device that never ends.
_MOST_INPUT = 256 << 20
_LONGEST_PATH = 250


@app.command()
@command("this command")
def status(as_json: Json = False, verbose: Verbose = False) -> None:
    """Show how many patches would do what in this environment. Imports no library."""
    statuses, startup, project = gemma4_compat.status(), environment.state(), settings.project_file()
    if as_json:
        patches = [_report.status_data(item) for item in statuses.values()]
        where = {"file": None if project is None else str(project)}
        print_json({"startup": startup.as_data(), "settings": where, "patches": patches})
        return
    width, head = terminal.width(), _report.summary_text(statuses)
    if verbose:
        colour = terminal.has_colour()
        say(_report.status_text(statuses, width, colour=colour), coloured=colour)
        say("\n" + terminal.fitted(head))
    else:
        say(_report.overview_text(statuses, registry.AREA_OF, head, width))
        say("\nEach patch, and why: `gemma4-compat status --verbose`.")
    say(f"\nstart-up hook: {startup.text()}" + ("" if project is None else f"\nsettings: {project}"))
    if wrong := imports.torchvision():
        say(f"\n{terminal.fitted(wrong)}")


@app.command(name="list")
@command("this command")
def list_patches(
    area: Annotated[str | None, typer.Argument(metavar="AREA", help="Such as offload; default: all areas.")] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the areas of patches; or the patches of an area, or all (--verbose), with the releases they are for."""
    if area is not None and area not in registry.AREA_OF.values():
        _unknown(area, "no area is", set(registry.AREA_OF.values()))
    if area is None and not (as_json or verbose):
        say(_report.areas_text(registry.AREA_OF, registry.areas(), terminal.width()))
        return
    patches = tuple(patch for patch in gemma4_compat.patches() if area in (None, patch.area))
    if as_json:
        print_json({"patches": [_report.patch_data(patch) for patch in patches]})
    else:
        say(_report.patches_text(patches, terminal.width()))


@app.command()
@command("this command")
def explain(
    text: Annotated[
        list[str],
        typer.Argument(
            metavar="ID|AREA|F14|ERROR",
            help="A patch, an area, such as offload (`list` shows them), or a number of docs/FAILURE_POINTS.md; or an "
            "error, such as \"KeyError: 'sliding_attention'\", or what is wrong, in words; or - for a traceback on "
            "standard input.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Find the repair for an error; or say what a patch repairs, why upstream breaks and when the patch goes.

    Exit 0, or 1 if no patch matches the error.
    """
    name = " ".join(text)
    if name == "-" or messages.looks_like_an_error(name):
        _explain_error(_standard_input() if name == "-" else name, as_json=as_json)
    patches = [
        patch
        for patch in gemma4_compat.patches()
        if name in (patch.id, patch.area) or name.upper() in patch.failure_points
    ]
    if not patches and len(name) < _LONGEST_PATH and Path(name).is_file():
        fail(f"{name!r} is a file; to have its text explained: gemma4-compat explain - < {name}")
    if not patches and common_errors.advice(messages.read(name)) is not None:  # "gibberish"
        _explain_error(name, as_json=as_json)
    statuses = gemma4_compat.status()
    if not patches:
        _unknown(name, "no patch and no area is", {*registry.AREA_OF, *registry.AREA_OF.values()})
    if as_json:
        print_json(
            {"error": None, "matches": [], "nearest": [], "advice": None, "patches": _explained(patches, statuses)}
        )
    else:
        width = terminal.width()
        if len(patches) > 1:
            say(f"{_report.index_text(name, patches, width)}\n")
        say("\n\n".join(_report.explanation_text(patch, statuses[patch.id], width) for patch in patches))


def _unknown(name: str, what: str, names: set[str]) -> NoReturn:
    close, areas = settings.nearest(name, names), sorted(set(registry.AREA_OF.values()))
    known = f"areas are {', '.join(areas)}, and `gemma4-compat list --verbose` shows every id."
    raise fail(f"{what} called {name!r}; " + (f"did you mean {close!r}?" if close else known))


def _explain_error(text: str, *, as_json: bool) -> NoReturn:
    said, width = explanation.read(text), terminal.width()
    headline = answers.headline(said, width)
    if not as_json:
        say(headline)  # the patches, whose symptoms are searched next, take most of a second to import
    statuses = gemma4_compat.status()
    found, data = explanation.look_up(said, gemma4_compat.patches(), statuses, width)
    if as_json:
        print_json(data | {"patches": _explained(found.patches, statuses)})
    else:
        say(found.text.removeprefix(f"{headline}\n"))
        if "torchvision" in (found.advice or "") and (wrong := imports.torchvision()):
            say(f"\nHere: {terminal.fitted(wrong)}")
    raise typer.Exit(0 if found.patches else 1)


def _explained(patches: Sequence[gemma4_compat.Patch], statuses: Mapping[str, gemma4_compat.PatchStatus]) -> list[Any]:
    return [_report.patch_data(patch) | {"status": _report.status_data(statuses[patch.id])} for patch in patches]


def _standard_input() -> str:
    """The end of what is there: a traceback ends with its error. Memory and waiting time are bounded."""
    if sys.stdin is None:
        fail("there is no standard input to read a traceback from")
    if sys.stdin.isatty():
        tell("paste the traceback, then press Ctrl-D on a line of its own (Windows: Ctrl-Z, Enter)")
    kept, taken = b"", 0
    while chunk := sys.stdin.buffer.read(1 << 16):
        kept = (kept + chunk)[-4 * messages.LONGEST :]
        taken += len(chunk)
        if taken > _MOST_INPUT:
            fail(f"standard input has more than {_MOST_INPUT >> 20} MiB; give the end of it: tail -n 1000 FILE")
    return kept.decode("utf-8", "backslashreplace")
