"""What a cell of the table says: the other library and the shim together, beside each of the two alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Verdict -> what it means. The last two are not good.
WORDS = {
    "both": "the bits of each of the two alone",
    "other": "the bits of the other library alone",
    "shim": "the bits of the shim alone",
    "one device": "the bits of the same weights on one device, or without the call, in the same process",
    "near": "but for rounding as without the call, or as one batch, in the same process; no more is promised",
    "one error": "an error of this package in one line that names the other library",
    "said": "a line at the import has named the other library and said what to do; without that it would be bad",
    "its own error": "the other library raises the same alone, in this action or another",
    "error": "an error that neither alone has",
    "differs": "other bits than each alone, and than on one device",
}
BAD = ("error", "differs")
ORDERS = ("shim first", "other first")


def verdict(action: str, result: Mapping[str, Any], order: str) -> str:
    """One of :data:`WORDS`, of an action in an order: "shim first" or "other first"."""
    ways = result["ways"]
    found, other, shim = (ways[way]["actions"].get(action, {}) for way in (order, "other", "shim"))
    own = {one["error"] for one in ways["other"]["actions"].values() if "error" in one}
    word = "its own error" if found.get("error") in own else _alone(found, other, shim, result["module"])
    return "said" if word in BAD and any(result["module"] in line for line in lines(ways[order])) else word


def lines(way: Mapping[str, Any]) -> list[str]:
    """What was said at an import about another library's patches."""
    return [line for line in way["said"] if "repairs of functions that" in line]


def _alone(found: Mapping[str, Any], other: Mapping[str, Any], shim: Mapping[str, Any], module: str) -> str:
    if "error" in found:
        if found["kind"] == "Gemma4CompatError" and module in found["error"]:
            return "one error"
        return "error"
    as_other, as_shim = (found["digest"] == one.get("digest") for one in (other, shim))
    if as_other and as_shim:
        return "both"
    if as_other:
        return "other"
    if as_shim:
        return "shim"
    if found.get("own"):
        return "one device"
    return "near" if found.get("near") else "differs"


def table(result: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Action -> order -> verdict, of a library."""
    return {
        action: {order: verdict(action, result, order) for order in ORDERS}
        for action in result["ways"]["shim first"]["actions"]
    }


def bad(result: Mapping[str, Any]) -> list[str]:
    """The cells that are neither equal to one of the two alone nor one error, as lines."""
    return [
        f"{result['name']}, {order}, {action}: {word}; {said(result, order, action)}"
        for action, cells in table(result).items()
        for order, word in cells.items()
        if word in BAD
    ]


def said(result: Mapping[str, Any], order: str, action: str) -> str:
    found = result["ways"][order]["actions"][action]
    return found.get("error") or found.get("note") or f"digest {found['digest']}"
