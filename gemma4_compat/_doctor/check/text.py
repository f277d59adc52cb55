"""A check as text: what ran, a table of the placements, what failed and why, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemma4_compat._doctor.check import errors
from gemma4_compat._doctor.check.run import TIME_OVER, Found
from gemma4_compat._engine.io.text import Cell, Tone, size_text, table_text, wrapped

_GIB = 1 << 30


def report_text(found: Found, report: dict[str, Any], width: int | None = None, *, colour: bool = False) -> str:
    """Everything except the verdict."""
    paragraphs = [*_heading(found, report), *_failures(found), *_notes(report)]
    table = table_text(list(_rows(report)), header=True, width=width, colour=colour)
    head, rest = paragraphs[:2], paragraphs[2:]
    return "\n\n".join([*(wrapped(item, width) for item in head), table, *(wrapped(item, width) for item in rest)])


def _heading(found: Found, report: dict[str, Any]) -> Iterator[str]:
    model, gpu = report["model"], report["machine"]["gpu"]
    name = "the tiny model" if model["tiny"] else model["variant"] or "a model of another shape"
    stored = model["quantization"] or "bf16"
    budget = "" if report["budget"] is None else f", {size_text(report['budget'])} to use"
    stands = "the CPU stands for the card" + (" and a tape for CUDA graphs" if model["tiny"] else "")
    where = f"no GPU: {stands}" if gpu is None else f"{gpu['name']}{budget}"
    took = f"context {report['context']}. {report['seconds']:.0f} s."
    yield f"{name} ({model['model_class']}, {stored}), {where}, {took}"
    copies = report["machine"]["copies"]
    words = {"pinned": "pinned host memory to the card", "pageable": "pageable host memory to the card"}
    words |= {"device": "in the card's memory", "host": "in host memory"}
    told = [f"{copies[key] / _GIB:.1f} GiB/s {word}" for key, word in words.items() if copies[key]]
    yield f"Copies: {', '.join(told)}."


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    yield ("answers", "context", "tokens/s", "eager", "first token", "peak", "planned", "placement")
    for item in report["placements"]:
        head = _verdict(item)
        peaks = _size(max(item["loading_peak"] or 0, item["running_peak"] or 0))
        planned = _size(max(item["planned"].values())) if item["planned"] and peaks != "-" else "-"
        title = f"{item['title']}{', merged' if item['merged'] else ''}"
        for speed in item["speeds"] or [None]:
            if speed is None:
                yield (head, "-", "-", "-", "-", peaks, planned, title)
                continue
            first = speed["fast_first_token_s"] or speed["eager_first_token_s"]
            rates = (_rate(speed["fast_tokens_s"]), _rate(speed["eager_tokens_s"]), f"{first:.2f} s")
            shown = f"{title}, with the adapter" if speed["adapter"] else title
            yield (head, str(speed["context"]), *rates, peaks, planned, shown)
            head, peaks, planned = Cell("", Tone.PLAIN), "", ""


def _verdict(item: dict[str, Any]) -> Cell:
    if item["failures"]:
        kinds = {failure["type"] for failure in item["failures"]}
        return Cell("time over", Tone.WARNING) if kinds == {TIME_OVER} else Cell("CRASHED", Tone.BAD)
    compared = [answer["equal"] for answer in item["answers"] if answer["way"] != "fast against eager"]
    replays = [answer["equal"] for answer in item["answers"] if answer["way"] == "fast against eager"]
    if False in compared or False in replays:
        return Cell("DIFFERENT", Tone.BAD)
    return Cell("same bits" if True in compared else "reference", Tone.GOOD)


def _failures(found: Found) -> Iterator[str]:
    outcomes = [*found.placements, *([found.merge] if found.merge else []), *found.merged]
    told: dict[str, dict[str, list[str]]] = {}  # an error -> where -> the steps that ended in it
    for outcome in outcomes:
        for step, error in outcome.failed.items():
            told.setdefault(errors.sentence(error), {}).setdefault(outcome.title, []).append(step)
    for sentence, where in told.items():
        yield f"{'; '.join(f'{title}, {_listed(steps)}' for title, steps in where.items())}: {sentence}"
    reasons = {
        reason: outcome.title
        for outcome in reversed(outcomes)
        for item in outcome.done.values()
        for reason in item.get("reasons", ())
        if not item["replayed"]
    }
    for reason, title in reasons.items():
        yield f"{title}: no step was replayed, because {reason}."
    adapter = found.survey["adapter"]
    for problem in adapter["problems"] if adapter else ():
        yield f"The adapter does not fit: {problem['message']}"


def _notes(report: dict[str, Any]) -> Iterator[str]:
    if report["note"]:
        yield f"{report['note'][0].upper()}{report['note'][1:]}."
    merge = report["merge"]
    if merge and merge["parity"]:
        parity = merge["parity"]
        word = "within" if parity["ok"] else "OUT OF"
        yield (
            f"Merged: logits differ from the loaded adapter's by {parity['difference']:.3g}, {word} the bound of "
            f"{parity['bound']:.3g}."
        )


def _listed(steps: list[str]) -> str:
    return f"{', '.join(steps[:-1])} and {steps[-1]}" if len(steps) > 1 else steps[0]


def _size(nbytes: int) -> str:
    return size_text(nbytes) if nbytes else "-"


def _rate(tokens_s: float | None) -> str:
    return "-" if tokens_s is None else f"{tokens_s:.1f}"
