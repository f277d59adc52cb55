"""The benchmark's tables and plots, on a made-up run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.small_card import cases as small_card_cases
from benchmarks.small_card import report, small_card

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = Path(__file__).parent / "samples" / "small_card" / "small_card-E4B.json"


@pytest.fixture
def run() -> dict[str, Any]:
    return report.read(SAMPLE)


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in text.splitlines()]


def test_the_table_has_a_row_for_each_measured_or_crashed_case(run: dict[str, Any]) -> None:
    titles, _, *lines = rows(report.table(run))
    assert {len(line) for line in lines} == {len(titles)}
    by_name = {(line[0], line[1]): dict(zip(titles, line)) for line in lines}
    assert len(lines) == len(by_name) == 5, "neither the second all-gpu nor a reference that was not timed"
    ours = by_name["per-layer table on the CPU", "on"]
    upstream = by_name["per-layer table on the CPU", "**off**"]
    assert (ours["decode, of all-GPU"], upstream["decode, of all-GPU"]) == ("~0.88", "~0.10"), "not timed in turns"
    assert (ours["peak prefill 2,048"], upstream["peak prefill 2,048"]) == ("4.20", "9.50")
    assert ours["answers"] == "bit-exact"


def test_what_was_timed_in_turns_is_no_estimate(run: dict[str, Any]) -> None:
    run["cases"]["table"]["paired"] = {"share": 0.88}
    (line,) = [line for line in rows(report.table(run)) if line[0] == "per-layer table on the CPU" and line[1] == "on"]
    assert "0.88" in line
    assert "~0.88" not in line


def test_a_peak_of_no_generate_is_not_shown(run: dict[str, Any]) -> None:
    decode = run["cases"]["table"]["decode"]
    decode["peak_gib"] = decode["resident_gib"]
    assert report.decode_peak(run["cases"]["table"]) is None


def test_other_answers_and_crashes_are_seen_in_the_table(run: dict[str, Any]) -> None:
    text = report.table(run)
    assert "**differ by inf**" in text
    assert "Tensor.item() cannot be called on meta tensors \\| &lt;made up>" in text


def test_layers_and_bytes_are_those_of_the_placement(run: dict[str, Any]) -> None:
    (line,) = [line for line in report.table(run).splitlines() if "some decoder layers" in line]
    assert rows(line)[0][2] == "8"
    assert "| 408 |" in line


def test_the_planner_is_compared_over_the_phases_that_were_measured(run: dict[str, Any]) -> None:
    text = report.planner(run)
    assert "| per-layer table on the CPU | 4.10 | 4.20 | 0.976 |" in text
    assert "everything on the GPU" not in text, "nothing was predicted for it"
    for entry in run["cases"].values():
        entry.pop("predicted_gib", None)
    assert report.planner(run) == ""


def test_the_heading_names_machine_stack_and_both_looks_at_the_reference(run: dict[str, Any]) -> None:
    text = report.heading(run, "a/b.json")
    for part in (
        "E4B",
        "Made-up GPU",
        "bitsandbytes 0.50.2",
        "52 GiB/s pinned",
        "16.5 and 15.5 tok/s",
        "[raw](a/b.json)",
    ):
        assert part in text


def test_a_picture_changes_with_what_is_drawn_only(run: dict[str, Any]) -> None:
    before = report.drawn(run)
    run["cases"]["table"]["wall_s"] = 99.0
    assert report.drawn(run) == before
    run["cases"]["table"]["decode_share"] = 0.512
    assert report.drawn(run) != before
    assert ">0.51<" in report.drawn(run)


def test_a_run_without_a_gpu_has_tables_and_nothing_to_draw(run: dict[str, Any]) -> None:
    for entry in run["cases"].values():
        for phase in (entry.get("load"), entry.get("decode"), *entry.get("prefill", {}).values()):
            if phase:
                phase.update(resident_gib=None, peak_gib=None)
    run["host_to_device_gib_s"] = None
    assert report.rows(run) == []
    assert report.planner(run) == ""
    assert "| - |" in report.table(run)
    assert "pinned" not in report.heading(run, "x")


def test_a_picture_is_drawn_beside_a_result_that_was_named(run: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run), encoding="utf-8")
    assert report.main([str(file)]) == 0
    assert (tmp_path / "run.svg").read_text(encoding="utf-8") == report.drawn(run)


def test_a_file_that_is_no_result_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit):
        report.main([str(file)])
    assert "is no result of small_card.py" in capsys.readouterr().err


def test_shares_refer_to_the_mean_of_the_first_and_the_last_look() -> None:
    def entry(rate: float, milliseconds: float) -> dict[str, Any]:
        return {"who": "ours", "error": None, "decode": {"tok_s": rate}, "prefill": {"512": {"ms": milliseconds}}}

    cases = {"all-gpu": entry(10.0, 50.0), "table": entry(8.0, 120.0), "all-gpu-again": entry(6.0, 70.0)}
    found = small_card.shares(cases)
    assert found["decode_tok_s"] == [10.0, 6.0]
    assert cases["table"]["decode_share"] == 1.0
    assert cases["table"]["prefill_times"] == {"512": 2.0}


@pytest.mark.parametrize(
    "who, result, failing",
    [
        ("ours", {"error": None, "parity": 0.0}, False),
        ("ours", {"error": None, "parity": 0.25}, True),
        ("ours", {"error": None, "parity": float("inf")}, True),
        ("ours", {"error": "KeyError: 13"}, True),
        ("reference", {"error": "OutOfMemoryError"}, True),
        ("upstream", {"error": "KeyError: 13"}, False),
        ("upstream", {"error": None, "parity": 0.25}, False),
    ],
)
def test_a_case_with_the_shim_on_must_run_and_agree(who: str, result: dict[str, Any], failing: bool) -> None:
    assert bool(small_card.problems({"x": {"who": who, **result}})) is failing


def test_the_references_that_a_case_needs_run_before_it() -> None:
    assert small_card_cases.selected(["everything-single"], "E2B", True) == [
        "all-gpu",
        "all-gpu-single",
        "everything-single",
    ]
    assert small_card_cases.selected(["auto-1"], "tiny", False) == ["all-gpu"]
    order = list(small_card_cases.CASES)
    for name, case in small_card_cases.CASES.items():
        assert order.index(case.reference) <= order.index(name)


@pytest.mark.parametrize("shape", ["E2B", "E4B", "tiny"])
@pytest.mark.parametrize("which", ["layers-few", "layers-half", "layers-all"])
def test_chosen_layers_are_distinct_and_none_is_the_beginning_of_another(shape: str, which: str) -> None:
    names = small_card_cases.layer_names(shape, which)
    count = small_card_cases.SHAPES[shape].text["num_hidden_layers"]
    assert len(set(names)) == len(names)
    assert all(int(name.rpartition(".")[2]) < count for name in names)
    if which == "layers-few":  # they go into llm_int8_skip_modules, which old releases match as beginnings
        every = [small_card_cases.LAYER.format(index) for index in range(count)]
        assert not [name for name in names for other in every if other != name and other.startswith(name)]
