"""Measured cards: each file has the form of a report, says what its source says, and a plan takes its speeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._plan.cards import measured
from gemma4_compat._plan.text import plan_text
from tests.helpers import ROOT

E2B: dict[str, Any] = {"context": 512, "quantize": "4bit-double"}


def test_files_have_the_form_of_a_report() -> None:
    files = sorted(measured.FOLDER.iterdir())
    assert len(files) >= 6
    assert [file for file in files if file.suffix != ".json"] == []
    for file in files:
        report = measured.read(file.read_bytes(), file.name)
        assert report.machine.gpu is not None
        assert all(placement.speeds for placement in report.placements)
        sources = [] if report.source == "check" else report.source.split(", ")
        assert all((ROOT / source).is_file() for source in sources) or not (ROOT / "benchmarks" / "results").is_dir()


def test_files_of_benchmarks_say_what_the_results_say() -> None:
    if not (ROOT / "benchmarks" / "results").is_dir():
        pytest.skip("an sdist has no results")
    import transformers

    if not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("this transformers has no 12B, whose shape is in a file")
    from tools import measured_cards

    for file, text in measured_cards.texts().items():
        assert file.read_text(encoding="utf-8") == text, "run python -m tools.measured_cards"


def test_what_is_no_report_is_refused() -> None:
    data = json.loads(next(measured.FOLDER.glob("*.json")).read_bytes())
    for change in ({"form": 2}, {"placements": []}, {"extra": 1}, {"date": "yesterday"}):
        with pytest.raises(Gemma4CompatError, match=r"'x\.json' is no report of `gemma4-compat check`"):
            measured.read(json.dumps(data | change).encode(), "x.json")


@pytest.mark.parametrize(
    "driver, name, same",
    [
        ("NVIDIA GeForce RTX 3060", "RTX 3060", True),
        ("NVIDIA GeForce RTX 3060", "nvidia geforce rtx  3060", True),
        ("NVIDIA GeForce RTX 3060 Ti", "RTX 3060", False),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060", False),
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H100 PCIe", "H100", False),
        ("NVIDIA H100 80GB HBM3", "H1", False),
    ],
)
def test_whose_card_a_name_is(driver: str, name: str, same: bool) -> None:
    assert measured._same(driver, name) is same


def test_a_plan_takes_the_measured_speed_and_says_so() -> None:
    plan = gemma4_compat.plan_device_map("E2B", "9GiB", card="H100", **E2B)
    (rate,) = plan.measured.values()
    (report,) = [item for item in measured.of_card("H100") if item.model.variant == "E2B"]
    whole = next(item for item in report.placements if not any(item.away.values()))
    assert rate == next(speed.fast_tokens_s for speed in whole.speeds if not speed.adapter)
    assert plan.modelled == {}
    assert plan.as_data()["measured"] == {"H100": rate}
    said = " ".join(plan_text(plan).split())
    assert f"Tokens a second, measured: {rate:.0f} on H100 after 64 tokens (docs/CARDS.md)." in said
    assert "modelled" not in said


def test_towers_do_not_matter_for_decoding() -> None:
    """The plan keeps a tower that was in host memory when it was measured."""
    plan = gemma4_compat.plan_device_map("E2B", "2GiB", card="H100", **E2B)
    assert plan.measured
    assert not plan.streamed


@pytest.mark.parametrize(
    "vram, options",
    [("9GiB", {"quantize": "4bit"}), ("1.2GiB", {}), ("9GiB", {"card": "RTX 4090"}), ("9GiB", {"card": "H200"})],
    ids=["stored otherwise", "other layers in host memory", "another card", "with PyTorch's kernels"],
)
def test_what_was_not_measured_is_modelled(vram: str, options: dict[str, Any]) -> None:
    plan = gemma4_compat.plan_device_map("E2B", vram, **{"card": "H100", **E2B, **options})
    assert plan.measured == {}
    assert len(plan.modelled) == 1
    assert "modelled and not measured" in " ".join(plan_text(plan).split())


def test_the_bus_of_a_measured_card_is_the_measured_one() -> None:
    given: dict[str, Any] = {"card": "H200", **E2B}
    plan = gemma4_compat.plan_device_map("E2B", "1.2GiB", **given)
    assert plan.brought
    assert "on H200 (its bus is measured)" in " ".join(plan_text(plan).split())
    assert "its bus" not in plan_text(gemma4_compat.plan_device_map("E2B", "1.2GiB", bus="9GiB/s", **given))
    assert measured.bus("RTX 3060") == 0


def test_the_nearest_context_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.loads((measured.FOLDER / "NVIDIA-H100-E2B.json").read_bytes())
    speeds = data["placements"][0]["speeds"]
    speeds.append(speeds[0] | {"context": 4096, "fast_tokens_s": 99.0})
    (tmp_path / "card.json").write_text(json.dumps(data))
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    measured.reports.cache_clear()
    try:
        for context, rate in ((128, speeds[0]["fast_tokens_s"]), (3000, 99.0)):
            plan = gemma4_compat.plan_device_map("E2B", "12GiB", card="H100", **E2B | {"context": context})
            assert plan.measured == {"H100": rate}
    finally:
        measured.reports.cache_clear()
