"""Interpreter by interpreter: docs/INTERPRETERS.md from docs/evidence/interpreters.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.world.interpreters.ways import STUB_ONLY, WAYS
from tools.pages.markers import generated

FILE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "interpreters.json"


def page() -> str:
    results = json.loads(FILE.read_text(encoding="utf-8"))
    pythons = sorted({one["python"] for one in results}, key=lambda text: [int(part) for part in text.split(".")])
    lines = [
        "# Interpreters",
        "",
        generated("docs/evidence/interpreters.json"),
        "",
        "`nox -s interpreters` writes the [raw data](evidence/interpreters.json), and so does",
        "`python -m tests.world.interpreters --python PATH ... --out docs/evidence/interpreters.json`.",
        "",
        "One case, the same outcome everywhere. *model*: `import gemma4_compat`, a tiny Gemma 4 with parts on disk",
        "and an adapter, three forwards and a `generate` with the bits of one device, commands, `revert()`.",
        "*stub*: the parts that need no library: the import, `status()`, commands, `revert()`. A dash: not run.",
        "",
        f"| way | {' | '.join(pythons)} |",
        f"|---|{'---|' * len(pythons)}",
        *(f"| {name} | {' | '.join(_cell(results, python, name) for python in pythons)} |" for name in WAYS),
        "",
        "With the libraries:",
        "",
        *(f"- Python {python}: {_libraries(results, python)}" for python in pythons),
        "",
        "Only the small case:",
        "",
        *(f"- {name}: {reason}" for name, reason in STUB_ONLY.items()),
        "",
        "*Jupyter*: a kernel with autoreload, which brings in an edit first. Edits of what is patched, and a program",
        "that PyInstaller froze with libraries that patches are for, are in "
        "[tests/unit/engine](../tests/unit/engine). PyInstaller needs `--collect-all=gemma4_compat`.",
        "",
    ]
    return "\n".join(lines)


def _cell(results: list[dict[str, Any]], python: str, name: str) -> str:
    found = [one for one in results if (one["python"], one["way"]) == (python, name)]
    texts = [f"{one['size']}: {one['problem'] or 'same'}".replace("|", "\\|") for one in found]
    return "; ".join(sorted(texts)) or "-"


def _libraries(results: list[dict[str, Any]], python: str) -> str:
    one = min((one for one in results if one["python"] == python), key=lambda one: "missing" in one)
    return one.get("missing") or ", ".join(f"{name} {version}" for name, version in one["versions"].items())
