"""Each patch on a GPU, tiny checkpoint: the original defect in a child without the shim, the repair with parity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gemma4_compat
from tests.conftest import is_affected

IDS = [patch.id for patch in gemma4_compat.patches()]


@pytest.mark.parametrize("patch_id", IDS)
def test_defect_without_and_parity_with(
    reproduce: Callable[..., dict[str, Any]], record: Callable[[str, Any], None], patch_id: str
) -> None:
    without, repaired = (reproduce(patch_id, shim=shim) for shim in ("off", "on"))
    record(patch_id, {"without": without, "with": repaired})
    assert not repaired["defect"], repaired
    assert repaired["parity"] in (0.0, None)
    patch = {item.id: item for item in gemma4_compat.patches()}[patch_id]
    if patch_id == "bitsandbytes-cpu-packing":
        from bitsandbytes.functional import has_avx512bf16

        assert without["defect"] == (is_affected(patch) and bool(has_avx512bf16()))
    else:
        assert without["defect"] == is_affected(patch), without
