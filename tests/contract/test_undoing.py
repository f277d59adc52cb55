"""Real libraries: whatever was done or went wrong, afterwards every function is the one that was there before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from packaging.specifiers import SpecifierSet

from gemma4_compat import Patch
from gemma4_compat._engine import versions as _versions
from gemma4_compat.patches import registry
from tests.collecting import collect_failures
from tests.contract.conftest import PATCHES, modules_here, predicted, targets_here, version
from tests.contract.observation import groups_here
from tests.contract.test_orderings import essence
from tests.helpers import ON_A_GPU

Inside = Callable[[str], Any]


def expected(inside: Inside, patch: Patch, **versions: str | None) -> str:
    return predicted(patch, inside("after")["detected"][patch.id], **versions)


def untouched(experiment: dict[str, Any]) -> bool:
    return experiment["differences"] == [] and True not in experiment["seen"]["replaced"].values()


def test_reverting_all_restores_every_slot_by_identity(inside: Inside) -> None:
    found = inside("after")
    assert any(True in seen["replaced"].values() for seen in found["seen"].values()), "there was something to undo"
    assert found["reverted"]["differences"] == []
    assert found["differences"] == [], "after all the other experiments"


@collect_failures(patch=PATCHES)
def test_reverting_all_says_so(inside: Inside, patch: Patch) -> None:
    before, seen = inside("after")["seen"][patch.id], inside("after")["reverted"]["seen"][patch.id]
    assert seen["state"] == ("reverted" if before["state"] == "applied" else before["state"])
    assert True not in seen["replaced"].values()


@collect_failures(patch=PATCHES)
def test_reverting_one_leaves_the_others_and_it_can_be_installed_again(inside: Inside, patch: Patch) -> None:
    seen, single = inside("after")["seen"], inside("after")["single"][patch.id]
    without = single["without"]
    assert True not in without[patch.id]["replaced"].values()
    assert without[patch.id]["state"] == inside("after")["reverted"]["seen"][patch.id]["state"]
    for other in PATCHES:
        assert essence(single["again"][other.id]) == essence(seen[other.id])
        if other is not patch:
            assert essence(without[other.id]) == essence(seen[other.id])


@collect_failures(patch=PATCHES)
def test_it_works_and_comes_off_without_the_other_patches(inside: Inside, patch: Patch) -> None:
    alone = inside("after")["alone"][patch.id]
    assert essence(alone["seen"]) == essence(inside("after")["seen"][patch.id])
    assert alone["differences"] == []


@collect_failures(patch=PATCHES)
def test_disabling_it_leaves_its_targets_alone_and_no_others(inside: Inside, patch: Patch) -> None:
    (found,) = [found for found in inside("after")["disabled"] if patch.id in found["ids"]]
    assert len(found["ids"]) < len(PATCHES) / 4
    for other in PATCHES:
        if other.id in found["ids"]:
            assert found["seen"][other.id]["state"] == "skipped"
            assert found["seen"][other.id]["reason"] == "disabled by GEMMA4_COMPAT_DISABLE"
            assert True not in found["seen"][other.id]["replaced"].values()
        else:
            assert essence(found["seen"][other.id]) == essence(inside("after")["seen"][other.id])
    assert found["differences"] == []


@collect_failures(patch=PATCHES)
def test_when_a_replacement_raises_on_the_way_no_trace_stays(inside: Inside, patch: Patch) -> None:
    experiments = inside("after")["raising"][patch.id]
    applicable = expected(inside, patch) == "applied"
    # A release outside the range may not have the module at all.
    assert not applicable or len(experiments) >= len(upstreams(patch))
    for number, experiment in enumerate(experiments, start=1):
        assert untouched(experiment)
        if applicable:
            assert experiment["seen"]["state"] == "failed"
            assert experiment["seen"]["reason"] == f"RuntimeError: replacement {number} fails on purpose"
            assert len(experiment["said"]) == 1
        else:
            assert (experiment["seen"]["state"], experiment["said"]) == (expected(inside, patch), [])


@collect_failures(patch=PATCHES)
def test_when_a_replacement_raises_the_import_survives(inside: Inside, patch: Patch) -> None:
    found = inside("raising_on_import")
    assert found["ours"] == []
    if expected(inside, patch) == "applied":
        assert modules_here(patch) <= set(found["imported"])
        assert found["seen"][patch.id]["state"] == "failed"
        assert [text for text in found["said"] if f"patch {patch.id!r}" in text and "on purpose" in text]


def upstreams(patch: Patch) -> set[str]:
    """The targets here that upstream has: no class of its configurations has a ``__getattr__``."""
    return {name for name in targets_here(patch) if not name.endswith(".__getattr__")}


def twins(name: str, targets: Iterable[str]) -> list[str]:
    """The targets that are one function, which classes inherit: the first one is named."""
    tail = name.rpartition(".")[2]
    known = registry.KNOWN.get(name)
    return [
        one
        for one in targets
        if one == name or (one.endswith(f".{tail}") and known and registry.KNOWN[one].keys() == known.keys())
    ]


@collect_failures(patch=PATCHES)
def test_changed_upstream_code_is_left_alone_whichever_target_it_is(inside: Inside, patch: Patch) -> None:
    experiments = inside("after")["changed"][patch.id]
    applicable = expected(inside, patch) == "applied"
    assert not applicable or set(experiments) >= upstreams(patch)
    groups = {str(target): target.group for target in patch.targets}
    activators = {str(target) for target in patch.targets if target.activator}
    for name, experiment in experiments.items():
        seen = experiment["seen"]
        changed = {groups[twin] for twin in experiment["inherited"]}
        others = {target for target, group in groups.items() if group not in changed} & set(experiments)
        assert experiment["differences"] == []
        replaced = {target for target, ours in seen["replaced"].items() if ours and target in experiments}
        if name in activators:  # left out, and nothing is dormant
            assert replaced == (set(experiments) - {name} if applicable else set())
            assert experiment["said"] == []
            continue
        assert replaced == (others if applicable else set())
        if applicable:
            assert seen["state"] == ("applied" if others else "failed")
            (said,) = experiment["said"]
            assert any(twin in said for twin in twins(name, groups)), (name, said)
            for part in (patch.id, patch.first_symptom, f"GEMMA4_COMPAT_DISABLE={patch.id}"):
                assert part in said
        else:
            assert (experiment["seen"]["state"], experiment["said"]) == (expected(inside, patch), [])


@collect_failures(patch=PATCHES)
def test_when_upstream_code_has_changed_the_import_survives(inside: Inside, patch: Patch) -> None:
    found = inside("changed_on_import")
    assert found["ours"] == []
    if expected(inside, patch) == "applied":
        assert modules_here(patch) <= set(found["imported"])
        assert found["seen"][patch.id]["state"] == "failed"
        assert len([text for text in found["said"] if f"patch {patch.id!r}" in text]) == 1


@collect_failures(patch=PATCHES)
def test_empty_modules_in_place_of_the_libraries_fail_cleanly(inside: Inside, patch: Patch) -> None:
    found = inside("empty_modules")
    seen = found["seen"][patch.id]
    gated = predicted(patch)  # `detect` finds nothing in an empty module, unless it looks at the host alone
    if patch.id in ON_A_GPU:
        gated = expected(inside, patch)
    assert seen["state"] == ("failed" if gated == "applied" else gated)
    assert set(seen["replaced"].values()) == {None}
    assert len([text for text in found["said"] if f"patch {patch.id!r}" in text]) == (gated == "applied")
    assert found["ours"] == []


def _is_in_range(patch: Patch) -> bool:
    found = version(patch.distribution)
    return found is not None and SpecifierSet(patch.affected).contains(found, prereleases=True)


@collect_failures(patch=PATCHES)
def test_another_release_is_judged_by_its_number_and_nothing_is_replaced_outside_affected(
    inside: Inside, patch: Patch
) -> None:
    experiments = inside("after")["versions"][patch.id]
    imported = inside("after")["early"]
    assert f"{patch.distribution} 0.0.1" in experiments
    for name, experiment in experiments.items():
        distribution, _, number = name.partition(" ")
        state = expected(inside, patch, **{distribution: None if number == "None" else number})
        failed = experiment["seen"]["state"] == "failed"
        if failed and state == "applied" and distribution == patch.distribution and not _is_in_range(patch):
            # The code is really that of a release before the first affected one, and unknown.
            assert untouched(experiment)
            assert len(experiment["said"]) == 1
            continue
        assert experiment["seen"]["state"] == state, name
        too_old = f"{name} is older than the oldest supported release {_versions.OLDEST[distribution]}; upgrade: pip"
        said = [too_old] * (number == "0.0.1" and _exist(patch))
        if state == "applied" and distribution == patch.distribution and _is_partly_unknown(patch, number, imported):
            said = [f"patch {patch.id!r} was applied in part: "]
        starts = zip(experiment["said"], said, strict=True)
        assert all(text.startswith(start) for text, start in starts), experiment["said"]
        assert (True in experiment["seen"]["replaced"].values()) is (state == "applied")
        assert experiment["differences"] == []
        if state == "applied" and distribution == patch.distribution:
            assert experiment["seen"]["reason"].startswith("unmeasured release, code unchanged")
        if number == "0.0.1":
            assert experiment["seen"]["state"] == "skipped"
            assert experiment["seen"]["reason"].startswith(too_old)


def _is_partly_unknown(patch: Patch, release: str, imported: list[str]) -> bool:
    """Whether an imported module has a target for ``release`` in a group with none for the installed release."""
    installed = str(version(patch.distribution))
    targets_of = {
        number: [item for item in patch.targets if not item.affected or _versions.admits(item.affected, number)]
        for number in (installed, release)
    }
    groups = {target.group for target in targets_of[installed]}
    return any(target.group not in groups and target.module in imported for target in targets_of[release])


def _exist(patch: Patch) -> bool:
    """Whether the installed release has the patch's modules; else nothing is decided before somebody asks."""
    return groups_here(patch) != set()
