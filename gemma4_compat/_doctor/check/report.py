"""What a check found as data that may leave the machine, and its verdict in one sentence.

No path, name or text of the user's is in it: sizes, figures, releases, words of this package, and the kinds and
library frames of errors. ``tests/unit/doctor/check/test_private.py`` searches it for what must not be there.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemma4_compat._doctor.check import errors
from gemma4_compat._doctor.check.run import TIME_OVER, Found, Outcome
from gemma4_compat._engine.io import terminal
from gemma4_compat._engine.io.text import size_text
from gemma4_compat._errors import Gemma4CompatError

#: The number of this form: it rises when a key is removed or changes its meaning. docs/JSON.md lists the keys.
FORM = 1
_WITH = " with the adapter"
_SPEED, _FAST = "speed at ", "fast decoding"
#: A peak that is so much above the plan is mentioned.
_ABOVE = 1.02
#: Patches that are off are named if they are no more.
_NAMED = 6


def data(found: Found) -> dict[str, Any]:
    """The whole report."""
    survey, merge = found.survey, found.merge
    placements = [_placement(outcome, merged=False) for outcome in found.placements]
    placements += [_placement(outcome, merged=True) for outcome in found.merged]
    adapter = survey["adapter"]
    report = {
        "form": FORM,
        "source": "check",
        "date": datetime.date.today().isoformat(),
        "quick": found.settings.quick,
        "seconds": round(found.seconds, 1),
        "machine": survey["machine"],
        "patches": survey["patches"],
        "model": {"tiny": found.settings.folder is None, **survey["model"]},
        "adapter": adapter and adapter | {"problems": [item["id"] for item in adapter["problems"]]},
        "budget": survey["budget"],
        "note": survey["note"],
        "context": survey["context"],
        "placements": placements,
        "merge": merge and _merge(merge),
    }
    problems = [*_problems(report), *_without_replays(found)]
    return report | {
        "verdict": {"ok": not problems, "text": _verdict(report, problems), "problems": problems},
    }


def write(file: Path, text: str) -> None:
    """Write a report; a file that was there is replaced once the new one is complete.

    Raises:
        Gemma4CompatError: it cannot be written.
    """
    unfinished = file.with_name(f"{file.name}.unfinished")
    try:
        unfinished.write_text(f"{text}\n", encoding="utf-8")
        unfinished.replace(file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise Gemma4CompatError(
            f"the report cannot be written to {str(file)!r}: {error.strerror or error}. What it says is above; "
            "`--json FILE` writes it elsewhere, `--json -` prints it"
        ) from error


def refuse_unwritable(file: Path) -> None:
    """Refuse a file that could not be written, before minutes have gone by.

    Raises:
        Gemma4CompatError: it is a folder, or its folder does not exist.
    """
    if file.is_dir():
        raise Gemma4CompatError(f"--json {str(file)!r} is a folder; give the name of a file in it")
    if not file.parent.is_dir():
        raise Gemma4CompatError(f"--json {str(file)!r}: there is no folder {str(file.parent)!r}; create it first")


def json_text(report: dict[str, Any], version: str) -> str:
    """The report as JSON, with the version of this package."""
    return terminal.json_text({"gemma4_compat": version, **report})


# ---------------------------------------------------------------------------------------------------------- placements


def _placement(outcome: Outcome, *, merged: bool) -> dict[str, Any]:
    order, done = outcome.order, outcome.done
    fast = [item for name, item in done.items() if name.startswith(_FAST)]
    return {
        "title": outcome.title,
        "merged": merged,
        "away": order["away"],
        "planned": order["planned"],
        "loading_peak": done.get("load", {}).get("peak"),
        "running_peak": done.get("peak", {}).get("peak"),
        "load_s": done.get("load", {}).get("seconds"),
        "seconds": round(outcome.seconds, 1),
        "replayed": sum(item["replayed"] for item in fast),
        "fused": max((item["fused"] for item in fast), default=0),
        "speeds": list(_speeds(done)),
        "answers": list(_answers(done)),
        "failures": [{"step": step, **errors.impersonal(error)} for step, error in outcome.failed.items()],
        "skipped": list(outcome.skipped),
    }


def _speeds(done: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for name, item in done.items():
        if name.startswith(_SPEED):
            entry: dict[str, Any] = {"adapter": name.endswith(_WITH), "context": item["context"]}
            for way in ("eager", "fast"):
                for key in ("tokens_s", "first_token_s"):
                    entry[f"{way}_{key}"] = (item[way] or {}).get(key)
            yield entry


def _answers(done: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One for each comparison. ``equal`` is None for a reference."""
    for name, item in done.items():
        if "digest" not in item:
            continue
        adapter, prompt = name.endswith(_WITH), name.removesuffix(_WITH)
        way = "eager"
        if prompt == _FAST:
            prompt, way = "text", "fast"
            same = item["against_eager"] if item["replayed"] else None
            yield _answer(prompt, "fast against eager", adapter, item | {"against": same})
            if "own" in item:
                yield _answer(prompt, "own kernels", adapter, item["own"])
        yield _answer(prompt, way, adapter, item)


def _answer(prompt: str, way: str, adapter: bool, item: dict[str, Any]) -> dict[str, Any]:
    against = item["against"] or {}
    return {
        "prompt": prompt,
        "way": way,
        "adapter": adapter,
        "digest": item["digest"],
        "finite": item["finite"],
        "changed": item.get("changed"),
        **{name: against.get(name) for name in ("equal", "difference", "tokens", "tokens_equal")},
    }


def _merge(outcome: Outcome) -> dict[str, Any]:
    found = outcome.said.get("merged")
    failures = [{"step": step, **errors.impersonal(error)} for step, error in outcome.failed.items()]
    return {"seconds": round(outcome.seconds, 1), "parity": found, "failures": failures}


# ------------------------------------------------------------------------------------------------------------- verdict


def _problems(report: dict[str, Any]) -> Iterator[str]:
    """What is not as it should be, each in a few words, the worst first."""
    for item in report["placements"]:
        name = f"{item['title']}{' (merged)' if item['merged'] else ''}"
        for way in ("eager", "fast against eager", "fast", "own kernels"):
            wrong = [answer for answer in item["answers"] if answer["way"] == way and answer["equal"] is False]
            if wrong:
                yield f"{_differs(way, wrong)} ({name})"
        broken = [answer for answer in item["answers"] if not answer["finite"]]
        if broken:
            yield f"logits of {_prompts(broken)} are not finite ({name})"
    if report["adapter"] and report["adapter"]["problems"]:
        yield f"the adapter does not fit this base ({_joined(report['adapter']['problems'])})"
    yield from _crashes(report)
    merge = report["merge"]
    if merge and merge["parity"] and not merge["parity"]["ok"]:
        yield "the merged model differs from the loaded adapter by more than rounding"
    if merge:
        yield from (f"{failure['step']}: {failure['type']}{_repaired(failure)}" for failure in merge["failures"])
    changed = [answer["changed"] for item in report["placements"] for answer in item["answers"] if answer["adapter"]]
    if changed and not any(changed):
        yield "the adapter changes no answer"
    answers = [answer for item in report["placements"] for answer in item["answers"]]
    if all(answer["equal"] is None for answer in answers if answer["way"] != "fast against eager"):
        late = " in the time there was (--minutes)" if any(_is_late(item) for item in report["placements"]) else ""
        yield f"no two placements could be compared{late}"
    for item in report["placements"]:
        peaks = [peak for peak in (item["loading_peak"], item["running_peak"]) if peak]
        fits = report["budget"] and item["planned"] and max(item["planned"].values()) <= report["budget"]
        if fits and peaks and max(peaks) > report["budget"]:
            sizes = f"{size_text(max(peaks))} where {size_text(report['budget'])} was the limit"
            yield f"a peak of {sizes} ({item['title']})"


def _crashes(report: dict[str, Any]) -> Iterator[str]:
    """What crashed in placements; steps that ended in the same error together."""
    places: dict[str, list[str]] = {}
    steps: dict[str, list[str]] = {}
    for item in report["placements"]:
        for failure in item["failures"] if not _is_late(item) else ():
            error = f"{failure['type']}{_repaired(failure)}"
            places.setdefault(error, []).append(item["title"])
            steps.setdefault(error, []).append(failure["step"])
    for error, titles in places.items():
        yield f"{_joined(steps[error])}: {error} ({'; '.join(dict.fromkeys(titles))})"


def _without_replays(found: Found) -> Iterator[str]:
    """Placements on a GPU of which the plan expects that steps are replayed, and none was."""
    for outcome in found.placements if found.survey["machine"]["gpu"] else ():
        tried = [item["replayed"] for name, item in outcome.done.items() if name.startswith(_FAST)]
        if outcome.order["expects_replay"] and tried and not any(tried):
            yield f"no step was replayed, and the plan expects it ({outcome.title})"


def _is_late(item: dict[str, Any]) -> bool:
    """Whether nothing went wrong with a placement but the time."""
    return [failure["type"] for failure in item["failures"]] == [TIME_OVER]


def _differs(way: str, wrong: list[dict[str, Any]]) -> str:
    largest = max(answer["difference"] for answer in wrong)
    tokens = [answer["tokens_equal"] + 1 for answer in wrong if answer["tokens_equal"] < answer["tokens"]]
    said = f"tokens from the {_ordinal(min(tokens))} on" if tokens else "no token"
    what = _prompts(wrong)
    verdicts = {
        "eager": f"differs bitwise for {what}",
        "fast": f"replayed steps differ bitwise for {what}",
        "own kernels": f"custom kernels differ bitwise for {what}",
        "fast against eager": f"replayed steps differ from eager ones for {what}",
    }
    return f"{verdicts[way]}: logits by {largest:.3g}, {said}"


def _verdict(report: dict[str, Any], problems: list[str]) -> str:
    off = report["patches"]["off"] + report["patches"]["failed"]
    hint = f" {len(off)} patches are off." if len(off) > _NAMED else f" Off: {_joined(off)}." if off else ""
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        return f"NOT as it should be: {problems[0]}{more}.{hint}"
    answers = [answer for item in report["placements"] for answer in item["answers"]]
    prompts = _joined(list(dict.fromkeys(answer["prompt"] for answer in answers)))
    adapter = ", with the adapter and without" if report["adapter"] else ""
    places = len([item for item in report["placements"] if not item["merged"] and not _is_late(item)])
    text = f"The same weights gave the same bits in {places} placements ({prompts}{adapter})"
    if any(answer["way"] == "fast against eager" and answer["equal"] for answer in answers):
        text += ", and replayed steps those of eager ones"
    above = [share for item in report["placements"] for share in _shares(item) if share > _ABOVE]
    text += f"; a peak was {max(above) - 1:.0%} above the plan" if above else ""
    skipped = sum(len(item["skipped"]) for item in report["placements"])
    text += f"; {skipped} measurements were left out for lack of time" if skipped else ""
    late = sum(_is_late(item) for item in report["placements"])
    text += f"; {late} more could not be finished in the time there was (--minutes)" if late else ""
    return f"{text}.{hint}"


def _shares(item: dict[str, Any]) -> Iterator[float]:
    """Measured peaks as shares of the planned ones."""
    planned = item["planned"]
    if planned and item["loading_peak"]:
        yield item["loading_peak"] / planned["loading"]
    if planned and item["running_peak"]:
        yield item["running_peak"] / max(planned["prefill"], planned["decode"])


def _prompts(answers: list[dict[str, Any]]) -> str:
    """The prompts of these answers, and which of them have the adapter."""
    plain, adapted = ([item["prompt"] for item in answers if item["adapter"] is wanted] for wanted in (False, True))
    if not adapted or not plain:
        return _joined(plain or adapted) + _WITH * bool(adapted)
    if set(plain) == set(adapted):
        return f"{_joined(plain)}, with the adapter and without"
    return f"{_joined(plain)}; with the adapter, {_joined(adapted)}"


def _repaired(failure: dict[str, Any]) -> str:
    return "".join(f", repaired by {patch['id']} ({patch['state']} here)" for patch in failure["patches"])


def _joined(words: list[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _ordinal(number: int) -> str:
    return f"{number}{'st' if number == 1 else 'nd' if number == 2 else 'rd' if number == 3 else 'th'}"
