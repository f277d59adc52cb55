"""What a renovation compares: a dump of the patches that loses no field and is JSON."""

from __future__ import annotations

import dataclasses
import json

import gemma4_compat
from tools import baseline


def test_the_dump_of_patches_has_every_field() -> None:
    found = json.loads(json.dumps(baseline.patches()))
    assert set(found) == {patch.id for patch in gemma4_compat.patches()}
    for patch in gemma4_compat.patches():
        assert set(found[patch.id]) == {field.name for field in dataclasses.fields(patch)}
        assert [target["name"] for target in found[patch.id]["targets"]] == [target.name for target in patch.targets]
