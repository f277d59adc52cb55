"""Each patch on a GPU, tiny checkpoint: the original defect in a child without the shim, the repair with parity."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._doctor.reproductions import findings
from gemma4_compat._lab import scenarios
from gemma4_compat.patches.adapters import peft_tied_merge
from gemma4_compat.patches.multimodal.transformers_quantized_vision import BOUND
from tests.conftest import is_affected, patch

#: Patches are examined many at once, since most of a child's time is importing: by one worker of pytest-xdist (or by
#: the only process) all that have the same number.
SHARES = 2 if "PYTEST_XDIST_WORKER" in os.environ else 1
#: Largest difference from the same weights on one device, where it is not 0: other kernels add in another order, and a
#: merge rounds.
BOUNDS = {"transformers-flash-attention": 1e-3, "peft-cache-name": 1e-3, "peft-tied-merge": peft_tied_merge.ROUNDING}
NUMBERS = {patch.id: index % SHARES for index, patch in enumerate(gemma4_compat.patches())}


@pytest.fixture(scope="module")
def finding(
    request: pytest.FixtureRequest, record: Callable[[str, Any], None]
) -> Iterator[Callable[[str], findings.Finding]]:
    """The finding of a patch, once it is there: the others of its share go on meanwhile, in the order of the tests."""
    known: dict[str, findings.Finding] = {}
    running: dict[int, Generator[findings.Finding]] = {}
    selected = [item.callspec.params.get("patch_id") for item in request.session.items if hasattr(item, "callspec")]

    def find(patch_id: str) -> findings.Finding:
        number = NUMBERS[patch_id]
        if number not in running:
            share = [patch(item) for item in selected if item in NUMBERS and NUMBERS[item] == number]
            running[number] = findings.examine(share, keep=False, note=print)
        while patch_id not in known:
            found = next(running[number])
            known[found.id] = found
            record(found.id, {"without": found.without, "with": found.with_shim})
        return known[patch_id]

    yield find
    for share in running.values():
        share.close()


@pytest.mark.parametrize(
    "patch_id",
    [
        pytest.param(patch_id, marks=pytest.mark.xdist_group(f"patches-{number}"))
        for patch_id, number in NUMBERS.items()
    ],
)
def test_defect_without_and_parity_with(finding: Callable[[str], findings.Finding], patch_id: str) -> None:
    without, repaired = finding(patch_id).without, finding(patch_id).with_shim
    assert not repaired["defect"], repaired
    assert repaired["parity"] is None or repaired["parity"] <= BOUNDS.get(patch_id, 0.0), repaired
    assert without["defect"] == (is_affected(patch(patch_id)) and without["applicable"]), without
    if patch_id in ("bitsandbytes-cpu-packing", "bitsandbytes-cpu-strides"):
        from bitsandbytes import functional

        fused = getattr(functional, "has_avx512bf16", lambda: False)()
        assert without["applicable"] == fused or not is_affected(patch(patch_id)), without
    elif patch_id == "accelerate-subclass-offload" and not without["applicable"]:
        pytest.skip(without["detail"])
    elif is_affected(patch(patch_id)):
        assert without["applicable"], without


@pytest.mark.parametrize("sense", ["vision", "audio"])
@pytest.mark.parametrize("quantization", ["4bit", "4bit-double", "8bit"])
def test_quantized_towers_see_and_hear(workspace: Any, quantization: str, sense: str) -> None:
    """Against the same weights, dequantized; what the 8-bit kernels made of the audio tower was off by half."""
    error, contrast = scenarios.compare_quantized_tower(workspace, quantization, sense)
    assert error < BOUND
    assert contrast > BOUND
