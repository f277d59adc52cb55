"""What a cell of the table says: the other library and the shim together, beside each of the two alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.matrix.beside.actions import OF_THE_SHIM

#: Verdict -> what it means. The last two are not good.
WORDS = {
    "both": "the bits of each of the two alone",
    "other": "the bits of the other library alone",
    "shim": "the bits of the shim alone",
    "one device": "the bits of the same weights on one device, or without the call, in the same process",
    "one error": "an error of this package in one line that names the other library",
    "its own error": "the other library raises the same alone",
    "error": "an error that neither alone has",
    "differs": "other bits than each alone, and than on one device",
}
BAD = ("error", "differs")
ORDERS = ("shim first", "other first")


def verdict(action: str, results: Mapping[str, Mapping[str, Any]], order: str, library: str) -> str:
    """One of :data:`WORDS`.

    Args:
        action: its name.
        results: way -> what came of this action there.
        order: "shim first" or "other first".
        library: as an error must name it.
    """
    found, other, shim = (results[way].get(action, {}) for way in (order, "other", "shim"))
    if "error" in found:
        if found["kind"] == "Gemma4CompatError" and library in found["error"]:
            return "one error"
        return "its own error" if found.get("error") == other.get("error") else "error"
    as_other, as_shim = (found["digest"] == one.get("digest") for one in (other, shim))
    if as_other and as_shim:
        return "both"
    if as_other:
        return "other"
    if as_shim:
        return "shim"
    return "one device" if found.get("own") else "differs"


def table(result: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Action -> order -> verdict, of a library."""
    actions = {way: one["actions"] for way, one in result["ways"].items()}
    return {
        action: {order: verdict(action, actions, order, result["called"]) for order in ORDERS if order in actions}
        for action in actions["shim first"]
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


def is_of_the_shim(action: str) -> bool:
    return action in OF_THE_SHIM
