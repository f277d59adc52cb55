"""What is installed and not needed yet: it is dormant, and costs a call nothing, until something activates it.

A dormant function calls the original; one on top of it calls what is below both. A class in whose
slot all that we installed is dormant has upstream's own function there, except while the engine decides: what it looks
at is the same as if nothing were dormant. Another library may replace that function meanwhile; then it stays, and the
status of the patch says so.
"""

from __future__ import annotations

from typing import Any

from gemma4_compat._engine import changes

_hidden: list[tuple[Any, str, Any, Any]] = []  # owner, name, what belongs there, what is there meanwhile


def activate(patch_id: str) -> None:
    """Switch on what a patch has installed dormant, for good: some object needs it from now on."""
    if patch_id in changes._activated:
        return
    with changes._switching:
        for function, switch in list(changes._installed.items()):
            if switch.dormant is not None and vars(function)[changes._OURS] == patch_id:
                switch.state[0], switch.dormant = switch.dormant, None
        _pass_over(True)
        _show()
        changes._activated.add(patch_id)  # last: a thread that finds it there goes on


def is_installed(patch_id: str) -> bool:
    """Whether a patch has installed anything that it has not taken back, dormant or not."""
    return any(
        vars(function)[changes._OURS] == patch_id and switch.changes.active
        for function, switch in list(changes._installed.items())
    )


def show() -> None:
    """Put everything where it belongs."""
    with changes._switching:
        _pass_over(False)
        _show()


def _pass_over(dormant: bool) -> None:
    """Have every installed function call what it was installed on, or what is below that if that is dormant."""
    for switch in list(changes._installed.values()):
        function = switch.original
        while dormant and changes.is_installed(function) and changes._installed[function].dormant is not None:
            function = changes._installed[function].original
        switch.state[1] = function


def _show() -> None:
    while _hidden:
        owner, name, installed, meanwhile = _hidden.pop()
        if vars(owner).get(name, changes._ABSENT) is meanwhile:
            setattr(owner, name, installed)


def hide() -> None:
    """Have upstream's own function in every slot in which all that we installed is dormant."""
    with changes._switching:
        _pass_over(True)
        for owner, name, before in list(changes._dormant_slots.values()):
            raw = vars(owner).get(name, changes._ABSENT)
            function = changes.function_of(raw)
            dormant = changes.is_installed(function)
            while dormant and changes.is_installed(function):
                dormant = changes._installed[function].dormant is not None
                function = changes._installed[function].original
            if not dormant or (before is not changes._ABSENT and changes.function_of(before) is not function):
                continue
            _hidden.append((owner, name, raw, before))
            if before is changes._ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
