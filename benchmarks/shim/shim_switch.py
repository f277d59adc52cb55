"""The shim taken out of a process and put back within a millisecond, between two tokens.

``gemma4_compat.revert`` and ``install`` do the same thing in half a second, since they read sources again to be sure
of them; in that time a machine changes its speed. A switch takes the shim out once, properly, and remembers what stood
in each slot that this changed, before and after. Then it only puts back the one or the other. What objects keep of the
shim's functions stays on, so whoever uses this must compare the calls of a process that was switched off with those of
one that never had the shim.
"""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType
from typing import Any

import gemma4_compat
from gemma4_compat._shim import engine

_ABSENT = object()


class Switch:
    """The shim is on when this is made."""

    def __init__(self) -> None:
        owners = _owners()
        gemma4_compat.revert()
        off = _slots(owners)
        gemma4_compat.install()
        on = _slots(owners)
        #: Owner, name, with the shim, without.
        self.slots = [
            (owners[number], name, on.get((number, name), _ABSENT), off.get((number, name), _ABSENT))
            for number, name in sorted(on.keys() | off.keys())
            if on.get((number, name), _ABSENT) is not off.get((number, name), _ABSENT)
        ]
        self.is_on = True

    def turn(self, on: bool) -> None:
        """Put the shim in or take it out."""
        if on == self.is_on:
            return
        for owner, name, installed, original in self.slots:
            value = installed if on else original
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self.is_on = on


def _owners() -> list[Any]:
    """Every module, and the classes that the shim has put something into."""
    found: dict[int, Any] = {id(module): module for module in list(sys.modules.values()) if type(module) is ModuleType}
    for record in engine._records.values():
        for edit in record.changes._journal if record.changes is not None else ():
            found[id(edit.owner)] = edit.owner
    return list(found.values())


def _slots(owners: list[Any]) -> dict[tuple[int, str], Any]:
    return {
        (number, name): value
        for number, owner in enumerate(owners)
        if not owner.__name__.startswith("gemma4_compat")
        for name, value in list(vars(owner).items())
        if type(value) in (FunctionType, staticmethod, classmethod, property)  # isinstance would ask the value
    }
