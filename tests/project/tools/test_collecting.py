"""Tests that look at many cases in one go: what fails is named, all of it, in one message."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests import collecting
from tests.collecting import collect_failures
from tests.contract import test_orderings, test_undoing
from tests.contract.conftest import PATCHES

BROKEN = [PATCHES[3].id, PATCHES[70].id]


@pytest.fixture(autouse=True)
def every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "chosen", [])


def failures(test: Callable[..., None], **fixtures: Any) -> str:
    with pytest.raises(pytest.fail.Exception) as failed:
        test(**fixtures)
    return str(failed.value)


def seen(state: str = "applied") -> dict[str, Any]:
    return {"state": state, "reason": "r", "late": False, "overridden": [], "replaced": {"x": True}, "stale": []}


def test_one_message_names_both_patches_whose_data_are_broken() -> None:
    found = {"seen": {patch.id: seen() for patch in PATCHES}, "twice": {patch.id: seen() for patch in PATCHES}}
    test_orderings.test_installing_twice_changes_nothing(inside=lambda _: found)
    broken = copy.deepcopy(found)
    for patch_id in BROKEN:
        broken["twice"][patch_id]["state"] = "failed"
    text = failures(test_orderings.test_installing_twice_changes_nothing, inside=lambda _: broken)
    assert text.startswith(f"2 of {len(PATCHES)} fail:\n")
    assert re.findall(r"^(\S+) \(line \d+\): assert", text, re.M) == BROKEN
    assert text.count("{'state': 'failed'} != {'state': 'applied'}") == 2


def test_data_that_lack_two_patches_are_named_too() -> None:
    after = {"seen": {patch.id: seen() for patch in PATCHES}, "reverted": {"seen": {}}}
    after["reverted"]["seen"] = {
        patch.id: seen("reverted") | {"replaced": {}} for patch in PATCHES if patch.id not in BROKEN
    }
    text = failures(test_undoing.test_reverting_all_says_so, inside=lambda _: after)
    assert text.count("KeyError") == 2
    assert all(f"{patch_id} (line" in text for patch_id in BROKEN)


def test_a_case_may_skip_and_a_test_of_which_all_do_is_skipped() -> None:
    @collect_failures(number=[1, 2, 3])
    def some(number: int) -> None:
        if number < 3:
            pytest.skip("small")
        assert number < 3

    @collect_failures(number=[1, 2])
    def none(number: int) -> None:
        pytest.skip("small")

    assert failures(some).startswith("1 of 3 fail:\n3 (line ")
    with pytest.raises(pytest.skip.Exception, match=r"^small$"):
        none()


def test_a_case_that_is_chosen_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    @collect_failures(name=["left", "right", "upright"])
    def look(name: str) -> None:
        looked.append(name)

    monkeypatch.setattr(collecting, "chosen", ["right", "up"])
    look()
    assert looked == ["upright"]
    monkeypatch.setattr(collecting, "chosen", ["middle"])
    with pytest.raises(pytest.skip.Exception, match="no case is named middle"):
        look()


def test_long_messages_are_cut() -> None:
    @collect_failures(name=["long"])
    def look(name: str) -> None:
        raise AssertionError("\n".join(map(str, range(100))))

    assert len(failures(look).splitlines()) == collecting.LINES + 2
