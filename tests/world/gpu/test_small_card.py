"""The thread's situation in E2B's shape: towers on the CPU, an adapter on everything, little memory left.

Bounds: parity is bit-exact, the same kernels run on the same GPU. VRAM after the adapter is base plus adapter within
1 %.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.world.gpu.conftest import run as child


def run(name: str, folder: Path, *, shim: bool) -> dict[str, Any]:
    return child("scenarios", name, str(folder), shim=shim)


@pytest.mark.parametrize("scenario", ["split_towers", "split_towers_pressure"])
def test_an_adapter_leaves_the_towers_on_the_cpu(
    e2b: tuple[Path, dict[str, Any]], record: Callable[[str, Any], None], scenario: str
) -> None:
    folder, reference = e2b
    without, repaired = (run(scenario, folder, shim=shim) for shim in (False, True))
    record(f"e2b {scenario}", {"without": without, "with": repaired})
    # Without: an error, or the towers came back to the GPU.
    assert without["error"] is not None or without["towers_on"] == ["cuda"], without
    assert repaired["error"] is None, repaired
    assert repaired["parity"] == 0.0
    assert repaired["towers_on"] == ["meta"], "on the host, brought in for their forward"
    adapter = reference["adapter_gib"] - reference["base_gib"]
    assert repaired["resident_gib"] <= (repaired["base_gib"] + adapter) * 1.01
    if without["error"] is None:
        assert repaired["adapter_gib"] < without["adapter_gib"]


def test_a_catch_all_entry_brings_nothing_to_the_gpu_that_belongs_elsewhere(
    e2b: tuple[Path, dict[str, Any]], record: Callable[[str, Any], None]
) -> None:
    without, repaired = (run("catch_all", e2b[0], shim=shim) for shim in (False, True))
    record("e2b catch_all", {"without": without, "with": repaired})
    assert without["error"] is None, without
    assert repaired["error"] is None, repaired
    assert without["load_peak_gib"] > without["resident_gib"] + without["table_gib"], "the table passed through"
    assert repaired["load_peak_gib"] <= repaired["resident_gib"] + repaired["largest_block_gib"]


def test_max_memory_below_the_model(tmp_path: Path, record: Callable[[str, Any], None]) -> None:
    without, repaired = (run("max_memory", tmp_path / str(shim), shim=shim) for shim in (False, True))
    record("tiny max_memory", {"without": without, "with": repaired})
    assert without["error"] is not None, without
    assert repaired["error"] is None, repaired
    assert repaired["parity"] == 0.0
    assert repaired["kept"]
    assert repaired["offloaded_4bit_weights"] > 0
    assert repaired["quantized_differently"] == 0


def test_a_budget_of_2_gib_is_the_peak(e2b: tuple[Path, dict[str, Any]], record: Callable[[str, Any], None]) -> None:
    without, repaired = (run("small_budget", e2b[0], shim=shim) for shim in (False, True))
    record("e2b small_budget", {"without": without, "with": repaired})
    at_fault = "all_on_the_host" in without or without.get("parity") != 0.0 or without["peak_gib"] > 2
    assert without["error"] is not None or at_fault, without
    assert repaired["error"] is None, repaired
    assert repaired["parity"] == 0.0
    assert repaired["peak_gib"] - repaired["left_gib"] <= 2.0


def test_offloaded_layers_quantized_when_asked(
    e2b: tuple[Path, dict[str, Any]], record: Callable[[str, Any], None]
) -> None:
    without, repaired = (run("quantized_layers", e2b[0], shim=shim) for shim in (False, True))
    record("e2b quantized_layers", {"without": without, "with": repaired})
    assert without["error"] is not None or without["parity"] != 0.0, without
    assert repaired["error"] is None, repaired
    assert repaired["parity"] == 0.0
    assert repaired["offloaded_4bit_weights"] > 0
    assert repaired["load_peak_gib"] <= repaired["resident_gib"] + repaired["largest_block_gib"]


def test_experts_in_4_bits(tmp_path: Path, record: Callable[[str, Any], None]) -> None:
    """Six layers of the 26B-A4B: the unpatched stack keeps experts in bf16 and quantizes routers."""
    without, repaired = (run("experts", tmp_path, shim=shim) for shim in (False, True))
    record("26B-A4B, 6 layers", {"without": without, "with": repaired})
    assert repaired["error"] is None, repaired
    assert repaired["routers"] == ["torch.bfloat16"]
    assert repaired["parity"] == 0.0
    assert repaired["split_gib"] < repaired["gib"]
    if without["error"] is None:
        assert without["routers"] == ["torch.uint8"]
        assert repaired["experts_gib"] < without["experts_gib"] / 3
