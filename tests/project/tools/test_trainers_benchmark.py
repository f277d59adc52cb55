"""What trainers.py concludes from its measurements, and its tables; end to end it runs in another file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common
from benchmarks.training import trainers
from benchmarks.training import trainers_fit as fit
from benchmarks.training import trainers_report as report

ROOT = Path(__file__).resolve().parents[3]


def run(way: str, sequence: int, peak: float | None, reserved: float | None, *losses: str) -> dict[str, Any]:
    memory = {"peak_gib": peak, "peak_reserved_gib": reserved}
    return {"way": way, "sequence": sequence, "seconds": [1.0, 2.0], "memory": memory, "losses": list(losses)}


RUNS = [
    run("upstream", 512, 5.0, 5.5, "2", "4"),
    run("upstream", 4096, 20.0, 22.0, "1"),
    run("shim", 512, 5.0, 5.5, "2", "4.4"),
    run("shim", 512, 4.0, 6.5, "2", "4.2"),
]


class Unhurried:
    """A run that has time for everything; what needs more than 5.75 GiB does not fit."""

    def __init__(self, result: dict[str, Any], ways: list[str], confirm: list[str]) -> None:
        self.result, self.asked = result, []
        self.arguments = type("Arguments", (), {"ways": ways, "confirm": confirm})

    def train(self, way: str, sequence: int, name: str, **more: Any) -> dict[str, Any] | None:
        self.asked.append((way, sequence, more["budget"]))
        if more["budget"] < 5.75:
            self.result["out"][name] = "OutOfMemoryError: no"
            return None
        return {"memory": {"peak_gib": 5.0, "peak_reserved_gib": 5.7}}


def test_a_result_of_several_rounds_is_its_largest_peak() -> None:
    assert fit.peaks({"runs": RUNS}, "shim") == {512: (5.0, 6.5)}
    assert fit.peaks({"runs": [run("shim", 512, None, None)]}, "shim") == {}


def test_tensors_that_are_larger_do_not_fit_and_reserved_memory_that_is_smaller_does() -> None:
    peaks = {512: (5.0, 5.5), 1024: (6.0, 7.5), 4096: (8.0, 9.0)}
    assert fit.candidates(peaks, 12) == [(4096, True), (1024, True), (512, True)]
    assert fit.candidates(peaks, 7) == [(1024, False), (512, True)]
    assert fit.candidates(peaks, 4) == []


@pytest.mark.parametrize(
    ("budget", "asked", "found"),
    [
        (22.0, [("shim", 512, 22.0)], {"upstream": (4096, "peaks"), "shim": (512, "ballast")}),
        (6.0, [("shim", 512, 6.0)], {"upstream": (512, "peaks"), "shim": (512, "ballast")}),
        (
            5.2,
            [("upstream", 512, 5.2), ("shim", 512, 5.2)],
            {"upstream": (None, "ballast"), "shim": (None, "ballast")},
        ),
        (4.0, [], {"upstream": (None, "peaks"), "shim": (None, "peaks")}),
    ],
)
def test_a_ballast_tensor_decides_what_peaks_do_not(
    budget: float, asked: list[tuple[str, int, float]], found: dict[str, tuple[int | None, str]]
) -> None:
    made: Any = Unhurried({"runs": RUNS, "out": {}}, ["upstream", "shim", "streamed"], ["shim"])
    fits = trainers.fitting(made, budget)
    assert made.asked == asked
    assert {way: (one["longest"], one["by"]) for way, one in fits.items()} == found


def test_losses_are_compared_with_those_of_the_same_trainer() -> None:
    result = {"runs": [*RUNS, run("trl", 512, 5.0, 5.5, "3", "4"), run("trl-shim", 512, 5.0, 5.5, "2", "4")]}
    result["problems"] = []
    trainers.compare(result)
    assert result["differences"] == pytest.approx(
        {"shim, 512 tokens": 0.1, "trl, 512 tokens": 0.5, "trl-shim, 512 tokens": 1 / 3}
    )
    assert result["problems"] == ["trl-shim, 512 tokens: the first loss is 2, without the shim 3"]


def test_the_table_has_plans_and_what_fits() -> None:
    fits = {"shim": {"longest": 512, "by": "ballast"}, "upstream": {"longest": None, "by": "peaks"}}
    result = {"runs": [one | {"planned_gib": 4.9} for one in RUNS], "out": {}, "fits": {"6": fits}}
    text = report.table(result)
    assert "| upstream | 512 | 341 (256 to 512) | 5.00 | 4.90 | 5.50 | - |" in text
    assert "| upstream | does not fit |" in text
    assert "| the shim, same placement | **512** |" in text


def test_the_table_has_what_did_not_end() -> None:
    out = {
        "unsloth-compiled, 8192 tokens": "no end after 390 s",
        "unsloth-compiled, 16384 tokens": "the process with its base has ended",
        "shim, 512 tokens in 6 GiB": "OutOfMemoryError: no",
        "load shim, gpu": "ImportError: no",
    }
    text = report.table({"runs": [], "out": out, "fits": {}})
    assert "| unsloth under TRL, compiled | 8,192 | no end after 390 s | - | - | - |" in text
    assert "| unsloth under TRL, compiled | 16,384 | - | - | - | - |" in text


def test_a_result_names_the_libraries_that_trained(tmp_path: Path) -> None:
    given = {"minutes": 1.0, "shape": "tiny", "rank": 4, "unsloth": tmp_path}
    arguments = type("Arguments", (), given | {"ways": ["unsloth"], "sequences": [16], "out": None})
    result: dict[str, Any] = {"loads": {}}

    def start(shim: bool, **more: str) -> Any:
        def answer(order: common.Order, timeout: float) -> common.Data:
            versions = {"transformers": "5.24.0" if shim else "5.17.0", "trl": "1.15.0"}
            machine = {"device": "CPU", "versions": {"transformers": versions["transformers"]}}
            return {"error": None, "machine": machine, "build_s": 1.0, "versions": versions}

        answer.close = lambda: None  # type: ignore[attr-defined]
        return answer

    trainers.Run(arguments, result, tmp_path, start).build()
    assert result["machine"]["versions"] == {"transformers": "5.17.0"}


def test_a_result_gets_its_plans_without_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "write_config", lambda shape, folder: None)
    monkeypatch.setattr(
        fit, "planned_gib", lambda _folder, _where, sequence, *switches, rank: sequence / 512 + sum(switches)
    )
    monkeypatch.setattr(trainers.device, "machine", lambda: {"versions": {"torch": "1"}})
    file = tmp_path / "result.json"
    runs = [*RUNS, run("chunked", 512, 3.0, 3.5), run("windows", 512, 3.0, 3.5), run("trl", 512, 3.0, 3.5)]
    file.write_text(json.dumps({"shape": "tiny", "settings": {"rank": 4}, "runs": runs, "out": {}}))
    trainers.planned(file)
    found = json.loads(file.read_text())
    assert [one.get("planned_gib") for one in found["runs"]] == [1.0, 8.0, 1.0, 1.0, 2.0, 3.0, None]
    assert found["planned_with"] == {"torch": "1"}


def test_unsloth_is_told_whether_it_compiles_and_other_processes_are_told_nothing(tmp_path: Path) -> None:
    arguments = type("Arguments", (), {"minutes": 1.0, "shape": "tiny", "rank": 4, "unsloth": tmp_path})
    made: Any = None
    run = trainers.Run(arguments, {}, tmp_path, made)
    told = {name: run.environment(way[:2], str(tmp_path)) for name, way in trainers.WAYS.items()}
    assert {name: of["UNSLOTH_COMPILE_DISABLE"] for name, of in told.items() if of} == {
        "unsloth": "1",
        "unsloth-compiled": "0",
    }
    assert told["unsloth"]["PYTHONPATH"] == str(tmp_path)
    assert told["unsloth"]["UNSLOTH_COMPILE_LOCATION"] != told["unsloth-compiled"]["UNSLOTH_COMPILE_LOCATION"]


@pytest.mark.full
@pytest.mark.parametrize("more", [{"gradient_accumulation_steps": 2}, {"per_device_train_batch_size": 2}])
def test_a_step_of_more_than_one_sequence_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, int]
) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    monkeypatch.setattr(trainers, "_loaded", None)
    given = trainers.settings
    monkeypatch.setattr(trainers, "settings", lambda *told: given(*told) | more)
    order = {"shape": "tiny", "folder": str(tmp_path), "rank": 4, "where": "gpu", "way": "upstream", "shim": True}
    trainers.build(order)
    trainers.load(order)
    with pytest.raises(ValueError, match="a step has 2 sequences"):
        trainers.train({**order, "steps": 3, "sequence": 16})


class Cut:
    """A worker whose run took two steps and then did not end, or, in the run after it, took none."""

    def __init__(self) -> None:
        self.process = self
        self.calls = 0

    def poll(self) -> None:
        """It is alive."""

    def __call__(self, order: common.Order, timeout: float) -> common.Data:
        self.calls += 1
        if self.calls == 1:
            trainers.ended_steps(Path(order["folder"])).write_text(json.dumps([301.5, 2.0]))
        return {"error": f"no end after {timeout:.0f} s"}


def test_what_did_not_end_is_written_at_once_with_the_steps_that_did(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = type("Arguments", (), {"minutes": 5.0, "shape": "tiny", "rank": 4, "budget": [], "out": out})
    result: dict[str, Any] = {"runs": [], "out": {}, "cut_off": {}, "problems": [], "not_run": []}
    cut: Any = Cut()
    run = trainers.Run(arguments, result, tmp_path, cut)
    run.workers = {trainers.WAYS["unsloth-compiled"][:2]: cut}
    for sequence in (8192, 16384):
        assert run.train("unsloth-compiled", sequence, f"unsloth-compiled, {sequence} tokens", steps=5) is None
    found = json.loads(out.read_text())
    assert found["cut_off"] == {"unsloth-compiled, 8192 tokens": [301.5, 2.0], "unsloth-compiled, 16384 tokens": []}
    assert found["out"]["unsloth-compiled, 8192 tokens"] == "no end after 390 s"
    assert [problem.partition(":")[0] for problem in found["problems"]] == list(found["cut_off"])
