"""The application that all commands join, and how they print answers and errors."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
import typer.core

import gemma4_compat
from gemma4_compat import _startup
from gemma4_compat._doctor.explain import imports
from gemma4_compat._engine.io import terminal
from gemma4_compat._errors import printable

_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which newer releases of typer bring themselves


_Function = TypeVar("_Function", bound=Callable[..., Any])

# Types as typer writes them in its help, and the words for them that a reader knows.
_TYPE = re.compile(r"<(?:list\[)?(\w+)\]?>")
_TYPES = {"int": "NUMBER", "float": "NUMBER", "path": "PATH", "bool": ""}


def _plainly(formatter: Any, *, types: bool) -> None:
    """Make a formatter write the types of options as in :data:`_TYPES`, and leave out those of arguments."""
    original = formatter.write_dl

    def write_dl(rows: Sequence[tuple[str, str]], *args: Any, **kwargs: Any) -> None:
        def shown(name: str) -> str:
            takes = types and name.startswith("-")
            return _TYPE.sub(lambda found: _TYPES.get(found[1].lower(), "TEXT") if takes else "", name).strip()

        original([(shown(name), text) for name, text in rows], *args, **kwargs)

    formatter.write_dl = write_dl


class Command(typer.core.TyperCommand):
    """A command whose help is free of the framework's words."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        _plainly(formatter, types=True)
        super().format_options(ctx, formatter)


class _Commands(typer.core.TyperGroup):
    """The commands; a usage error about arguments is shown like all other text."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0].endswith(".py"):
            ctx.fail(f"{args[0]!r} is not a command; to run it: gemma4-compat run {args[0]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            error.message = printable(error.message)
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        for param in params:
            if param.name in ("install_completion", "show_completion"):
                param.hidden = True  # used once: not worth a line in every help
        return params

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _plainly(formatter, types=False)
        super().format_options(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each command with the whole first sentence of its help."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, re.split(r"(?<=\.)\s", " ".join((command.help or "").split()), maxsplit=1)[0])
            for name, command in found
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class _App(typer.Typer):
    """The application: its commands are :class:`Command`."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Function], _Function]:
        return super().command(name, **({"cls": Command} | settings))


app = _App(
    cls=_Commands,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Repairs for Gemma 4 with transformers, accelerate, PEFT and bitsandbytes: what they are, whether this "
    "environment needs them, and whether they work here.",
)

_P = ParamSpec("_P")
_SIGPIPE = 128 + 13

#: The option that every command with an answer has.
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
#: The option of a command whose answer is a screen, and has a line for each patch as well.
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print a line for each patch.")]


def command(needs: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Turn what a function raises into one line on standard error; ``needs`` says what needs the libraries."""

    def decorate(function: Callable[_P, None]) -> Callable[_P, None]:
        @functools.wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
            with terminal.guarded(), terminal.without_chatter():
                try:
                    function(*args, **kwargs)
                except gemma4_compat.Gemma4CompatError as error:
                    fail(str(error))
                except (ImportError, RuntimeError) as error:
                    found = imports.failed(error, needs)
                    if found is None:
                        raise
                    fail(found)

        return guarded

    return decorate


@app.callback(invoke_without_command=True)
def _version(
    show: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
) -> None:
    if show:
        typer.echo(gemma4_compat.__version__)
        raise typer.Exit(0)


def fail(message: str) -> Any:
    """End the command with exit code 2 and one line on standard error."""
    tell(message)
    raise typer.Exit(2)


def tell(message: str) -> None:
    """Write one line to standard error, whatever a file put into ``message``."""
    terminal.write(f"gemma4-compat: {printable(message)}", error=True)


def working(on: str) -> None:
    """Say on a terminal what the command does next, and for how long; a pipe or a file gets only the answer."""
    if terminal.width(error=True) is not None:
        tell(f"{on} ...")
        terminal.overwrite("at work")


def imports_less() -> None:
    """Where a command that computes nothing is all that runs in this process, libraries prepare less."""
    if _startup.is_command_line():
        # Nothing is compiled, and the import of bitsandbytes would prepare that for a second.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        gc.set_threshold(20_000, 20, 50)  # a twelfth of the time went into collections, which free nothing that counts
        atexit.register(gc.freeze)  # a fifth went into the one at the end


def say(text: str, as_json: bool = False, *, coloured: bool = False) -> None:
    """Write an answer; with ``as_json``, to standard error. ``coloured``: see :func:`terminal.write`."""
    try:
        # With --json, standard output holds the JSON and nothing else.
        terminal.write(text, error=as_json, coloured=coloured)
    except BrokenPipeError:
        terminal.discard()
        raise typer.Exit(_SIGPIPE) from None


def answer(found: Any, text: Callable[[Any], str], *, as_json: bool) -> None:
    """Write what a command found: its ``as_data()`` as JSON, or its ``text``."""
    if as_json:
        print_json(found.as_data())
    else:
        say(text(found))


def print_json(data: Mapping[str, Any]) -> None:
    """Write an answer's JSON object, with the version of this package first."""
    say(terminal.json_text({"gemma4_compat": gemma4_compat.__version__, **data}))
