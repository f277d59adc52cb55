"""What the layout of the package promises: fifteen rooms with maps, none too full and none too deep."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.helpers import ROOT

PACKAGE = ROOT / "gemma4_compat"
ROOMS = {
    "_adapter_tools", "_doctor", "_engine", "_gemma4", "_generation", "_graphs", "_kernels", "_lab", "_memory",
    "_needed", "_offload", "_plan", "_training", "cli", "patches",
}  # fmt: skip
#: Files of one folder, its ``__init__`` included; a folder of patches has one file for each.
MOST_FILES = 15
#: Files in the longest chain of imports inside a room.
MOST_FLOORS = 8
#: What Python itself imports by name.
HOOK = "_doctor/launch/hook"
#: A folder with fewer modules needs no map.
MAPPED = 2


def folders() -> dict[str, Path]:
    """Each folder with modules, by its path in the package; those of single patches apart."""
    found = {path.parent.relative_to(PACKAGE).as_posix(): path.parent for path in PACKAGE.rglob("__init__.py")}
    return {name: path for name, path in sorted(found.items()) if name != "." and not name.startswith("patches/")}


def missing(folder: Path) -> set[str]:
    """What the docstring of a folder's ``__init__`` does not name."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = {name.rpartition(".")[2] for names in re.findall(r":mod:`([\w.]+)`|``([\w.]+)``", text) for name in names}
    parts = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    parts -= {"__init__"}
    return parts - named if len(parts) >= MAPPED and folder.name != "patches" else set()


def test_there_are_fifteen_rooms() -> None:
    assert {name for name in folders() if "/" not in name} | {"patches"} == ROOMS
    assert len(ROOMS) == 15


def test_a_map_names_every_part_of_its_folder() -> None:
    found = {name: sorted(lost) for name, folder in folders().items() if name != HOOK and (lost := missing(folder))}
    assert not found, f"name these in the docstring of the folder's __init__.py: {found}"


def test_a_module_that_no_map_names_is_noticed(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "__init__.py").write_text(
        '"""A room.\n\n* :mod:`a`, :mod:`room.b`, ``c``: some. :mod:`d`, :mod:`e`: others.\n"""\n'
    )
    assert missing(tmp_path) == {"f"}


def test_no_folder_is_too_full() -> None:
    found = {name: count for name, path in folders().items() if (count := len(list(path.glob("*.py")))) > MOST_FILES}
    assert not found


def imported(folder: Path) -> dict[str, set[str]]:
    """What each module below ``folder`` imports of the others, by dotted names."""
    root = folder.parent
    modules = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in folder.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{one.name}" for one in node.names}
                found[name] |= {one if one in modules else node.module for one in whole} & set(modules)
    return found


def floors(graph: Mapping[str, set[str]]) -> list[str]:
    """The longest chain of imports, from the top."""
    longest: dict[str, list[str]] = {}

    def below(name: str) -> list[str]:
        if name not in longest:
            chains = [below(other) for other in sorted(graph[name] - {name})]
            longest[name] = [name, *max(chains, key=len, default=[])]
        return longest[name]

    return max(map(below, graph), key=len)


def test_no_room_is_too_deep() -> None:
    chains = {room: floors(imported(PACKAGE / room)) for room in sorted(ROOMS - {"patches"})}
    assert {room: chain for room, chain in chains.items() if len(chain) > MOST_FLOORS} == {}
    assert floors({"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"c"}}) == ["a", "b", "c"]


def page() -> str:
    return (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_the_table_of_rooms_is_in_the_order_that_imports_have() -> None:
    shown = re.findall(r"^\| `(\w+)` \|", page(), re.MULTILINE)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = project.partition("layers = [")[2].partition("]")[0]
    order = re.findall(r"\w+", layers)
    assert set(shown) == ROOMS
    assert shown == sorted(ROOMS, key=lambda room: (order.index(room), shown.index(room)))


def test_the_way_in_points_to_what_is_there() -> None:
    """Files by their path in the package or in the repository, and the functions that stand behind them."""
    found = re.findall(r"`([\w/]+\.(?:py|cuh))`((?:[:,]? (?:and )?`\w+`(?!\.))*)", page())
    assert len(found) > 20
    for file, behind in found:
        if "NAME" in file:
            continue
        path = next((base / file for base in (PACKAGE, ROOT) if (base / file).exists()), None)
        assert path is not None, file
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", behind):
            assert re.search(rf"(def|class) {name}\b|^{name} = ", text, re.MULTILINE), f"{file}: {name}"


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
    files = PACKAGE.rglob("*.py")
    found = {str(path): names for path in files if (names := too_long(path.read_text(encoding="utf-8")))}
    assert not found
    assert too_long("def f():\n" + "    pass\n" * 81) == ["f"]
    assert too_long("def f():\n" + "    pass\n" * 80 + "\n" * 419) == []
    assert too_long("\n" * 501) == ["module"]


def unread(texts: Iterable[str]) -> set[str]:
    """Functions and methods whose names nothing reads. Not those that something else calls: decorated functions, and
    methods of a class with a base from elsewhere.
    """
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    defined, read = set(), set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            read.add(node.attr)
        elif isinstance(node, ast.Name):
            read.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            read |= set(re.findall(r"\w+", node.value)) if node.value.count(" ") < 2 else set()
        elif isinstance(node, ast.Module | ast.ClassDef):
            bases = {ast.unparse(base).rpartition(".")[2] for base in getattr(node, "bases", ())}
            functions = [part for part in node.body if isinstance(part, ast.FunctionDef) and bases <= classes]
            defined |= {function.name for function in functions if not function.decorator_list}
    return {name for name in defined - read if not name.startswith(("__", "pytest_"))}


def test_something_reads_every_function() -> None:
    """An override whose base was renamed is read by nobody, and the base runs in its place."""
    files = [path for path in PACKAGE.rglob("*.py") if "stand_ins" not in path.parts]
    found = unread(path.read_text(encoding="utf-8") for path in files)
    assert found <= {"writelines"}, found  # of a file
    texts = ["class A:\n def f(self): self._g()\n def _g(self): 1", "class B(A):\n def _h(self): 2", "B().f()"]
    assert unread(texts) == {"_h"}
