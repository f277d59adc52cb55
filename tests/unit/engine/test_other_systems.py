"""What only POSIX has is not needed to import the package and run its commands: processes in which it is missing.

This simulates; it does not show that the libraries work there (docs/SYSTEMS.md).
"""

from __future__ import annotations

import ast
import json
from pathlib import Path, PureWindowsPath

import pytest

from tests.helpers import ROOT, child

PACKAGE = ROOT / "gemma4_compat"
#: Modules of the standard library that Windows lacks.
POSIX_ONLY = ("fcntl", "grp", "posix", "pwd", "resource", "syslog", "termios", "tty", "pty")

#: The standard library and typer look at the system when they are imported, and find the real one: they come first.
SIMULATE = """
import asyncio, concurrent.futures, ctypes, importlib.metadata, json, logging, multiprocessing, pathlib, platform
import shutil, signal, socket, subprocess, sys, sysconfig, tempfile, os
sysconfig.get_config_vars()
if {libraries}:
    import rich.console, typer, typer.main, typer.rich_utils, msgspec, typer.testing
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
for name in {modules!r}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
if {platform!r} == "win32":
    for owner, names in (
        (os, "fork forkpty getuid geteuid getgid sched_getaffinity sched_setaffinity mkfifo uname wait waitid "
             "killpg setsid getpgid nice sysconf statvfs chown posix_fadvise posix_fallocate pread pwrite preadv "
             "sendfile getloadavg register_at_fork"),
        (signal, "SIGHUP SIGKILL SIGALRM SIGUSR1 SIGUSR2 SIGQUIT SIGCHLD SIGPIPE alarm setitimer pthread_sigmask"),
    ):
        for name in names.split():
            if hasattr(owner, name):
                delattr(owner, name)
sys.platform = {platform!r}
"""


def simulated(platform: str, code: str, *, libraries: bool = False) -> str:
    modules = POSIX_ONLY if platform == "win32" else ()
    setup = SIMULATE.format(modules=modules, platform=platform, libraries=libraries)
    done = child("-c", setup + code)
    assert done.code == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_the_package_is_imported_and_armed(platform: str) -> None:
    code = "import gemma4_compat as g\ng.install()\nprint(len(g.status()), g.revert()['peft-keep-dispatch'].state)"
    count, state = simulated(platform, code).split()
    assert int(count) > 50
    assert state == "reverted"


@pytest.mark.parametrize("platform", ["win32", "darwin"])
@pytest.mark.parametrize("command", [["list"], ["status"], ["explain", "offload"], ["needed"]])
def test_commands_run(platform: str, command: list[str]) -> None:
    code = (
        "from typer.testing import CliRunner\nfrom gemma4_compat import cli\n"
        f"done = CliRunner().invoke(cli.app, {[*command, '--json']!r})\n"
        "assert done.exit_code == 0, (done.output, done.exception)\nprint(done.stdout)"
    )
    assert json.loads(simulated(platform, code, libraries=True))["schema"]


def test_the_simulation_has_what_it_says() -> None:
    assert "No module named 'fcntl'" in simulated(
        "win32", "try:\n    import fcntl\nexcept ImportError as error:\n    print(error)"
    )


def at_import(tree: ast.Module) -> set[str]:
    """What a module imports when it is imported: top-level statements, those inside ``if`` and ``try`` too."""
    found: set[str] = set()
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""}
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)
    return found


def test_no_module_imports_what_only_posix_has() -> None:
    assert at_import(ast.parse("try:\n    import fcntl\nexcept ImportError:\n    from os import path")) == {
        "fcntl",
        "os",
    }
    for path in PACKAGE.rglob("*.py"):
        assert at_import(ast.parse(path.read_text(encoding="utf-8"))).isdisjoint(POSIX_ONLY), path


def test_planned_code_names_windows_paths_as_they_are() -> None:
    from gemma4_compat._plan import code

    folder = PureWindowsPath(r"C:\Users\me\new adapters\t1")
    assert ast.literal_eval(code._quoted(str(folder))) == str(folder)


@pytest.mark.parametrize("name", ["con", "a:b", "a?b", "a*b", "a|b", "a<b", 'a"b'])
def test_no_file_of_the_repository_has_a_name_that_windows_refuses(name: str) -> None:
    forbidden = set('<>:"|?*\\')
    reserved = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}

    def refused(path: Path) -> bool:
        return bool(forbidden & set(path.name)) or path.stem.lower() in reserved

    assert refused(Path(name)), "the check sees it"
    for folder in ("gemma4_compat", "docs", "tests", "tools", "benchmarks", "constraints", "examples", "gpu"):
        assert [path for path in (ROOT / folder).rglob("*") if refused(path)] == []
