"""A plan of the command applies few patches, and is the plan that has all; a plan of the function applies all."""

from __future__ import annotations

import json

import pytest

import gemma4_compat
from gemma4_compat import PatchState
from gemma4_compat._engine import hooks
from gemma4_compat._plan.plan import PATCHES
from tests.helpers import child

_COMMAND = """
import sys

sys.argv = ["gemma4-compat", "plan", *sys.argv[1:]]
from gemma4_compat import _shim, cli
try:
    cli.app()
finally:
    print(*(record.id for record in _shim.engine._records.values() if record.is_loaded), file=sys.stderr)
"""


@pytest.mark.parametrize("variant", ["E4B", "26B-A4B"])
def test_the_command_imports_few_patches_and_plans_the_same(variant: str) -> None:
    expected = gemma4_compat.plan_device_map(variant, "12GiB", batch=2).as_data()
    found = child("-c", _COMMAND, variant, "--vram", "12GiB", "--batch", "2", "--json")
    loaded = found.stderr.split()
    assert set(loaded) <= {*PATCHES}
    data = json.loads(found.stdout)
    assert {name: data[name] for name in expected} == json.loads(json.dumps(expected))


def test_after_a_plan_what_it_imported_is_patched() -> None:
    gemma4_compat.plan_device_map("E2B", "8GiB")
    assert hooks.is_imported("transformers.models.gemma4.modeling_gemma4")
    states = gemma4_compat.status()
    there = [one.id for one in gemma4_compat.patches() if all(hooks.is_imported(each.module) for each in one.targets)]
    assert PatchState.APPLIED in {states[name].state for name in there}
    assert not [name for name in there if states[name].state is PatchState.PENDING]
