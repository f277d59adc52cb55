"""Real releases as the future of the reference stack: patches that know nothing later meet what is installed here.

A patch that was measured up to the thread's releases must apply to a later one where none of the code it replaces has
changed, stay off with one warning where any has, and do nothing else, whatever that release is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from gemma4_compat import Patch
from gemma4_compat._engine import versions
from gemma4_compat._engine.patch import Target
from tests.collecting import collect_failures
from tests.contract.conftest import PATCHES, version
from tests.contract.inside import as_of, thread

Inside = Callable[[str], Any]


def as_of_the_thread(patch: Patch) -> Patch:
    """The patch as of the reference stack; skips where the installed release is not of its future."""
    then, now = thread()[patch.distribution], version(patch.distribution)
    if now is None or Version(now) <= Version(then):
        pytest.skip(f"{patch.distribution} {now} is not later than the thread's {then}")
    old: Patch | None = as_of(patch, thread())
    if old is None:
        pytest.skip(f"{patch.distribution} {then} does not have the code it replaces")
    return old


def expected(found: dict[str, Any], old: Patch) -> str:
    for requirement in map(Requirement, old.requires):
        if not requirement.specifier.contains(str(version(requirement.name)), prereleases=True):
            return "skipped"
    if found["detected"][old.id] == "not_affected":
        return "not_needed"
    return "failed" if changed(found, old) == set(old.groups) else "applied"


def changed(found: dict[str, Any], old: Patch) -> set[str]:
    """The groups of targets whose code has changed since."""
    codes = {str(target): found["code"][str(target)] for target in old.targets}
    return {
        target.group
        for target in old.targets
        if (code := codes[str(target)]) not in target.known
        and not (code is None and target.optional)
        and not is_left_out(codes, target, old)
    }


def is_left_out(codes: dict[str, Any], target: Target, old: Patch) -> bool:
    """Whether the installed release does without this target."""
    if target.activator and codes[str(target)] not in target.known:
        return True
    return bool(target.affected) and not versions.admits(target.affected, str(version(old.distribution)))


@pytest.mark.parametrize("ordering", ["early", "late"])
@collect_failures(patch=PATCHES)
def test_a_later_release_is_repaired_exactly_where_its_code_has_not_changed(
    inside: Inside, ordering: str, patch: Patch
) -> None:
    old, found = as_of_the_thread(patch), inside("future")
    seen, said = found[ordering]["seen"][patch.id], found[ordering]["said"]
    state = expected(found, old)
    assert seen["state"] == state, seen["reason"]
    if state == "applied":
        assert seen["reason"].startswith("unmeasured release, code unchanged (")
        kept = {
            str(target)
            for target in old.targets
            if target.group in changed(found, old) or is_left_out(found["code"], target, old)
        }
        assert {target for target, ours in seen["replaced"].items() if not ours} == kept
        assert True in seen["replaced"].values()
    else:
        assert True not in seen["replaced"].values()
    if state == "failed":
        assert seen["reason"].startswith("unmeasured release, code changed (")
    told = len([text for text in said if f"patch {patch.id!r}" in text])
    assert told == (state in ("applied", "failed") and changed(found, old) != set())


@collect_failures(patch=PATCHES)
def test_the_code_of_a_measured_release_is_what_the_patch_says_it_is(inside: Inside, patch: Patch) -> None:
    """So that the future of the reference stack is judged by code that was really seen in it."""
    old = as_of_the_thread(patch)
    now = Version(str(version(patch.distribution)))
    if now > Version(patch.measured):
        pytest.skip(f"measured up to {patch.measured}")
    for target in patch.targets:
        code = inside("future")["code"].get(str(target))
        if code is None:
            left_out = target.optional or is_left_out(inside("future")["code"], target, old)
            assert left_out or target.group not in old.groups  # a class that came later
            continue
        spans = [span.partition(" - ") for span in target.known[code].split(", ")]
        assert any(Version(first) <= now <= Version(last or first) for first, _, last in spans)


def test_afterwards_everything_is_as_it_was(inside: Inside) -> None:
    assert inside("future")["differences"] == []
