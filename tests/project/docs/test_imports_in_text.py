"""Code that stands in strings, scripts and pages imports modules that exist: no linter looks there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT

FOLDERS = ("gemma4_compat", "tests", "benchmarks", "tools", "examples", "gpu", "docs")
OURS = r"(?:gemma4_compat|tests|benchmarks|tools)"
IMPORT = re.compile(rf"\bfrom ({OURS}(?:\.\w+)*) import +(\([^)]*\)|\w+(?: as \w+)?(?:, *\w+(?: as \w+)?)*)")
#: Tests of what is said where a name does not exist.
DELIBERATE = {"tests/project/docs/test_imports_in_text.py", "tests/project/typing/test_face.py"}
MODULE = re.compile(rf"(?:^\s*import|-m) ({OURS}(?:\.[a-z_]\w*)+)", re.MULTILINE)


def texts() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder in FOLDERS:
        for kind in ("*.py", "*.md", "*.sh"):
            yield from sorted((ROOT / folder).rglob(kind))


def exists(module: str, name: str | None = None) -> bool:
    """Whether `module` is a file or folder of the checkout that mentions `name` or contains a module so named."""
    path = ROOT.joinpath(*module.split("."))
    if name is None:
        return path.is_dir() or path.with_suffix(".py").is_file()
    if exists(f"{module}.{name}"):
        return True
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.is_file() and re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) is not None


def missing(text: str) -> list[str]:
    imports = [
        (module, name.split(" as ")[0].strip())
        for module, names in IMPORT.findall(text)
        for name in re.sub(r"#.*", "", names).strip("()\n ").split(",")
        if name.strip()
    ]
    lost = [f"{module}.{name}" for module, name in imports if not exists(module, name)]
    return lost + [module for module in MODULE.findall(text) if not exists(module)]


def test_what_texts_import_exists() -> None:
    found = {path.relative_to(ROOT).as_posix(): missing(path.read_text(encoding="utf-8")) for path in texts()}
    assert {name: lost for name, lost in found.items() if lost and name not in DELIBERATE} == {}


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ('"from gemma4_compat import status"', []),
        ("code = 'from gemma4_compat._engine import nowhere, gate'", ["gemma4_compat._engine.nowhere"]),
        ("from tests.helpers import (\n    ROOT,  # one\n    NOTHING,\n)", ["tests.helpers.NOTHING"]),
        ("python -m tools.matrix run; python -m tools.gone", ["tools.gone"]),
        ("import gemma4_compat._elsewhere.thing", ["gemma4_compat._elsewhere.thing"]),
    ],
)
def test_what_is_not_there_is_found(text: str, lost: list[str]) -> None:
    assert missing(text) == lost
