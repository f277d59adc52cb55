"""Real libraries, imported after, around and before ``import gemma4_compat``: the same states, the same targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat import Patch
from tests.collecting import collect_failures
from tests.contract.conftest import PATCHES, predicted, targets_here
from tests.contract.observation import groups_here

ORDERINGS = ["before", "between", "after"]
Inside = Callable[[str], Any]


def essence(seen: dict[str, Any]) -> tuple[Any, ...]:
    return seen["state"], seen["replaced"], seen["overridden"]


@pytest.mark.parametrize("ordering", ORDERINGS)
@collect_failures(patch=PATCHES)
def test_the_state_is_what_the_metadata_and_the_installed_releases_predict(
    inside: Inside, ordering: str, patch: Patch
) -> None:
    seen = inside(ordering)["seen"][patch.id]
    assert seen["state"] == predicted(patch, inside("after")["detected"][patch.id]), seen["reason"]
    assert seen["reason"]


@pytest.mark.parametrize("ordering", ORDERINGS)
@collect_failures(patch=PATCHES)
def test_applied_means_every_target_that_exists_and_nothing_else_does(
    inside: Inside, ordering: str, patch: Patch
) -> None:
    seen = inside(ordering)["seen"][patch.id]
    replaced = seen["replaced"]
    if seen["state"] == "applied":
        assert {name for name, state in replaced.items() if state} >= targets_here(patch)
        of_other_releases = {str(target) for target in patch.targets if target.affected}
        assert {name for name, state in replaced.items() if state is False} <= of_other_releases
    else:
        assert True not in replaced.values()
    assert seen["overridden"] == []
    assert seen["stale"] == [], "these modules took the name and still have the original"


def test_between_is_between(inside: Inside) -> None:
    before, between, after = (set(inside(ordering)["early"]) for ordering in ORDERINGS)
    assert set() == before < between < after


@pytest.mark.parametrize("ordering", ["between", "after"])
@collect_failures(patch=PATCHES)
def test_the_order_makes_no_difference(inside: Inside, ordering: str, patch: Patch) -> None:
    assert essence(inside(ordering)["seen"][patch.id]) == essence(inside("before")["seen"][patch.id])


@pytest.mark.parametrize("ordering", ORDERINGS)
@collect_failures(patch=PATCHES)
def test_late_means_that_the_library_was_there_first(inside: Inside, ordering: str, patch: Patch) -> None:
    found = inside(ordering)
    seen = found["seen"][patch.id]
    there = any(set(patch.groups[group]) <= set(found["early"]) for group in groups_here(patch))
    assert seen["late"] is (seen["state"] == "applied" and there)


@collect_failures(patch=PATCHES)
def test_installing_twice_changes_nothing(inside: Inside, patch: Patch) -> None:
    assert inside("after")["twice"][patch.id] == inside("after")["seen"][patch.id]


@collect_failures(patch=PATCHES)
def test_a_replaced_function_has_the_kind_and_signature_of_the_original_and_is_pickled_by_name(
    inside: Inside, patch: Patch
) -> None:
    assert inside("after")["appearance"][patch.id] == []
