"""What patches declare of themselves: their kind, and the models they act on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gemma4_compat
from gemma4_compat import ActsOn, Kind, Patch, Reason, Severity
from gemma4_compat.patches import registry
from tests.helpers import child

PATCHES = {patch.id: patch for patch in gemma4_compat.patches()}


def test_no_id_is_a_kind_or_all() -> None:
    """``GEMMA4_COMPAT_DISABLE`` takes all of them."""
    assert not {*PATCHES} & {*Kind, "all"}


def test_each_kind_has_patches_and_speed_is_what_it_costs_to_be_without() -> None:
    assert {patch.kind for patch in PATCHES.values()} == {*Kind}
    assert {patch.severity for patch in PATCHES.values() if patch.kind is Kind.SPEED} == {Severity.SPEED}


def test_nothing_that_is_repaired_needs_a_patch_that_only_speeds_up_refuses_or_tells() -> None:
    """So that one may be switched off without harm to the others."""
    needs = [(one, PATCHES[name]) for one in PATCHES.values() if one.kind is Kind.REPAIR for name in one.needs]
    assert [(one.id, other.id) for one, other in needs if other.kind is not Kind.REPAIR] == []


def test_a_patch_of_gemma_4s_own_code_acts_on_gemma_4() -> None:
    own = [
        patch
        for patch in PATCHES.values()
        if all(target.module.startswith("transformers.models.gemma4") for target in patch.targets)
    ]
    assert own
    assert [patch.id for patch in own if patch.acts_on is not ActsOn.GEMMA4] == []


SCRIPT = """
import os, sys, json
os.chdir(sys.argv[1])
import gemma4_compat
found = gemma4_compat.status().values()
print(json.dumps({status.id: [status.reason_code, status.reason] for status in found}))
"""


@pytest.mark.parametrize("kind", Kind)
def test_a_kind_is_switched_off_and_status_says_why(tmp_path: Path, kind: Kind) -> None:
    found = child("-c", SCRIPT, str(tmp_path), environment={"GEMMA4_COMPAT_DISABLE": str(kind)})
    (tmp_path / "pyproject.toml").write_text(f'[tool.gemma4_compat]\ndisable = ["{kind}"]\n', encoding="utf-8")
    for done in (found, child("-c", SCRIPT, str(tmp_path))):
        assert done.code == 0, done.stderr
        reasons = json.loads(done.stdout)
        off = {name for name, (code, _) in reasons.items() if code == Reason.DISABLED}
        assert off == {patch.id for patch in PATCHES.values() if patch.kind is kind}
        assert all(reasons[name][1].endswith(f", with all others of the kind {kind}") for name in off)


def test_the_registry_orders_the_patches_that_need_it() -> None:
    """Which of two patches of one function is on top is said there, and nothing is said of the others."""

    def follows(patch: Patch, other: Patch) -> bool:
        targets = {str(target) for target in patch.targets}
        return other.id in patch.after or not targets.isdisjoint(map(str, other.targets))

    pairs = [(one, other) for one in PATCHES.values() for other in PATCHES.values() if one is not other]
    stacked = {patch.id for one, other in pairs if follows(one, other) for patch in (one, other)}
    assert stacked == {name.partition(".")[2].replace("_", "-") for name in registry.STACKED}
