"""The map of a room is its ``__init__``: it names every module of the room."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.helpers import ROOT

#: A room with fewer modules needs no map.
MAPPED = 6


def rooms() -> dict[str, Path]:
    return {path.parent.name: path for path in sorted((ROOT / "gemma4_compat").glob("_*/__init__.py"))}


def missing(init: Path) -> set[str]:
    text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
    named = {name.rpartition(".")[2] for name in re.findall(r":mod:`([\w.]+)`|``([\w.]+)``", text) for name in name}
    modules = {path.stem for path in init.parent.glob("*.py")} - {"__init__"}
    return modules - named if len(modules) >= MAPPED else set()


def test_a_map_names_every_module_of_its_room() -> None:
    found = {room: sorted(lost) for room, init in rooms().items() if (lost := missing(init))}
    assert not found, f"name these in the docstring of the room's __init__.py: {found}"


def test_a_module_that_no_map_names_is_noticed(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / f"{name}.py").touch()
    init = tmp_path / "__init__.py"
    init.write_text('"""A room.\n\n* :mod:`a`, :mod:`room.b`, ``c``: some. :mod:`d`, :mod:`e`: others.\n"""\n')
    assert missing(init) == {"f"}
