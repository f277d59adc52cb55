"""``gemma4-compat enable`` and ``disable``: one ``.pth`` file in site-packages, which Python reads at its start."""

from __future__ import annotations

import contextlib
import os
import re
import site
import subprocess
import sys
import sysconfig
import tempfile
from ast import literal_eval
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._errors import Gemma4CompatError

#: The file that Python reads.
NAME = "gemma4_compat.pth"
#: The folder that arms the shim when it is on a Python's search path at its start.
HOOK = Path(__file__).absolute().parent / "hook"
_MODULE = "_gemma4_compat_hook"
_LINE = re.compile(r"^import os, sys; hook = ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\");", re.MULTILINE)


@dataclass(frozen=True)
class Startup:
    """Whether Python arms the shim at its start, in this environment.

    Attributes:
        file: what ``enable`` wrote; None if it has not.
        hook: the module that ``file`` names, from this installation or another; None if it names none.
    """

    file: Path | None = None
    hook: Path | None = None

    @property
    def enabled(self) -> bool:
        """Whether the file does what it is there for."""
        return self.hook is not None and self.hook.is_file()

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {"enabled": self.enabled, "file": None if self.file is None else str(self.file)}

    def text(self) -> str:
        """For a reader: the state, and on lines of their own the paths, which may be long."""
        if self.file is None:
            return f"off; `gemma4-compat enable` turns it on\n  in {sys.prefix}"
        if self.enabled:
            return f"on; `gemma4-compat disable` turns it off\n  {self.file}"
        return f"off; `gemma4-compat enable` mends it\n  {self.file} names {self.hook or 'nothing'}, which is gone"


def state() -> Startup:
    """The current state. Changes nothing."""
    for file in _files():
        found = _LINE.search(file.read_text(encoding="utf-8", errors="replace"))
        return Startup(file, Path(literal_eval(found[1])) if found else None)
    return Startup()


def enable() -> tuple[Startup, bool]:
    """Have every Python of this environment arm the shim. The state, and whether it was changed.

    Raises:
        Gemma4CompatError: the file cannot be written, or Python does not read it; nothing is left behind.
    """
    before = state()
    folder = _folder() if before.file is None else before.file.parent
    file = folder / NAME
    if before.file is not None and file.read_text(encoding="utf-8", errors="replace") == _text():
        return before, False
    _write(file, _text())
    if not _is_read():
        _remove(file)
        raise Gemma4CompatError(
            f"{sys.executable} does not read {file}, which was removed again; `gemma4-compat run` needs no file"
        )
    return state(), True


def disable() -> tuple[Startup, bool]:
    """Undo :func:`enable`. The state, and whether it was changed.

    Raises:
        Gemma4CompatError: the file cannot be removed.
    """
    files = _files()
    for file in files:
        _remove(file)
    return state(), bool(files)


def _text() -> str:
    """The file's content. Python executes lines that begin with ``import``, and shows what they raise at each start:
    where this package is gone, the line does nothing.
    """
    module = next((path for path in (HOOK / f"{_MODULE}.py", HOOK / f"{_MODULE}.pyc") if path.is_file()), None)
    if module is None:
        raise Gemma4CompatError(f"{HOOK / _MODULE}.py is missing; install gemma4-compat again")
    return (
        "# Written by `gemma4-compat enable`: programs of this environment are repaired for Gemma 4.\n"
        "# `gemma4-compat disable` removes it; after `pip uninstall gemma4-compat` it does nothing, delete it.\n"
        f"import os, sys; hook = {str(module)!a}; os.path.isfile(hook) and "
        f"(sys.path.insert(0, os.path.dirname(hook)), __import__({_MODULE!r}), sys.path.pop(0))\n"
    )


def _folders() -> list[Path]:
    """Folders in which this Python looks for ``.pth`` files, the environment's own first."""
    own = [sysconfig.get_path("purelib"), *site.getsitepackages()]
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [Path(name) for name in dict.fromkeys([*own, *user])]


def _folder() -> Path:
    """Where to write: the environment, or the user's own packages if gemma4_compat is among them."""
    user = Path(site.getusersitepackages())
    return user if site.ENABLE_USER_SITE and HOOK.is_relative_to(user) else _folders()[0]


def _files() -> list[Path]:
    return [folder / NAME for folder in _folders() if (folder / NAME).is_file()]


def _write(file: Path, text: str) -> None:
    """In one step: a Python that starts in the meantime reads all of it, or none."""
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f"{NAME}.", suffix=".new", dir=file.parent)
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            opened.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(file)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):  # it may be gone
                Path(temporary).unlink()
        raise Gemma4CompatError(
            f"{file} cannot be written: {error.strerror}; nothing was changed. Use a virtual environment, or "
            "`gemma4-compat run`, which needs no file"
        ) from error


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise Gemma4CompatError(
            f"{file} cannot be removed: {error.strerror}; delete it as the user that owns it"
        ) from error


def _is_read() -> bool:
    """Whether a Python that starts now is armed, and starts without a word."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    code = f"import sys; sys.exit({_MODULE!r} not in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environ, stdin=subprocess.DEVNULL, check=False)
    return done.returncode == 0
