"""In a child process: commands on files from strangers, while Python's audit events say what they really do.

    python -m tests.project.security.audited OUT COMMAND ...    # commands as JSON lists

Prints as JSON what was done that SECURITY.md rules out, and the exit code of each command. Each command runs twice:
the first run imports what it needs, which executes code of installed packages.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
_CODE = tuple(
    str(Path(folder).resolve())
    for folder in (ROOT / "gemma4_compat", *sysconfig.get_paths().values(), *site.getsitepackages())
)
_NEVER = ("socket.", "urllib.", "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.")
_NEVER_ALSO = ("subprocess.Popen", "webbrowser.open", "ftplib.connect", "http.client.connect", "os.startfile")
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.truncate", "os.chmod", "os.link", "os.symlink", "os.mkdir")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


class Watch:
    """What is ruled out, as it happens.

    Args:
        allowed: folders in which files may be written.
    """

    def __init__(self, *allowed: Path) -> None:
        self.found: list[str] = []
        self.on = False
        self._allowed = [str(folder.resolve()) for folder in allowed]
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self.on = True
        try:
            yield
        finally:
            self.on = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        self.on = False  # what this does is not what the command does
        try:
            if self._is_ruled_out(event, arguments):
                self.found.append(f"{event} {str(arguments)[:200]}")
        finally:
            self.on = True

    def _is_ruled_out(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event.startswith(_NEVER) or event in _NEVER_ALSO:
            return True
        if event == "open":
            path, _mode, flags = arguments
            return isinstance(flags, int) and bool(flags & _WRITES) and not self._may_write(path)
        if event in _CHANGES:
            folder = _folder(arguments[-1]) if event in ("os.remove", "os.rmdir") else ""
            return any(
                not self._may_write(Path(folder, os.fsdecode(path)))
                for path in arguments[:2]
                if isinstance(path, (str, bytes, os.PathLike))
            )
        if event == "exec":
            return not _is_installed(getattr(arguments[0], "co_filename", "")) and not _is_an_annotation()
        if event == "compile":
            return arguments[0] is not None and not _is_installed(arguments[1]) and not _is_an_annotation()
        if event == "import":
            return bool(arguments[1]) and not _is_installed(arguments[1])
        return event == "ctypes.dlopen" and bool(arguments[0]) and not _is_installed(arguments[0])

    def _may_write(self, path: Any) -> bool:
        if isinstance(path, int):  # a file that is open
            return True
        name = os.path.realpath(os.fsdecode(path))
        return name == os.devnull or any(name == one or name.startswith(one + os.sep) for one in self._allowed)


def _folder(number: int) -> str:
    """The folder that names are relative to where an open one is given; ``shutil.rmtree`` does."""
    return "" if number < 0 else str(Path(f"/proc/self/fd/{number}").readlink())


def _is_an_annotation() -> bool:
    """Whether the standard library evaluates an annotation of a function, or writes a dataclass: text of code.

    Or parses a literal, with ``ast``, of which nothing is executed.
    """
    return sys._getframe(3).f_globals.get("__name__") in ("inspect", "typing", "annotationlib", "dataclasses", "ast")


def _is_installed(file: Any) -> bool:
    """Whether code is of this package, of the standard library or of an installed one."""
    name = os.fsdecode(file) if isinstance(file, (str, bytes)) else ""
    return name.startswith("<frozen ") or os.path.realpath(name).startswith(_CODE)


def run(words: list[str]) -> int:
    from gemma4_compat import cli

    before, output = sys.argv, io.StringIO()
    sys.argv = ["gemma4-compat", *words]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            cli.main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.argv = before
    return 0


def main() -> None:
    out, *commands = sys.argv[1:]
    scratch = Path(tempfile.mkdtemp(dir=out))
    tempfile.tempdir = str(scratch)
    watch = Watch(Path(out))
    codes = []
    for number, text in enumerate(commands):
        words = json.loads(text)
        again = [word.replace("OUT", f"{out}/second-{number}") for word in words]
        run([word.replace("OUT", f"{out}/first-{number}") for word in words])
        with watch.watching():
            codes.append(run(again))
    print("\n" + json.dumps({"found": watch.found, "codes": codes}))


if __name__ == "__main__":
    main()
