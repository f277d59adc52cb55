"""Whether a command of the documentation is one that exists, with options that exist. Nothing is run."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from packaging.requirements import Requirement

from gemma4_compat import cli
from tests.helpers import ROOT

try:
    import tomllib
except ImportError:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


class UnknownCommandError(Exception):
    """A page says to type something that does not work."""


def parts(code: str) -> Iterator[list[str]]:
    """The commands of a block, each as its words: comments, line continuations, ``&&`` and ``VARIABLE=value`` gone."""
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in ("&&", "||", ";", "|", "&"):
                if words:
                    yield words
                words = []
            elif words or not re.fullmatch(r"[A-Z0-9_]+=.*", word):
                words.append(word)


def check(words: list[str]) -> None:
    """Refuse a command that cannot work.

    Raises:
        UnknownCommandError: it says why.
    """
    program, *rest = words
    if program in ("python", "python3") and rest[:1] == ["-m"]:
        program, *rest = rest[1:]
        if program not in CHECKS:
            _module(program, rest)
            return
    elif program in ("python", "python3"):
        _script(rest)
        return
    if program not in CHECKS:
        raise UnknownCommandError(f"{program!r}: teach tests/project/docs/commands.py what it takes")
    CHECKS[program](rest)


def _pip(rest: list[str]) -> None:
    if rest[:1] != ["install"]:
        raise UnknownCommandError(f"pip {' '.join(rest)}")
    words = iter(rest[1:])
    for word in words:
        if word in ("-c", "-r"):
            _exists(next(words))
        elif word in ("-e", "-q", "-U", "--upgrade"):
            continue
        elif found := re.fullmatch(r"\.(?:\[(.*)\])?", word):
            for extra in filter(None, (found.group(1) or "").split(",")):
                if extra.strip() not in PROJECT["optional-dependencies"]:
                    raise UnknownCommandError(f"there is no extra {extra!r}")
        else:
            wanted = Requirement(word)
            if wanted.name == PROJECT["name"]:
                raise UnknownCommandError(f"{word}: no release of {PROJECT['name']} is on an index")


def _ours(rest: list[str]) -> None:
    group: Any = typer.main.get_command(cli.app)  # typer brings a click of its own from some release on
    if rest[:1] and rest[0].startswith("-"):
        return
    if rest[0] not in group.commands:
        raise UnknownCommandError(f"gemma4-compat has no command {rest[0]!r}")
    try:
        group.commands[rest[0]].make_context(rest[0], list(rest[1:]))
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise UnknownCommandError(f"gemma4-compat {' '.join(rest)}: {error.format_message()}") from error


def _paths(rest: list[str]) -> None:
    words = iter(rest)
    for word in words:
        if word in ("-n", "-k", "-m", "-p", "--case"):
            next(words)
        elif not word.startswith("-"):
            _exists(word.partition("::")[0])


def _nox(rest: list[str]) -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    sessions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for option, name in zip(rest, [*rest[1:], ""]):
        if option == "-s" and name.partition("(")[0] not in sessions:
            raise UnknownCommandError(f"noxfile.py has no session {name!r}")


def _linter(_rest: list[str]) -> None:
    """In the dev extra, all of them; tests/project/tools and CI run them."""


def _script(rest: list[str]) -> None:
    _exists(rest[0])
    _options([ROOT / rest[0]], rest[1:], rest[0])


def _module(module: str, rest: list[str]) -> None:
    if importlib.util.find_spec(module) is None:
        raise UnknownCommandError(f"there is no module {module!r}")
    folder = ROOT / module.replace(".", "/")
    _options([*folder.rglob("*.py")] if folder.is_dir() else [folder.with_suffix(".py")], rest, module)


def _options(files: list[Path], rest: list[str], what: str) -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    for word in rest:
        if word.startswith("--") and f'"{word.partition("=")[0]}"' not in text:
            raise UnknownCommandError(f"{what} has no option {word}")


def _exists(path: str) -> None:
    if not (ROOT / path).exists():
        raise UnknownCommandError(f"there is no {path}")


def _others(rest: list[str]) -> None:
    """A program of the system: of its words, those of ours are checked."""
    if "gemma4-compat" in rest:
        _ours(rest[rest.index("gemma4-compat") + 1 :])


CHECKS = {
    "curl": _others,
    "export": _others,
    "systemd-run": _others,
    "pip": _pip,
    "gemma4-compat": _ours,
    "gemma4_compat": _ours,
    "pytest": _paths,
    "nox": _nox,
    "ruff": _linter,
    "mypy": _linter,
    "pyright": _linter,
    "lint-imports": _linter,
    "pre-commit": _linter,
}
