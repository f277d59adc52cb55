"""Imports gemma4_compat when a library that it repairs is first imported; for ``run`` and ``enable``.

A program that imports none of them pays for one small module. It uses only ``sys`` until then, because it runs while
Python starts, before the program.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: What is repaired; a test compares it with the patches.
LIBRARIES = frozenset({"accelerate", "bitsandbytes", "peft", "transformers"})


class Finder:
    """A meta path entry that finds nothing by itself, and leaves when it has been asked for one of the libraries."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Arms the shim, then asks the others, among them those that have just come."""
        if fullname.partition(".")[0] not in LIBRARIES:
            return None
        _arm()  # what it raises, this import raises, and the next one
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return spec
        return None


def _arm() -> None:
    try:
        try:
            __import__("gemma4_compat")
        except ImportError as error:
            if error.name != "gemma4_compat":
                raise
            _import_neighbour()
    except ImportError as error:
        _tell(error)


def _import_neighbour() -> None:
    """Import the gemma4_compat that this file belongs to, into a Python that has none, with what is beside it."""
    import os

    folder = os.path.abspath(__file__)
    for _ in ("hook", "launch", "_doctor", "gemma4_compat", "its folder"):
        folder = os.path.dirname(folder)
    sys.path.append(folder)
    try:
        __import__("gemma4_compat")
    finally:
        sys.path.remove(folder)


def _tell(error: ImportError) -> None:
    """Say that this process is without; with GEMMA4_COMPAT_STRICT, that is an error."""
    import os

    if os.environ.get("GEMMA4_COMPAT_STRICT", "").strip().lower() in ("1", "true", "yes", "on"):
        raise error
    if sys.stderr is not None:
        sys.stderr.write(
            f"gemma4-compat: nothing is repaired in this process: {error}; {sys.executable} -m pip install "
            f"{error.name}, or GEMMA4_COMPAT_STRICT=1 to make this an error\n"
        )


if "gemma4_compat" not in sys.modules:
    sys.meta_path.insert(0, Finder())
