"""The forum thread's matrix in E2B's shape, with little of the card left by a ballast tensor (thread_cases.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters.transformers_dequantized_adapter import PATCH as DEQUANTIZED
from gemma4_compat.patches.multimodal.transformers_quantized_vision import BOUND
from gemma4_compat.patches.multimodal.transformers_quantized_vision import PATCH as VISION
from gemma4_compat.patches.training.transformers_flash_attention import BOUNDS
from tests.conftest import is_affected
from tests.world.gpu.conftest import together
from tests.world.gpu.thread_cases import BUDGET, FREE, QUANTIZATIONS, kept

#: What each case of a kind of quantization gave without the shim, and with it.
CASES = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def cases(e2b_folder: Path, record: Callable[[str, Any], None]) -> Callable[[str], CASES]:
    """Measures a kind when a test first asks for it."""
    return functools.cache(lambda kind: measured(kind, e2b_folder, record))


def measured(kind: str, folder: Path, record: Callable[[str, Any], None]) -> CASES:
    """Both sides, on two GPUs at once where there are two."""
    import torch

    without, repaired = (found["cases"] for found in together("thread_cases", str(folder), kind))
    assert set(without) == set(repaired)
    for name in repaired:
        outputs = [kept(folder, name, side) for side in ("without", "with")]
        if all(file.exists() for file in outputs):
            loaded = (torch.load(file, weights_only=False) for file in outputs)
            repaired[name]["against_unpatched"] = difference(*loaded)
        record(f"thread: {name}", {"without": without[name], "with": repaired[name]})
    return {name: (without[name], repaired[name]) for name in repaired}


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_everything_on_the_gpu_is_as_it_was(cases: Callable[[str], CASES], kind: str) -> None:
    without, repaired = cases(kind)[f"R05 all on the GPU, {kind}"]
    assert without["error"] is None, without
    assert repaired["error"] is None, repaired
    assert repaired["against_unpatched"] == 0.0
    assert repaired["kernel"] <= BOUNDS["torch.bfloat16"]
    assert repaired["gib"] <= without["gib"]


@pytest.mark.parametrize(
    ("kind", "how"),
    [(kind, f"{free} GiB free") for kind in QUANTIZATIONS for free in FREE[kind]]
    + [(kind, "device_map passed to PEFT") for kind in QUANTIZATIONS],
)
def test_towers_stay_where_they_were_put(cases: Callable[[str], CASES], kind: str, how: str) -> None:
    without, repaired = cases(kind)[f"R03 split, {kind}, {how}"]
    assert without["error"] is not None or without["towers_on"] == ["cuda"], without
    assert repaired["error"] is None, repaired
    assert repaired["parity"] == 0.0
    assert repaired["towers_on"] == ["meta"]
    whole = cases(kind)[f"R05 all on the GPU, {kind}"][1]["gib"]
    assert repaired["resident_gib"] < whole
    assert repaired["resident_gib"] <= repaired["adapter_gib"] * 1.01


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_less_memory_than_the_model_needs(cases: Callable[[str], CASES], kind: str) -> None:
    without, repaired = cases(kind)[f"max_memory={BUDGET}, {kind}"]
    assert without["error"] is not None or "all_on_the_host" in without or without["parity"] != 0.0, without
    assert repaired["error"] is None, repaired
    assert repaired["offloaded"]
    assert repaired["parity"] == 0.0


def test_quantized_towers_see(cases: Callable[[str], CASES]) -> None:
    without, repaired = cases("double")["towers quantized, two images"]
    assert repaired["error"] is None, repaired
    assert repaired["gib"] < repaired["towers_in_bf16_gib"]
    assert repaired["images_differ_by"] == pytest.approx(repaired["images_differ_by_in_bf16"], rel=BOUND)
    if is_affected(VISION):
        assert without["error"] is not None or without["images_differ_by"] == 0.0, without


def test_dequantize_then_merge(cases: Callable[[str], CASES]) -> None:
    without, repaired = cases("double")["dequantize, then merge"]
    assert (without["error"] is not None) == is_affected(DEQUANTIZED), without
    assert repaired["error"] is None, repaired
    assert repaired["parity"] == 0.0


def test_a_direct_merge_has_upstreams_bits_and_says_what_it_lost(cases: Callable[[str], CASES]) -> None:
    without, repaired = cases("double")["direct merge"]
    assert without["error"] is None, without
    assert repaired["error"] is None, repaired
    assert repaired["against_unpatched"] == 0.0
    assert without["warnings"] > 1
    assert repaired["warnings"] == 1
    assert repaired["distance"] > 0.0
