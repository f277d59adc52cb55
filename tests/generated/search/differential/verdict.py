"""What became of an entry without the package and with it, against what is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]

#: Verdicts; the first three are failures.
WORSE, HANG, OTHER_ERROR = "worse", "hangs", "another error"
BETTER, EQUAL, ABSENT = "better", "equal", "absent"
FAILURES = (WORSE, HANG, OTHER_ERROR)


@dataclass(frozen=True)
class Judged:
    """An entry's verdict; ``off`` and ``on`` are outcomes in words: ``"right"``, ``"wrong: ..."``, ``"Type: ..."``."""

    name: str
    verdict: str
    off: str
    on: str
    trace: str = ""


def judge(
    name: str,
    off: Result,
    on: Result,
    right: dict[str, Any] | None,
    tolerance: float = 0.0,
    *,
    alone: Result | None = None,
) -> Judged:
    """``right``: what one device gave without the package, None where it gave nothing; ``alone``: its result."""
    if "absent" in (off["status"], on["status"]):
        same = off["status"] == on["status"]
        return Judged(name, ABSENT if same else WORSE, off.get("text", "a value"), on.get("text", "a value"))
    if right is None and on["status"] == "value":
        right = on["value"]  # nothing to compare with: it is compared with itself
    before, after = _outcome(off, right, tolerance), _outcome(on, right, tolerance)
    return Judged(name, _verdict(off, on, before, after, alone or {}), before, after, on.get("trace", ""))


def _verdict(off: Result, on: Result, before: str, after: str, alone: Result) -> str:
    if before == "right":
        return HANG if on["status"] == "hang" else EQUAL if after == "right" else WORSE
    if after == "right":
        return BETTER
    if on["status"] in ("hang", "crash"):
        return EQUAL if off["status"] == on["status"] else HANG
    if off["status"] == "error" and on["status"] == "error":
        # Where upstream has no such model, or says something else on one device, that is what a program catches. What
        # it stumbles over in its own code, a None, nobody catches.
        unreached = not off.get("ready", True) or off["text"].startswith("'NoneType' object has no attribute")
        # A split model cannot be pickled, for its hooks cannot. Upstream may not get that far.
        unreached = unreached or on["text"].startswith("Can't pickle local object 'uncompiled.")
        return EQUAL if unreached or {off["type"], alone.get("type")} & set(on["mro"]) else OTHER_ERROR
    if on["status"] == "value" and off["status"] != "value":
        # An error became a wrong answer. By the call's word it may be wrong on one device as well.
        same = alone.get("status") == "value" and difference(alone["value"], on["value"]) is None
        return EQUAL if same else WORSE
    if off["status"] == "value" and on["status"] == "error":
        return BETTER  # a wrong answer became an error
    return EQUAL


def _outcome(result: Result, right: dict[str, Any] | None, tolerance: float) -> str:
    if result["status"] == "error":
        return f"{result['type'].rpartition('.')[2]}: {result['text']}".rstrip(": ")
    if result["status"] != "value":
        return f"{result['status']}: {result['text']}"
    found = difference(result.get("right", right), result["value"], tolerance)
    return "right" if found is None else f"wrong: {found}"


def difference(right: dict[str, Any] | None, found: dict[str, Any], tolerance: float = 0.0) -> str | None:
    """What is not the same; None where all is."""
    right = right or {}
    if right.keys() != found.keys():
        missing, added = sorted(right.keys() - found.keys()), sorted(found.keys() - right.keys())
        return f"{len(missing)} missing {missing[:2]}, {len(added)} added {added[:2]}"
    wrong = [(name, text) for name in right if (text := _leaf(right[name], found[name], tolerance)) is not None]
    if not wrong:
        return None
    name, text = wrong[0]
    return f"{name.strip('.') or 'value'} {text}" + (f", {len(wrong)} of {len(right)}" if len(right) > 1 else "")


def _leaf(right: Any, found: Any, tolerance: float) -> str | None:
    import numpy as np

    if not isinstance(right, tuple) or not isinstance(found, tuple):
        same = right == found or (right != right and found != found)  # NaN is NaN
        if not same and isinstance(right, float) and isinstance(found, float) and abs(right - found) <= tolerance:
            return None
        return None if same else f"is {str(found)[:60]!r}, not {str(right)[:60]!r}"
    if right[0] != found[0] or right[1] != found[1]:
        return f"is {found[0]} {found[1]}, not {right[0]} {right[1]}"
    if right[0] == "meta":
        return None if right[2] == found[2] else f"has shape {found[2]}, not {right[2]}"
    a, b = right[2], found[2]
    if a.shape != b.shape:
        return f"has shape {b.shape}, not {a.shape}"
    if np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
        return None
    if np.isnan(a.astype(float)).any() != np.isnan(b.astype(float)).any():
        return "is NaN" if np.isnan(b.astype(float)).any() else "is not NaN"
    off = float(np.nanmax(np.abs(a.astype(float) - b.astype(float))))
    return None if off <= tolerance else f"off by {off:.3g} of {float(np.nanmax(np.abs(a.astype(float)))):.3g}"
