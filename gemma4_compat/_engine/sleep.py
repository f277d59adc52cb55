"""What is installed and not needed yet: it sleeps, and costs a call nothing, until something in the process needs it.

An installed function that sleeps calls the original; one on top of it calls what is below both. A class in whose
slot all that we installed sleeps has upstream's own function there, except while the engine decides: what it looks
at is the same as if nothing slept. Another library may replace that function meanwhile; then it stays, and the
status of the patch says so.
"""

from __future__ import annotations

from typing import Any

from gemma4_compat._engine import changes

_hidden: list[tuple[Any, str, Any, Any]] = []  # owner, name, what belongs there, what is there meanwhile


def awaken(patch_id: str) -> None:
    """Switch on what a patch has installed asleep, for good: some object needs it from now on."""
    if patch_id in changes._awake:
        return
    with changes._switching:
        for function, switch in list(changes._installed.items()):
            if switch.asleep is not None and vars(function)[changes._OURS] == patch_id:
                switch.state[0], switch.asleep = switch.asleep, None
        _pass_over(True)
        _show()
        changes._awake.add(patch_id)  # last: a thread that finds it there goes on


def is_installed(patch_id: str) -> bool:
    """Whether a patch has installed anything that it has not taken back, asleep or not."""
    return any(
        vars(function)[changes._OURS] == patch_id and switch.changes.active
        for function, switch in list(changes._installed.items())
    )


def show() -> None:
    """Put everything where it belongs."""
    with changes._switching:
        _pass_over(False)
        _show()


def _pass_over(sleeping: bool) -> None:
    """Have every installed function call what it was installed on, or what is below that if that sleeps."""
    for switch in list(changes._installed.values()):
        function = switch.original
        while sleeping and changes.is_installed(function) and changes._installed[function].asleep is not None:
            function = changes._installed[function].original
        switch.state[1] = function


def _show() -> None:
    while _hidden:
        owner, name, installed, meanwhile = _hidden.pop()
        if vars(owner).get(name, changes._ABSENT) is meanwhile:
            setattr(owner, name, installed)


def hide() -> None:
    """Have upstream's own function in every slot in which all that we installed sleeps."""
    with changes._switching:
        _pass_over(True)
        for owner, name, before in list(changes._beds.values()):
            raw = vars(owner).get(name, changes._ABSENT)
            function = changes.function_of(raw)
            sleeps = changes.is_installed(function)
            while sleeps and changes.is_installed(function):
                sleeps = changes._installed[function].asleep is not None
                function = changes._installed[function].original
            if not sleeps or (before is not changes._ABSENT and changes.function_of(before) is not function):
                continue
            _hidden.append((owner, name, raw, before))
            if before is changes._ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
