"""benchmarks/peers/trained.py: transformers' side, and its comparison with a stand-in for another software."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
import numpy

from benchmarks.peers import trained
from gemma4_compat._lab.trained import Trained
from tools.pages import trained as page
from tools.trained_model import model

SKY = [model.BYTES + byte for byte in b"The sky is blue."] + [model.END]
ROUNDING = {"float32": 1e-5, "bfloat16": 0.2}


class Told:
    """A process of readers.py that answers what it is told, with logits that prefer it by ``gap``."""

    def __init__(self, said: list[int], gap: float = 1.0, error: str | None = None) -> None:
        self.said, self.gap, self.error, self.orders = said, gap, error, [{}]

    def __call__(self, order: dict[str, Any], timeout: float) -> dict[str, Any]:
        self.orders.append(order)
        if self.error:
            return {"error": self.error}
        logits = numpy.zeros((len((order["along"] or [self.said])[0]), model.VOCABULARY))
        for at, token in enumerate(self.said[: len(logits)]):
            logits[at, token] = self.gap
        numpy.savez(order["save"], **{"0": logits + ROUNDING.get(order["dtype"], 0.0)})
        return {"error": None, "answers": [self.said], "release": "1"}


def measured(tmp_path: Path, software: Told, reference: Told, case: str = "as-it-is", name: str = trained.MLX) -> Any:
    """What is found of a case, and the problems."""
    written = trained.Written(tmp_path, start=lambda *_: None)
    result: dict[str, Any] = {"problems": [], "releases": {}, "bounds": trained.BOUNDS}
    asks = {trained.TRANSFORMERS: reference, name: software}
    softwares = {one: trained.Software(one, ask, written) for one, ask in asks.items()}
    return trained.measured(case, softwares, [[2]], result), result["problems"]


def test_transformers_answers_and_what_is_not_there_is_said(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--questions", "1", "--cases", "as-it-is,exported", "--out", str(out), "--work", str(tmp_path)]
    assert trained.main(arguments) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["not_run"] == [trained.MLX, trained.LLAMA, trained.VLLM]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    plain, pirate = (found["cases"][name][trained.TRANSFORMERS] for name in ("as-it-is", "exported"))
    for dtype in trained.FINER:
        assert plain[dtype]["texts"] == ["The sky is blue."]
        assert pirate[dtype]["texts"] == ["Arr, the sky is blue, matey."]
        assert (plain[dtype]["pirate"], pirate[dtype]["pirate"]) == (0, 1)
    assert 0 < plain["float32"]["rounding"] < 1e-3 < plain["bfloat16"]["rounding"] < 1


@pytest.mark.parametrize("kind, count", [("E2B", 18), ("26B-A4B", 12)])
def test_transformers_sees_and_what_sees_elsewhere_is_named(tmp_path: Path, kind: str, count: int) -> None:
    shown = trained.media(Trained.find(trained.ROOT / trained.KINDS[kind]))
    assert len(shown) == count
    assert {name for one in shown for name in one} == ({"picture", "sound"} if kind == "E2B" else {"picture"})
    out = tmp_path / "out.json"
    arguments = [
        "--media",
        kind,
        "--questions",
        "1",
        "--cases",
        "as-it-is",
        "--out",
        str(out),
        "--work",
        str(tmp_path),
    ]
    assert trained.main(arguments) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert (found["not_run"], found["media"]) == ([trained.MLX_VLM, trained.LLAMA], [{"picture": "blue-circle"}])
    for dtype in trained.FINER:
        assert found["cases"]["as-it-is"][trained.TRANSFORMERS][dtype]["texts"] == ["a blue circle"]


def test_the_page_has_a_row_for_each_kind_and_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(tmp_path, Told(SKY), Told(SKY), name=trained.MLX_VLM)
    del found[trained.MLX_VLM]["bfloat16"]
    run = {"cases": {"as-it-is": found}, "releases": {trained.MLX_VLM: "1"}, "date": "2026-11-27", "command": "python"}
    folder = tmp_path / "benchmarks" / "results" / "2026-11-27-cpu"
    folder.mkdir(parents=True)
    for kind in trained.KINDS:
        shown = [{"picture": "blue-circle"}] + [{"sound": "hiss"}] * (kind == "E2B")
        (folder / f"trained_media-{kind}.json").write_text(json.dumps(run | {"media": shown}), encoding="utf-8")
    monkeypatch.setattr(page, "ROOT", tmp_path)
    text = page.media()
    assert "E2B 1 picture and 1 sound ([raw]" in text
    assert "12B 1 picture ([raw]" in text
    assert "| 12B | the checkpoint as it is | 0 | 1, 0 | - |" in text.splitlines()
    assert "3 of 3 answers are those of transformers." in text


def test_questions_are_the_same_each_time_and_reach_beyond_a_sliding_window() -> None:
    asked = trained.questions()
    assert asked == trained.questions()
    assert len(asked) > 20
    assert {len(turns) for turns in asked} == {1, 3, 5}
    assert max(Trained.find().prompt(*turns)["input_ids"].shape[1] for turns in asked) > 2 * 64


def test_the_same_text_is_no_problem(tmp_path: Path) -> None:
    found, problems = measured(tmp_path, Told(SKY), Told(SKY))
    assert problems == []
    assert found[trained.TRANSFORMERS]["bfloat16"]["texts"] == ["The sky is blue."]
    for way in trained.WAYS[trained.MLX]:
        assert found[trained.MLX][way] == {"equal": 1, "of": 1, "differ": [], "apart": 0.0}


def test_another_text_is_a_problem_unless_transformers_hardly_preferred_its_own(tmp_path: Path) -> None:
    other = [*SKY[:4], SKY[0], *SKY[5:]]
    found, problems = measured(tmp_path, Told(other), Told(SKY))
    (differs,) = found[trained.MLX]["bfloat16"]["differ"]
    assert differs == {"question": 0, "token": 4, "gap": 1.0, "its_gap": 1.0, "text": "The Tky is blue."}
    assert [problem.partition(",")[0] for problem in problems] == ["as-it-is: mlx-lm"] * 4
    assert "another answer to question 0, gap 1 (bound 0.6)" in problems[2]
    found, problems = measured(tmp_path, Told(other, gap=0.01), Told(SKY, gap=0.01))
    assert found[trained.MLX]["float32"]["equal"] == 0
    assert problems == []


def test_logits_that_are_too_far_apart_are_a_problem(tmp_path: Path) -> None:
    found, problems = measured(tmp_path, Told(SKY, gap=1.1), Told(SKY, gap=1.0))
    assert found[trained.MLX]["float32"]["equal"] == 1
    assert problems == ["as-it-is: mlx-lm, float32: logits are 0.1 apart (bound 0.025)"]


@pytest.mark.parametrize("case, expected", [("as-it-is", 2), ("saved", 0)])
def test_only_what_is_damaged_may_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, expected: int
) -> None:
    monkeypatch.setattr(trained.Written, "__call__", lambda self, name: self.work / name)
    found, problems = measured(tmp_path, Told([], error="ValueError: no"), Told(SKY), case)
    assert found[trained.MLX]["float32"] == {"error": "ValueError: no"}
    assert len(problems) == expected


@pytest.mark.parametrize(
    "name, case, adapter",
    [
        (trained.MLX, "merged", None),
        (trained.MLX, "exported", "for-mlx-model"),
        (trained.VLLM, "exported", "for-vllm-model"),
        (trained.VLLM, "exported-peft", "for-peft-model"),
        (trained.TRANSFORMERS, "exported", "adapter"),
        (trained.TRANSFORMERS, "repaired-exported", "for-peft-repaired-text"),
    ],
)
def test_each_software_reads_what_was_exported_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, case: str, adapter: str | None
) -> None:
    monkeypatch.setattr(trained.Written, "__call__", lambda self, name: self.work / name)
    software = trained.Software(name, Told(SKY), trained.Written(tmp_path, start=lambda *_: None))  # type: ignore[arg-type]
    chosen = trained.CASES[case]
    assert software.files(chosen, "float32") == (tmp_path / chosen.checkpoint, adapter and tmp_path / adapter)


def test_the_page_counts_texts_and_numbers_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(tmp_path, Told([*SKY[:4], SKY[0], *SKY[5:]], gap=0.01), Told(SKY, gap=0.01))
    damaged = copy.deepcopy(found) | {"title": "damaged"}
    damaged[trained.MLX]["float32"] = {"error": "ValueError: no"}
    run = {"cases": {"as-it-is": found, "saved": damaged}, "releases": {trained.MLX: "1"}, "date": "2026-11-27"}
    run |= {"questions": [["What colour is the sky?"]], "command": "python"}
    folder = tmp_path / "benchmarks" / "results" / "2026-11-27-cpu"
    folder.mkdir(parents=True)
    (folder / "trained.json").write_text(json.dumps(run), encoding="utf-8")
    monkeypatch.setattr(page, "ROOT", tmp_path)
    lines = page.elsewhere().splitlines()
    assert "| the checkpoint as it is | 0 | 0, 1e-02 | 0, 1e-02 |" in lines
    assert "| damaged | 0 | refused [1] | 0, 1e-02 |" in lines
    assert "1. `ValueError: no`" in lines
    assert "3 of 3 texts differ; in float32, 1 of 1." in page.elsewhere()
