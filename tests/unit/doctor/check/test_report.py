"""What a check found: the verdict for each thing that can be wrong, the table, and the form of the JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._doctor.check import report, text
from gemma4_compat._doctor.check.run import Found, Outcome
from gemma4_compat._plan.cards import measured
from tests.unit.doctor.check import samples
from tests.unit.doctor.check.samples import GIB, OTHER, SAME, error, found, outcome

PLACE = "in host memory: 2 towers"


def verdict(of: Found) -> dict[str, Any]:
    data: dict[str, Any] = report.data(of)["verdict"]
    return data


def test_all_is_well() -> None:
    assert verdict(found()) == {
        "ok": True,
        "text": "The same weights gave the same bits in 2 placements (text, image, with the adapter and without), and "
        "replayed steps those of eager ones.",
        "problems": [],
    }


def test_other_bits() -> None:
    (text, *_) = verdict(found(outcome(), outcome(PLACE, OTHER)))["problems"]
    assert text == (
        "differs bitwise for text, image, with the adapter and without: "
        f"logits by 2.5, tokens from the 2nd on ({PLACE})"
    )


def test_other_bits_only_with_the_adapter() -> None:
    second = outcome(PLACE, SAME)
    second.done["image with the adapter"]["against"] = OTHER | {"tokens_equal": 8}
    assert verdict(found(outcome(), second))["problems"] == [
        f"differs bitwise for image with the adapter: logits by 2.5, no token ({PLACE})"
    ]


def test_replayed_steps_that_differ() -> None:
    first = outcome()
    first.done["fast decoding"]["against_eager"] = OTHER
    assert "replayed steps differ from eager ones for text" in verdict(found(first, outcome(PLACE, SAME)))["text"]


def test_own_kernels_are_compared_only_across_placements() -> None:
    first, second = outcome(), outcome(PLACE, SAME)
    for item, against in ((first, None), (second, OTHER)):
        item.done["fast decoding"]["own"] = samples.answer(against)
    assert "custom kernels differ bitwise for text" in verdict(found(first, second))["text"]


def crash(one: Outcome) -> None:
    del one.done["image"]
    one.failed["image"] = error(patches=[{"id": "transformers-vision-dtype", "state": "off"}])


def gone(one: Outcome) -> None:
    one.failed["load"] = error("SIGKILL", "the process was ended by SIGKILL")
    one.done.clear()


def not_finite(one: Outcome) -> None:
    one.done["text"]["finite"] = False


def too_much(one: Outcome) -> None:
    one.done["peak"]["peak"] = 11 * GIB


def without_replays(one: Outcome) -> None:
    for name in ("fast decoding", "fast decoding with the adapter"):
        one.done[name] = one.done[name] | {"replayed": 0, "reasons": ["of a hook"]}


def without_effect(one: Outcome) -> None:
    for name in ("text with the adapter", "image with the adapter"):
        one.done[name]["changed"] = False


@pytest.mark.parametrize(
    "change, said",
    [
        (crash, "image: ValueError, repaired by transformers-vision-dtype (off here) (everything on the card)"),
        (gone, "load: SIGKILL (everything on the card)"),
        (not_finite, "logits of text are not finite (everything on the card)"),
        (too_much, "a peak of 11.00 GiB where 10.00 GiB was the limit (everything on the card)"),
        (without_replays, "no step was replayed, and the plan expects it (everything on the card)"),
        (without_effect, "the adapter changes no answer"),
    ],
)
def test_what_is_wrong_with_a_placement(change: Any, said: str) -> None:
    first, second = outcome(), outcome(PLACE, SAME)
    change(first)
    if change is without_effect:
        change(second)
    told = verdict(found(first, second))
    assert told == {"ok": False, "text": f"NOT as it should be: {said}.", "problems": [said]}


def test_the_same_error_of_several_steps_is_told_once() -> None:
    first, second = outcome(), outcome(PLACE, SAME)
    for one in (first, second):
        for step in ("text", "image"):
            del one.done[step]
            one.failed[step] = error("OSError", "No space left on device")
    of = found(first, second)
    assert verdict(of)["problems"][0] == f"text, image: OSError (everything on the card; {PLACE})"
    told = text.report_text(of, report.data(of))
    assert f"everything on the card, text and image; {PLACE}, text and image: OSError: No space left" in told


def test_an_adapter_that_does_not_fit() -> None:
    problems = [{"id": "shape", "message": "secret.module has another shape"}]
    of = found(adapter={"type": "LORA", "ranks": [4], "keys": 2, "problems": problems})
    data = report.data(of)
    assert data["verdict"]["problems"] == ["the adapter does not fit this base (shape)"]
    assert "secret.module" in text.report_text(of, data)
    assert "secret.module" not in report.json_text(data, "0.1.0")


def test_patches_that_are_off_are_named_or_counted() -> None:
    of = found(patches={"off": ["peft-adapter-keys"], "failed": []})
    assert verdict(of)["text"].endswith(" Off: peft-adapter-keys.")
    of = found(patches={"off": [f"peft-{number}" for number in range(9)], "failed": []})
    assert verdict(of)["text"].endswith(" 9 patches are off.")


def test_a_merge_out_of_bounds() -> None:
    of = found()
    parity = {"ok": False, "difference": 2.0, "bound": 0.5, "kl_max": 1.0, "greedy_tokens": 16, "greedy_equal": [3]}
    of.merge = Outcome("merging the adapter", {}, said={"merged": parity})
    data = report.data(of)
    assert "the merged model differs" in data["verdict"]["text"]
    assert "by 2, OUT OF the bound of 0.5" in text.report_text(of, data)


def test_what_was_left_out_and_a_peak_above_the_plan_are_mentioned() -> None:
    first = outcome()
    first.skipped.append("speed at 1024 tokens")
    first.done["peak"]["peak"] = int(3.3 * GIB)
    told = verdict(found(first, outcome(PLACE, SAME)))
    assert told["ok"]
    assert "a peak was 10% above the plan; 1 measurements were left out for lack of time" in told["text"]


def test_what_the_time_was_too_short_for_is_no_defect() -> None:
    third = Outcome("in host memory: 35 layers", {"away": samples.AWAY, "planned": None, "expects_replay": True})
    third.failed["start"] = error("Timeout", "not started")
    of = found(outcome(), outcome(PLACE, SAME), third)
    told = verdict(of)
    assert told["ok"]
    assert "the same bits in 2 placements" in told["text"]
    assert told["text"].endswith("; 1 more could not be finished in the time there was (--minutes).")
    assert "time over" in text.report_text(of, report.data(of))


def test_nothing_to_compare_with() -> None:
    late = Outcome(
        PLACE, {"away": samples.AWAY, "planned": None, "expects_replay": True}, failed={"load": error("Timeout", "")}
    )
    said = "no two placements could be compared"
    assert verdict(found(outcome(), late))["problems"] == [f"{said} in the time there was (--minutes)"]
    late.failed["load"] = error("OutOfMemoryError", "")
    assert verdict(found(outcome(), late))["problems"][-1] == said


def test_everything_on_the_card_may_take_more_than_the_budget_of_a_plan() -> None:
    first = outcome()
    too_much(first)
    first.order["planned"] = {name: 11 * GIB for name in samples.PLANNED}
    assert verdict(found(first, outcome(PLACE, SAME)))["ok"]


def test_the_table() -> None:
    second = outcome(PLACE, SAME)
    second.done["speed at 64 tokens"] = samples.speed(64, None)
    lines = text.report_text(found(outcome(), second), report.data(found(outcome(), second))).splitlines()
    rows = [line.split() for line in lines if line.endswith(("card", "towers", "adapter"))]
    assert lines[0] == (
        "the tiny model (Gemma4ForConditionalGeneration, 4bit), NVIDIA GeForce RTX 3060, 10.00 GiB to use, context "
        "4096. 50 s."
    )
    assert rows[0][:8] == ["reference", "64", "200.0", "15.0", "0.10", "s", "3.00", "GiB"]
    assert rows[2][:7] == ["same", "bits", "64", "-", "15.0", "0.20", "s"]


def test_a_crash_is_told_with_what_explain_knows() -> None:
    first = outcome()
    crash(first)
    of = found(first)
    told = text.report_text(of, report.data(of))
    assert (
        "everything on the card, image: ValueError: broken Repaired by transformers-vision-dtype, which is off" in told
    )
    first.failed["image"] = error("OSError", "[Errno 28] No space left on device", advice="Make room.")
    assert "image: OSError: [Errno 28] No space left on device Make room." in text.report_text(of, report.data(of))


@pytest.mark.parametrize("change", [None, crash, gone, not_finite])
def test_a_report_has_the_form_that_a_plan_reads(change: Any) -> None:
    first = outcome()
    if change is not None:
        change(first)
    of = found(first, outcome(PLACE, OTHER | {"difference": float("inf")}))
    read = measured.read(report.json_text(report.data(of), "0.1.0").encode(), "report")
    assert read.machine.gpu.name == "NVIDIA GeForce RTX 3060"
    assert read.placements[0].failures == [] if change is None else True


@pytest.mark.parametrize(
    "path, value",
    [
        (("placements", 0, "title"), "in /home/somebody"),
        (("machine", "gpu", "name"), "card of bob@example.org"),
        (("verdict", "text"), "C:\\Users\\somebody"),
        (("model", "folder"), "checkpoint"),
        (
            ("placements", 0, "failures"),
            [{"step": "load", "type": "OSError", "frames": [], "patches": [], "message": ""}],
        ),
        (("source"), "/home/somebody/report"),
    ],
)
def test_what_is_personal_has_no_place_in_the_form(path: Any, value: Any) -> None:
    data: Any = json.loads(report.json_text(report.data(found()), "0.1.0"))
    *to, last = [path] if isinstance(path, str) else path
    place = data
    for key in to:
        place = place[key]
    place[last] = value
    with pytest.raises(Gemma4CompatError, match="is no report of `gemma4-compat check`"):
        measured.read(json.dumps(data).encode(), "report")


def test_a_full_disk_where_the_report_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    file.write_text("before")

    def full(self: Path, _text: str, **_: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(Gemma4CompatError, match=r"cannot be written to '.*report.json': No space left on device"):
            report.write(file, "{}")
    assert [item.name for item in tmp_path.iterdir()] == ["report.json"]
    assert file.read_text() == "before"


def test_a_report_replaces_the_one_before(tmp_path: Path) -> None:
    report.write(tmp_path / "report.json", "old")
    report.write(tmp_path / "report.json", "new")
    assert [(item.name, item.read_text()) for item in tmp_path.iterdir()] == [("report.json", "new\n")]
