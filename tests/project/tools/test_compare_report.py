"""Tables and pictures of the benchmarks that compare_report.py reports, on runs of the tiny shape."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common
from benchmarks.adapters import adapter_load as adapter_load_script
from benchmarks.decoding import depth_report, multiprocessors_fit
from benchmarks.decoding import measure as graph_decoding_measure
from benchmarks.decoding import report as graph_decoding_report
from benchmarks.reporting import compare_report as report
from benchmarks.reporting import questions
from benchmarks.shim import idle_shim as idle_shim_script
from benchmarks.small_card import alternatives as alternatives_script
from benchmarks.small_card.models import Clock

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = Path(__file__).parent / "samples" / "compare"

BENCHMARKS = tuple(report.TABLES)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results with one run of each, and a folder for pictures."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(questions, "ROOT", tmp_path)
    shutil.copytree(SAMPLES, tmp_path / "results" / "2026-11-21-cpu")
    return tmp_path / "results" / "2026-11-21-cpu"


def tables(text: str) -> list[list[list[str]]]:
    return [rows(part) for part in text.split("\n\n") if part.startswith("|")]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_section_without_results_says_how_to_make_one(
    benchmark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    text = report.section(benchmark)
    assert f"python {common.script(benchmark)} --shape E2B --out" in text
    assert len(text.splitlines()) == 1
    assert {len(questions.section(question).splitlines()) for question in questions.QUESTIONS} == {1}
    assert [file.stem for file in questions.pictures()] == [questions.CARDS.page]


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_section_is_a_table_with_the_command_and_the_stack(benchmark: str) -> None:
    text = report.section(benchmark)
    assert f"`python {common.script(benchmark)} --shape tiny" in text
    assert "transformers 5.23.0" in text
    assert len(tables(text)) >= 1
    for titles, _, *lines in tables(text):
        assert len(lines) >= 1
        assert {len(line) for line in lines} == {len(titles)}


def test_the_summary_has_a_row_for_each_shape_on_each_stack(results: Path) -> None:
    run = json.loads((results / "adapter_load-tiny.json").read_text(encoding="utf-8"))
    run["machine"]["versions"]["transformers"] = "5.6.2"
    towers = run["summary"]["towers"]
    towers["ours"]["of_base_and_adapter"], towers["upstream"]["error"] = 1.0, "KeyError: 13"
    (results / "adapter_load-tiny-thread.json").write_text(json.dumps(run), encoding="utf-8")
    titles, _, *lines = rows(report.summary())
    assert {len(line) for line in lines} == {len(titles)}
    newest, thread = lines
    assert (newest[0], thread[0]) == ("tiny on a CPU, 5.23.0", "tiny on a CPU, 5.6.2")
    missed = "" if towers["goal"]["reached"] else f"; the goal of {towers['goal']['ratio']} is missed"
    assert newest[1] == thread[1] == report.ratio(towers["ratio"]) + missed
    assert thread[2:4] == ["1.000", "KeyError: 13"]
    assert "noise" in newest[4], newest
    assert thread[4:] == ["-", "-"], "not run there"


def test_a_summary_of_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.summary() == "No result is committed yet."


@pytest.mark.usefixtures("results")
def test_a_crash_is_told_in_its_own_words() -> None:
    lines = rows(report.section("alternatives"))
    (crash,) = [line for line in lines if line[0] == "table and towers on the CPU, adapter" and line[1] == "**off**"]
    assert crash[2].startswith("no: ValueError: Target module Gemma4ClippableLinear(")


def test_towers_that_came_back_are_no_plain_yes() -> None:
    entry = {"prepare": {"on": {"towers": {"meta": 3}}}, "answer": {"on": {"towers": {"cuda": 3}}}}
    assert report.works(entry) == "yes, but towers came back to the GPU"


@pytest.mark.usefixtures("results")
def test_every_benchmark_with_results_has_a_page_and_a_question_takes_a_table_of_its_own() -> None:
    assert {question.benchmark for question in questions.QUESTIONS} == set(BENCHMARKS) - {"multiprocessors"}
    for question in questions.QUESTIONS:
        same = [other for other in questions.QUESTIONS if other.benchmark == question.benchmark]
        for _, run, (titles, _) in questions.runs(question):
            assert set(question.bars) & {*titles} or question.page in ("same_bits", "short_answers"), question.page
            held = questions.tables(report.TABLES[question.benchmark](run))
            assert all(sum(other.column in titles for titles, _ in held) <= 1 for other in same), question.page


def test_a_page_asks_what_its_picture_shows() -> None:
    for question in (*questions.QUESTIONS, questions.CARDS):
        text = (ROOT / "docs" / "benchmarks" / f"{question.page}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {question.asks}\n")
        measured = question is questions.CARDS or bool(questions.runs(question))
        assert len(questions.tables(text)) == measured
        assert (f"]({question.page}.svg)" in text) == (measured and bool(question.bars))


def test_a_page_has_the_rows_of_all_runs_with_a_link_to_each(results: Path) -> None:
    question = next(question for question in questions.QUESTIONS if question.page == "trainers")
    _, before = questions.merged(question)
    assert {row[0] for row in before} == {f"[tiny on a CPU, 5.23.0](../../results/{results.name}/trainers-tiny.json)"}
    run = report.read(results / "trainers-tiny.json")
    folder = results.parent / "2026-11-22-cpu"
    folder.mkdir()
    (folder / "trainers-tiny.json").write_text(json.dumps(run | {"note": "beside a compiler"}), encoding="utf-8")
    _, after = questions.merged(question)
    assert len(after) == 2 * len(before)
    lines = questions.section(question).splitlines()
    (said,) = [line for line in lines if line.startswith("- ") and "/2026-11-22-cpu/" in line]
    assert f"`{run['command']}`. beside a compiler." in said


def test_a_picture_shows_the_data_of_the_committed_runs(results: Path) -> None:
    before = {file.stem: text for file, text in questions.pictures().items()}
    file = results / "alternatives-tiny.json"
    run = json.loads(file.read_text(encoding="utf-8"))
    choice = next(choice for choice in run["choices"].values() if "share" in choice)
    choice["share"] = 0.123
    file.write_text(json.dumps(run), encoding="utf-8")
    after = {file.stem: text for file, text in questions.pictures().items()}
    assert [name for name in before if before[name] != after[name]] == ["alternatives"]
    assert ">0.12<" in after["alternatives"]


def test_depth_has_a_table_of_speed_of_first_calls_and_of_kernels(results: Path) -> None:
    speed, firsts, kernels = tables(report.section("depth"))
    assert speed[0] == ["tok/s", "tokens of context", *depth_report.TITLES.values()]
    assert [line[:2] for line in speed[2:]] == [
        [what, context]
        for what in ("everything on the GPU", "everything on the GPU, LoRA")
        for context in ("64", "128")
    ]
    assert [line[1] for line in firsts[2:5]] == ["the release before", "PyTorch's bits", "own kernels"]
    assert kernels[0][-2:] == ["others", "number of kernels"]
    run = json.loads((results / "depth-tiny.json").read_text(encoding="utf-8"))
    assert depth_report.problems(run) == []
    run["machine"]["device"] = "NVIDIA H100"
    assert "gpu at 64, own: not fused: no reason given" in depth_report.problems(run)
    run["cases"] = {"gpu": {"contexts": {"64": {"warm": {}, "captured": 2}}}}
    (captured,) = depth_report.problems(run)
    assert captured.startswith("gpu at 64: 2 captures")


@pytest.mark.parametrize(
    ("cell", "value", "interval"),
    [
        ("**0.28** (0.23 to 0.40, 3 rounds)", 0.28, (0.23, 0.40)),
        ("2,048", 2048.0, None),
        ("**does not fit**", None, None),
        ("0.93 s -> 0.16 s", 0.16, None),
        ("7.32 / 7.35", 7.35, None),
        ("-1.22 %", -1.22, None),
        ("no: ValueError: 3", None, None),
        ("-", None, None),
    ],
)
def test_a_bar_is_as_long_as_its_cell_says(
    cell: str, value: float | None, interval: tuple[float, float] | None
) -> None:
    assert (questions._value(cell), questions._interval(cell)) == (value, interval)


@pytest.mark.usefixtures("results")
def test_decoding_has_a_table_of_speed_bits_answers_compiling_and_endurance(results: Path) -> None:
    speed, bits, short, compiled, endurance = tables(report.section("graph_decoding"))
    assert [line[0] for line in speed[2:]] == ["everything on the GPU", "everything on the GPU, LoRA"]
    assert bits[0][-1] == "adapter switched"
    assert bits[2][-1] == "-", "nothing to switch"
    assert set(bits[3][1:]) == {"0.0"}
    assert [line[0] for line in compiled[2:]] == ["compiled by upstream", "decode_fast, eager", "decode_fast"]
    assert short[2][1].count("->") == len(endurance[2:]) == 1


def test_other_bits_and_growing_memory_are_problems(results: Path) -> None:
    run = json.loads((results / "graph_decoding-tiny.json").read_text(encoding="utf-8"))
    assert graph_decoding_report.problems(run) == []
    adapted = run["cases"]["gpu+lora"]
    adapted["bits"]["beams"]["logits_differ_by"] = 0.5
    adapted["endurance"]["summary"] |= {"wrong": 2, "resident_gib": [1.0, 1.1]}
    bits, wrong, grown = graph_decoding_report.problems(run)
    assert bits == "gpu+lora, beams: **0.5**"
    assert "2 of" in wrong
    assert "[1.0, 1.1] GiB are held" in grown


def test_nothing_replayed_is_a_problem_where_there_is_a_gpu(results: Path) -> None:
    run = json.loads((results / "graph_decoding-tiny.json").read_text(encoding="utf-8"))
    run["machine"]["device"] = "a GPU"
    for entry in (*run["cases"].values(), run["compiled"]["replayed"]):
        entry["speed"]["summary"]["steps"]["replayed"] = [98, 98]
    assert graph_decoding_report.problems(run) == []
    run["cases"]["gpu"]["speed"]["summary"] |= {"steps": {"replayed": [98, 0]}, "reasons": ["it is an 8-bit model"]}
    assert graph_decoding_report.problems(run) == ["gpu: nothing was replayed: it is an 8-bit model"]


def test_every_kind_of_call_comes_again_and_again() -> None:
    calls = graph_decoding_measure.schedule([None, "default"], 10_000, 7)
    kinds = [(call["batch"], call["prompt"], call["adapter"]) for call in calls]
    period = len(set(kinds))
    assert period == 12
    assert len(calls) >= 4 * period
    for first in range(0, len(calls) - period, period):
        assert len(set(kinds[first : first + period])) == period
    assert sum(call["batch"] * call["tokens"] for call in calls) >= 10_000
    assert [call["number"] for call in calls if call["check"]] == list(range(0, len(calls), 7))


def test_a_shim_that_leaves_more_on_the_card_is_a_problem() -> None:
    ours = {"error": None, "towers_on": ["meta"], "of_base_and_adapter": 1.02, "adapter_on_meta": 0}
    (problem,) = adapter_load_script.problems([{"placement": "towers", "ours": ours}])
    assert "1.020 of base and adapter" in problem
    ours |= {"of_base_and_adapter": 1.0, "towers_on": ["cuda"]}
    (problem,) = adapter_load_script.problems([{"placement": "towers", "ours": ours}])
    assert "towers are on" in problem


def test_rounds_take_turns_and_the_control_comes_last() -> None:
    order = adapter_load_script.schedule({"a": 3, "b": 2, "c": 1})
    assert order == ["a", "a", "b", "c", "a", "b"]


def _rounds(shim: float, drift: tuple[float, ...]) -> list[dict[str, Any]]:
    found = []
    for number, factor in enumerate(drift):
        times = {"A1": 10 * shim, "B1": 10.0, "B2": 10.02, "A2": 10.01 * shim}
        wobble = 1 + 0.001 * (-1) ** number
        found.append(
            {
                name: {"token_ms": [factor * wobble * value], "prefill_ms": [factor * value]}
                for name, value in times.items()
            }
        )
    return found


def test_a_cost_within_the_noise_is_indistinguishable_from_zero_and_another_is_not() -> None:
    drift = (1.0, 1.5, 0.8, 2.0, 1.1, 1.2)
    assert idle_shim_script.costs(_rounds(1.0, drift))["token"]["indistinguishable_from_zero"]
    dear = idle_shim_script.costs(_rounds(1.05, drift))["token"]
    assert not dear["indistinguishable_from_zero"]
    assert dear["overhead"] == pytest.approx(0.05, abs=0.002), "whatever the machine's drift"


def test_of_too_few_rounds_nothing_is_said(results: Path) -> None:
    file = results / "idle_shim-tiny.json"
    run = json.loads(file.read_text(encoding="utf-8"))
    for entry in run["models"].values():
        entry["costs"] = idle_shim_script.costs(entry["rounds"][: idle_shim_script.ENOUGH - 1])
    file.write_text(json.dumps(run), encoding="utf-8")
    assert [cost["indistinguishable_from_zero"] for cost in entry["costs"].values()] == [None, None]
    assert "too few rounds" in report.section("idle_shim")
    assert "calls; too few rounds for the time" in report.summary()


def test_what_a_reader_must_know_stands_beside_the_run(results: Path) -> None:
    assert common.header(Path("a.py"), common, "tiny", [], "beside a compiler")["note"] == "beside a compiler"
    file = results / "alternatives-tiny.json"
    run = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(run | {"note": "beside a compiler"}), encoding="utf-8")
    assert report.section("alternatives").endswith("\nbeside a compiler")


def test_functions_are_named_by_what_is_imported_not_by_where_it_lies() -> None:
    python, _ = idle_shim_script.calls(lambda: json.dumps({}, indent=1))
    assert "json/__init__.py dumps" in python
    python, _ = idle_shim_script.calls(lambda: common.interval([1.0, 2.0], draws=50))
    assert any(name.endswith("common.py interval") and not name.startswith("/") for name in python)


def test_calls_are_counted_exactly() -> None:
    def inner() -> int:
        return len([1])

    python, c = idle_shim_script.calls(lambda: [inner() for _ in range(3)])
    assert sum(number for name, number in python.items() if name.endswith(" inner")) == 3
    assert c["C len"] == 3


def test_instructions_are_counted_exactly() -> None:
    def times(number: int) -> int:
        return idle_shim_script.instructions(lambda: [None for _ in range(number)])

    assert times(20) - times(10) == times(30) - times(20) > 10


def test_a_machine_that_gets_slower_costs_both_sides_the_same() -> None:
    rounds = [
        {
            name: {"token_ms": [10 * (1 + 0.1 * number + 0.02 * turn)], "prefill_ms": [10.0]}
            for turn, name in enumerate(idle_shim_script.TURNS)
        }
        for number in range(6)
    ]
    assert idle_shim_script.costs(rounds)["token"]["overhead"] == pytest.approx(0, abs=0.001)


def test_a_choice_brings_what_it_is_compared_with() -> None:
    assert alternatives_script.selected(["ours-towers"]) == ["gpu", "gpu-linear", "gpu-towers", "ours-towers"]
    for name, choice in alternatives_script.CHOICES.items():
        order = list(alternatives_script.CHOICES)
        assert choice.reference is None or order.index(choice.reference) < order.index(name)


def test_spreads_are_medians_with_an_interval_that_repeats() -> None:
    spread = common.spread([1.0, 1.1, 0.9, 1.0, 1.05])
    assert spread == common.spread([1.0, 1.1, 0.9, 1.0, 1.05])
    low, high = spread["interval_95"]
    assert 0.9 <= low <= spread["median"] == 1.0 <= high <= 1.1


def test_an_older_run_shows_what_no_newer_one_has(results: Path) -> None:
    newer = report.read(results / "graph_decoding-tiny.json")
    finished = {name: case for name, case in newer["cases"].items() if report.shown(case, "speed")}
    name, case = next(iter(finished.items()))
    older = newer | {"cases": {name: case, "streamed": case | {"what": "only here"}}}
    folder = results.parent / "2026-11-20-cpu"
    folder.mkdir()
    (folder / "graph_decoding-tiny.json").write_text(json.dumps(older), encoding="utf-8")
    ((file, kept),) = report.earlier("graph_decoding").items()
    assert file.parent == folder
    assert set(kept["cases"]) == {"streamed"}
    assert report.section("graph_decoding").count("only here") >= 1
    (folder / "graph_decoding-tiny.json").write_text(json.dumps(newer), encoding="utf-8")
    assert report.earlier("graph_decoding") == {}


def test_every_run_of_a_trainer_is_shown_and_lacks_what_no_other_has(results: Path) -> None:
    run = report.read(results / "trainers-tiny.json")
    had = f"{run['runs'][0]['way']}, {run['runs'][0]['sequence']} tokens"
    folder = results.parent / "2026-11-22-cpu"
    folder.mkdir()
    other = run | {"runs": [], "not_run": [had, "streamed, 77 tokens"], "note": "another run"}
    (folder / "trainers-short-tiny.json").write_text(json.dumps(other), encoding="utf-8")
    text = report.section("trainers")
    assert text.count("`python benchmarks/training/trainers.py --shape tiny") == 2
    assert "Not run, for lack of time: streamed, 77 tokens." in text


def test_where_nothing_was_loaded_in_turns_the_first_loads_are_compared(results: Path) -> None:
    file = results / "adapter_load-tiny.json"
    run = json.loads(file.read_text(encoding="utf-8"))
    entry = run["summary"]["towers"] | {"ratio": None}
    entry["ours"] |= {"first_in_process_s": [1.0]}
    entry["upstream"] |= {"first_in_process_s": [4.0]}
    file.write_text(json.dumps(run | {"summary": {"towers": entry}}), encoding="utf-8")
    assert "| **0.25** (first loads of both processes) |" in report.section("adapter_load")
    assert "| **0.25** (first loads of both processes)" in report.summary()
    entry["upstream"]["first_in_process_s"] = []
    assert report.load_ratio(entry | {"upstream": {"error": "RuntimeError"}}) is None


def test_all_results_are_listed_by_day_and_device(results: Path) -> None:
    listed = rows(report.measured_when())[2:]
    assert {row[1] for row in listed} == {"CPU"}
    for file in results.glob("*.json"):
        assert any(f"](../results/{results.name}/{file.name})" in row[3] for row in listed), file


def test_a_peer_that_another_run_has_is_not_missing(results: Path) -> None:
    file = results / "peers-tiny.json"
    run = json.loads(file.read_text(encoding="utf-8"))
    name = next(name for name, peer in run["peers"].items() if "summary" in peer["speed"])
    other = run | {"peers": {name: run["peers"][name] | {"speed": {"error": "no time"}}}}
    other["not_run"] = [f"{name} speed (no time)", "another (no time)"]
    (results / "peers-tiny-2.json").write_text(json.dumps(other), encoding="utf-8")
    text = report.section("peers")
    assert "Not run: another (no time)." in text
    assert "no: no time" not in text
    for line in text.splitlines():
        assert not line.startswith("- Not measured") or text.count(line) == 1


def test_steps_on_some_multiprocessors_beside_the_model() -> None:
    file = multiprocessors_fit.FIT.with_name("multiprocessors-E2B.json")
    measured, modelled = tables(multiprocessors_fit.table(report.read(file)))
    assert [row[1] for row in measured[2:]] == ["132", "132", "132", "132", "46", "34", "28", "28"]
    assert modelled[0][1:] == list(multiprocessors_fit.SHOWN)
    checked = [row for row in rows(multiprocessors_fit.section()) if row[-1] == "**checked**"]
    assert {row[0] for row in checked} == {"12B"}


def test_the_kernels_of_a_peer_by_what_they_do(results: Path) -> None:
    file = results / "peers-tiny.json"
    run = json.loads(file.read_text(encoding="utf-8"))
    name, entry = next((name, entry) for name, entry in run["peers"].items() if "summary" in entry["speed"])
    longest = [
        {"name": "void gemm_4bit_simt<bf16>", "ms": 1.5, "count": 100.0},
        {"name": "nvjet_sm90_tst", "ms": 0.25, "count": 2.0},
        {"name": "fused_4", "ms": 0.125, "count": 9.0},
        {"name": "something", "ms": 0.0625, "count": 1.0},
    ]
    profile = {"tokens": 10, "ms_a_token": 2.0, "kernels_a_token": 120.0, "longest": longest}
    file.write_text(json.dumps(run | {"peers": {name: entry | {"profile": profile}}}), encoding="utf-8")
    text = report.section("peers")
    assert "75 % of the kernels' time is `gemm_4bit_simt`, 100 launches a token, 15.0 \N{MICRO SIGN}s each." in text
    [[titles, _, row]] = [table for table in tables(text) if "ms a token" in table[0]]
    found = dict(zip(titles, row, strict=True))
    assert float(found["in all"]) == pytest.approx(1000 / entry["speed"]["summary"]["tok_s"]["median"], abs=0.01)
    assert found["kernels"] == "2.00"
    assert found["4-bit and 8-bit products"] == "1.50"
    assert found["others"] == "0.12", "what is in no kind, and what is not listed"
    assert found["number of kernels"] == "120"


def test_a_clock_calls_what_it_was_told_to_when_a_token_comes() -> None:
    called: list[int] = []
    clock = Clock(at={2: lambda: called.append(len(clock.times))})
    for _ in range(4):
        clock.put(None)
    assert called == [2]
    assert len(clock.times) == 4


def test_a_result_that_no_page_and_no_code_cites_is_not_kept() -> None:
    """Superseded ones are in git."""
    pages = [file for file in (ROOT / "docs").rglob("*.md") if file.name != "EVIDENCE.md"]  # which lists all
    code = [file for folder in ("benchmarks", "gemma4_compat", "tools") for file in (ROOT / folder).rglob("*.py")]
    linked, named = ("".join(file.read_text(encoding="utf-8") for file in files) for files in (pages, code))
    folder = ROOT / "benchmarks" / "results"
    kept = [
        file.relative_to(folder).as_posix() for file in folder.rglob("*.*") if not file.match("*-import_time.json")
    ]
    assert [file for file in kept if file not in linked and file.partition("/")[0] not in named] == []
