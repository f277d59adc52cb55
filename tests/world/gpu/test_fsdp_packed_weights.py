"""F72 on a GPU whose own copy loses bits: packed 4-bit weights that FSDP2 gathers, without the patch and with it.

One GPU is enough: the second rank of the group is torch's fake one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import sharding

PATCH = "bitsandbytes-fsdp-packed-weights"


@pytest.fixture(autouse=True, scope="module")
def lossy() -> None:
    import torch

    if (missing := sharding.missing()) is not None:
        pytest.skip(missing)
    if not sharding.loses_bits(0):
        pytest.skip(f"torch {torch.__version__} copies all bits on this GPU")


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_packed_bytes_are_gathered_as_they_are(
    workspace: Any, record: Callable[[str, Any], None], precision: str
) -> None:
    """In the storage's dtype, bf16, the kernel changes them; in another one they would be cast."""
    import torch

    def changed() -> tuple[int, int]:
        with sharding.two_ranks(0) as mesh:
            return sharding.gathered(sharding.packed(workspace), mesh, getattr(torch, precision))

    found = changed()
    gemma4_compat.revert(PATCH)
    try:
        without = changed()
    finally:
        gemma4_compat.install()
    record(
        f"FSDP2 over packed weights, {precision}",
        {"bytes": found[1], "changed": found[0], "changed without the patch": without[0]},
    )
    assert found[0] == 0
    assert without[0] > 0
