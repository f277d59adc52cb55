"""F14: an entry for layer 1 does not take layers 10 to 19 as well."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat.patches.placement.transformers_map_boundaries import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"is on the meta device, we need a `value`|not where the map puts them"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("layers.1.mlp.weight", "disk"),
        ("layers.10.mlp.weight", 0),
        ("layers.1", "disk"),
        ("head", 0),
        ("xlayers.1", 0),
    ],
)
def test_the_most_specific_whole_name_wins(workspace: Any, name: str, expected: Any) -> None:
    from transformers.integrations.accelerate import expand_device_map

    assert expand_device_map({"": 0, "layers.1": "disk", "layers": 0}, [name]) == {name: expected}


def test_what_no_entry_names_is_on_the_cpu_as_upstream_has_it(workspace: Any) -> None:
    from transformers.integrations.accelerate import expand_device_map

    assert expand_device_map({"a": 0}, ["b.weight"]) == {"b.weight": "cpu"}
    assert expand_device_map(None, ["b.weight"]) == {"b.weight": "cpu"}
