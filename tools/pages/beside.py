"""The shim beside libraries that patch the same classes, from docs/evidence/beside.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools import evidence
from tools.matrix.beside import stacks, verdicts
from tools.matrix.beside.command import FILE

#: The distribution whose release a row names, by entry.
_NAMED = {
    "trl": "trl",
    "liger-kernel": "liger-kernel",
    "axolotl": "axolotl",
    "axolotl-hybrid": "axolotl",
    "llama-factory": "llamafactory",
    "ms-swift": "ms-swift",
    "unsloth": "unsloth",
}
_NOTE = {"axolotl-hybrid": " (masks of hybrid attention)"}
_GOOD = [word for word in verdicts.WORDS if word not in (*verdicts.BAD, "said", "one error", "its own error")]
_OTHERWISE = {
    "said": "wrong or an error, and a line at the import has named it",
    "one error": "one error names both",
    "its own error": "an error that it also has without the shim",
    "error": "an error",
    "differs": "differs",
}


def section() -> str:
    results: Mapping[str, Any] = evidence.read(evidence.EVIDENCE / FILE)
    lines = [
        "| beside | imported first | exact | otherwise |",
        "|---|---|---|---|",
    ]
    for result in results.values():
        table = verdicts.table(result)
        cells = {order: _cells(order, table) for order in verdicts.ORDERS}
        orders = {"either": cells["shim first"]} if cells["shim first"] == cells["other first"] else cells
        shown = {"shim first": "the shim", "other first": result["called"]}
        for order, cell in orders.items():
            lines.append(f"| {_who(result)} | {shown.get(order, order)} | {cell} |")
    if left := [one.called + _NOTE.get(name, "") for name, one in stacks.read().items() if name not in results]:
        lines += ["", f"Not measured so far: {', '.join(left)}."]
    return "\n".join(lines)


def _who(result: Mapping[str, Any]) -> str:
    releases, named = result["releases"], _NAMED.get(result["name"])
    what = f"{result['called']} {releases[named]}" if named else result["called"]
    return f"{what}{_NOTE.get(result['name'], '')}, transformers {releases['transformers']}"


def _cells(order: str, table: Mapping[str, Mapping[str, str]]) -> str:
    words = {action: cells[order] for action, cells in table.items()}
    good = sum(word in _GOOD for word in words.values())
    rest = [
        f"{', '.join(map(_called, named))}: {text}"
        for word, text in _OTHERWISE.items()
        if (named := [action for action, found in words.items() if found == word])
    ]
    return f"{good} of {len(words)} | {'; '.join(rest)}"


def _called(action: str) -> str:
    """``training, split`` is one action of several."""
    if "(" in action or "_" in action:
        return f"`{action}`"
    name, _, how = action.partition(", ")
    return f"{name} ({how})" if how else name
