"""The map of a room is its ``__init__``: it names every module of the room."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.helpers import ROOT

#: A room with fewer modules needs no map.
MAPPED = 2


def rooms() -> dict[str, Path]:
    found = [
        path for room in ("_*", "cli", "patches") for path in (ROOT / "gemma4_compat").glob(f"{room}/__init__.py")
    ]
    return {path.parent.name: path for path in sorted(found)}


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


def pointers(page: str) -> list[tuple[str, list[str]]]:
    """The files that a table points to, each with the functions named behind it."""
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("| ") and "`" in line.split("|")[2]]
    found = []
    for row in rows:
        for file, behind in re.findall(r"`([\w/]+\.py)`([^;]*)", row):
            if "NAME" not in file:
                found.append((file, re.findall(r"`(\w+)`", behind)))
    return found


def test_the_way_in_points_to_what_is_there() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    found = pointers(page)
    assert len(found) > 6
    for file, names in found:
        text = (ROOT / "gemma4_compat" / file).read_text(encoding="utf-8")
        assert [name for name in names if f"def {name}(" not in text] == [], file


def too_long(text: str) -> list[str]:
    """A module of more than 500 lines; functions whose bodies, below the docstring, have more than 80."""
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = ["module"] if text.count("\n") > 500 else []
    for node in functions:
        body = node.body[ast.get_docstring(node) is not None :]
        found += [node.name] if body and (body[-1].end_lineno or 0) - body[0].lineno >= 80 else []
    return found


def test_no_module_and_no_function_is_too_long() -> None:
    files = (ROOT / "gemma4_compat").rglob("*.py")
    found = {path.name: names for path in files if (names := too_long(path.read_text(encoding="utf-8")))}
    assert not found
    assert too_long("def f():\n" + "    pass\n" * 81) == ["f"]
    assert too_long("def f():\n" + "    pass\n" * 80 + "\n" * 419) == []
    assert too_long("\n" * 501) == ["module"]
