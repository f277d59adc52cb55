"""What a release day writes and says, without installing anything."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat.patches import registry

upgrade = importlib.import_module("tools.upgrade")
stacks = importlib.import_module("tools.matrix.stacks")
PATCHES = {patch.id: patch for patch in gemma4_compat.patches()}
FILE = "gemma4_compat/patches/adapters/peft_keep_dispatch.py"


def entry(verdict: str, *, claimed: bool = True, **failures: str) -> dict[str, Any]:
    return {"verdict": verdict, "claimed": claimed, "failures": failures}


def test_changed_code_is_told_from_new_and_gone_code() -> None:
    data = {"peft 1": {"a": "0", "b": "1", "c": "2"}, "peft 2": {"a": "0", "b": "3", "d": "4"}}
    assert upgrade.changed("peft", "1", "2", data) == {"b": "changed", "c": "gone", "d": "new"}


def test_a_defect_that_is_gone_closes_the_range() -> None:
    patches = (PATCHES["peft-keep-dispatch"],)
    (text,) = upgrade.verdicts("peft", "9.0", patches, {"peft-keep-dispatch": entry("not affected")}).values()
    assert 'affected=">=0.18.0,<9.0", fixed="9.0"' in text


@pytest.mark.parametrize(
    "result, said",
    [
        (entry("repaired"), None),
        (entry("not affected", claimed=False), None),
        (entry("DEFECT REMAINS"), "DEFECT REMAINS: see docs/evidence/patches/peft-keep-dispatch.json"),
        (entry("repaired", test_x="no"), "repaired: test_x: no"),
    ],
)
def test_a_person_edits_only_what_is_not_as_the_patch_says(result: dict[str, Any], said: str | None) -> None:
    found = upgrade.verdicts("peft", "9.0", (PATCHES["peft-keep-dispatch"],), {"peft-keep-dispatch": result})
    assert found == ({} if said is None else {FILE: said})


def test_the_newest_stack_moves_on_and_what_it_was_gets_a_name() -> None:
    newest = stacks.read()["newest"]
    text = upgrade.stacks_with(stacks.TABLE.read_text(encoding="utf-8"), "peft", "9.0", newest)
    table = importlib.import_module("tomllib" if importlib.util.find_spec("tomllib") else "tomli").loads(text)[
        "stacks"
    ]
    assert table["newest"]["peft"] == "9.0"
    kept = table[f"peft-{newest.pins['peft']}"]
    assert {name: kept[name] for name in newest.pins} == dict(newest.pins)
    others = {name: entry for name, entry in table.items() if name not in ("newest", f"peft-{newest.pins['peft']}")}
    assert {name: dataclasses.asdict(stack)["pins"] for name, stack in stacks.read().items() if name != "newest"} == {
        name: {library: entry[library] for library in stacks.LIBRARIES} for name, entry in others.items()
    }


def test_a_second_release_of_a_day_keeps_the_name_that_is_there() -> None:
    newest = stacks.read()["newest"]
    once = upgrade.stacks_with(stacks.TABLE.read_text(encoding="utf-8"), "peft", "9.0", newest)
    again = upgrade.stacks_with(
        once, "accelerate", "9.0", dataclasses.replace(newest, pins={**newest.pins, "peft": "9.0"})
    )
    assert again.count(f'[stacks."peft-{newest.pins["peft"]}"]') == 1


def test_the_pin_and_the_day_are_written() -> None:
    text = "# The newest stack this package was measured on (2026-01-01).\ntorch==2.13.0\npeft==1\naccelerate==1\n"
    changed = upgrade.pinned(text, "peft", "2")
    assert "peft==2\naccelerate==1\n" in changed
    assert "2026-01-01" not in changed


def test_a_release_that_is_not_newer_is_refused() -> None:
    with pytest.raises(SystemExit, match=f"has peft {registry.RELEASES['peft'][-1]}; 0.1 is not newer"):
        upgrade.main(["peft", "0.1"])


@pytest.mark.parametrize("arguments", [["peft"], ["peft", "next"], ["torch", "2.0"]])
def test_bad_arguments_are_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        upgrade.main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err
