"""What graph_decoding.py's results say: summaries, tables, and what is wrong with them. Imports nothing upstream."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import common
from benchmarks.common import Data

GIB = 2**30
#: How much more a model may hold after the last calls of an endurance run than after the first ones.
FLAT = 1.01


def speed_summary(entry: Data, result: Data) -> Data:
    """Of the rounds so far."""
    speed, load = entry["speed"], entry["load"]
    ways = list(speed["first"])
    found: Data = {
        "tok_s": {way: common.spread([turns[way]["tok_s"] for turns in speed["rounds"]]) for way in ways},
        "first_token_s": {
            way: statistics.median([turns[way]["first_token_s"] for turns in speed["rounds"]]) for way in ways
        },
        "first_call_s": {way: speed["first"][way]["seconds"] for way in ways},
        "peak_gib": {way: _peak(speed, way, "peak_gib") for way in ways},
        "peak_reserved_gib": {way: _peak(speed, way, "peak_reserved_gib") for way in ways},
        "planned_gib": load["planned_gib"]["peak"],
    }
    if "replayed" in ways:
        turns = [found["replayed"]["steps"] for found in (speed["first"], *speed["rounds"])]
        found["steps"] = {key: [one[key] for one in turns] for key in ("replayed", "captured", "fused", "eager")}
        found["capture_s"] = statistics.median([one["capture_seconds"] for one in turns])
        found["reasons"] = turns[-1]["reasons"]
    if len(ways) == 2:
        ratios = [turns["replayed"]["tok_s"] / turns["eager"]["tok_s"] for turns in speed["rounds"]]
        found["ratio"] = common.spread(ratios)
    bus = result["host_to_device_gib_s"]
    if bus is not None and load["streamed_bytes"] and "replayed" in ways:
        bound = bus["pinned"] * GIB / load["streamed_bytes"]
        found["bus"] = {"bound_tok_s": bound, "share": found["tok_s"]["replayed"]["median"] / bound}
    return found


def _peak(speed: Data, way: str, key: str) -> Any:
    """Of the first call and, where that was measured, of a later one."""
    calls = [speed[number][way] for number in ("first", "second") if way in speed.get(number, {})]
    peaks = [call["memory"][key] for call in calls if call["memory"][key] is not None]
    return max(peaks, default=None)


def fusing_summary(rounds: list[Data]) -> Data:
    """Of the rounds so far."""
    ratios = [turns["fused"]["tok_s"] / turns["plain"]["tok_s"] for turns in rounds]
    return {
        "tok_s": {way: common.spread([turns[way]["tok_s"] for turns in rounds]) for way in ("plain", "fused")},
        "ratio": common.spread(ratios),
        "capture_s": {
            "first": rounds[0]["fused"]["capture_s"],
            "later": statistics.median([turns["fused"]["capture_s"] for turns in rounds[1:] or rounds]),
        },
        "fused": [turns["fused"]["fused"] for turns in rounds],
    }


def waiting_summary(rounds: list[Data]) -> Data:
    """Of the rounds so far."""
    ways = ("waiting", "deferred")
    return {
        "tok_s": {way: common.spread([turns[way]["tok_s"] for turns in rounds]) for way in ways},
        "ratio": common.spread([turns["deferred"]["tok_s"] / turns["waiting"]["tok_s"] for turns in rounds]),
        "late": [turns["deferred"]["late"] for turns in rounds],
    }


def streamed_summary(rounds: list[Data]) -> Data:
    """Of the rounds so far: milliseconds of a token, and how many times those without a streamer these are."""
    ms = {way: [turns[way]["ms"] for turns in rounds] for way in rounds[0]}
    without = {way: ms[f"none{way[way.index(' ') :]}"] for way in ms}
    ratios = {way: [one / other for one, other in zip(ms[way], without[way])] for way in ms}
    return {
        "ms": {way: common.spread(found) for way, found in ms.items()},
        "ratio": {way: common.spread(found) for way, found in ratios.items() if not way.startswith("none")},
    }


def endurance_summary(calls: list[Data]) -> Data:
    """Tokens, those that were wrong, and what was held after the first quarter of the calls against the last."""
    quarter = max(1, len(calls) // 4)
    found: Data = {
        "tokens": sum(call["batch"] * call["tokens"] for call in calls),
        "calls": len(calls),
        "compared": sum(call.get("compared", 0) for call in calls),
        "wrong": sum(call["wrong"] or 0 for call in calls),
    }
    for key in ("resident_gib", "reserved_gib"):
        if calls[0][key] is not None:
            found[key] = [max(call[key] for call in part) for part in (calls[:quarter], calls[-quarter:])]
    return found


def problems(result: Data) -> list[str]:
    """What should not be: other bits, growing memory, nothing replayed where there is a GPU."""
    found = []
    on_gpu = result["machine"]["device"] != "CPU"
    replayed = result.get("compiled", {}).get("replayed")
    for name, entry in {**result["cases"], **({"bf16": replayed} if replayed else {})}.items():
        summary = entry.get("speed", {}).get("summary")
        if on_gpu and summary and not all(summary["steps"]["replayed"]):
            found.append(f"{name}: nothing was replayed: {'; '.join(summary['reasons']) or 'no reason given'}")
        fused = entry.get("fusing", {}).get("summary")
        if on_gpu and fused and not all(fused["fused"]):
            found.append(f"{name}: nothing was fused")
        found += [
            f"{name}, {scenario}: {_bits(data)}"
            for scenario, data in entry.get("bits", {}).items()
            if "error" not in data and (not data["tokens_equal"] or data["logits_differ_by"] != 0.0)
        ]
        lasted = entry.get("endurance", {}).get("summary")
        if lasted and lasted["wrong"]:
            found.append(f"{name}: {lasted['wrong']} of {lasted['compared']} compared tokens are wrong")
        if lasted and "resident_gib" in lasted and lasted["resident_gib"][1] > FLAT * lasted["resident_gib"][0]:
            found.append(f"{name}: after {lasted['tokens']} tokens {lasted['resident_gib']} GiB are held")
    return found


# Lines, as they come


def speed_line(name: str, entry: Data) -> str:
    summary = entry["speed"].get("summary")
    if summary is None:
        return f"{name:<14} speed: no round was finished"
    rates = ", ".join(f"{way} {spread['median']:.1f}" for way, spread in summary["tok_s"].items())
    steps = f", steps {summary['steps']}" if "steps" in summary else ""
    reasons = f", {'; '.join(summary['reasons'])}" if summary.get("reasons") else ""
    return f"{name:<14} tok/s: {rates}; first call {summary['first_call_s']}{steps}{reasons}"


def bits_line(name: str, entry: Data) -> str:
    return f"{name:<14} bits: {', '.join(f'{scenario} {_bits(data)}' for scenario, data in entry['bits'].items())}"


def short_line(name: str, entry: Data) -> str:
    return f"{name:<14} short: {', '.join(f'{tokens} {_answer(data)}' for tokens, data in entry['short'].items())}"


def endurance_line(name: str, entry: Data) -> str:
    return f"{name:<14} endurance: {entry['endurance'].get('summary')}"


# Tables


def _bits(data: Data) -> str:
    if "error" in data:
        return "error"
    tokens = "" if data["tokens_equal"] else ", **other tokens**"
    differ = data["logits_differ_by"]
    return ("0.0" if differ == 0.0 else f"**{differ}**") + tokens


def _answer(data: Data) -> str:
    eager, replayed = (f"{statistics.median(data[way]):.2f} s" if data[way] else "-" for way in ("eager", "replayed"))
    return f"{eager} -> {replayed}"


def _rate(spread: Data | None) -> str:
    if spread is None:
        return "-"
    low, high = spread["quartiles"]
    return f"{spread['median']:.1f} ({low:.1f} to {high:.1f})"


def _gib(values: Data, *ways: str) -> str:
    found = [values.get(way) for way in ways]
    return " / ".join("-" if value is None else f"{value:.2f}" for value in found)


def _seconds(values: Data, *ways: str) -> str:
    return " / ".join(f"{1000 * values[way]:.0f} ms" for way in ways)


def _table(titles: tuple[str, ...], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(line)} |" for line in (titles, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(titles), *lines[1:]])


def _speed(run: Data) -> str:
    rows = []
    for entry in run["cases"].values():
        summary = entry.get("speed", {}).get("summary")
        if summary is None:
            continue
        low, high = summary["ratio"]["quartiles"]
        bus = summary.get("bus")
        rows.append(
            [
                entry["what"],
                _rate(summary["tok_s"]["eager"]),
                _rate(summary["tok_s"]["replayed"]),
                f"**{summary['ratio']['median']:.2f}** ({low:.2f} to {high:.2f})",
                "-" if bus is None else f"{100 * bus['share']:.0f} % of {bus['bound_tok_s']:.1f}",
                _seconds(summary["first_token_s"], "eager", "replayed"),
                f"{summary['capture_s']:.2f} s",
                _gib(summary["peak_gib"], "eager", "replayed"),
                _gib(summary["peak_reserved_gib"], "eager", "replayed"),
                f"{summary['planned_gib']:.2f}",
            ]
        )
    return _table(
        (
            *("placement", "tok/s eager", "tok/s replayed", "ratio", "of the bus' bound"),
            *("first token, eager / replayed", "captures of a call", "VRAM peak, GiB", "reserved", "planned"),
        ),
        rows,
    )


def _fusing(run: Data) -> str:
    rows = []
    for entry in run["cases"].values():
        summary = entry.get("fusing", {}).get("summary")
        if summary:
            rows.append(
                [
                    *_both(entry["what"], summary),
                    " / ".join(f"{summary['capture_s'][when]:.2f} s" for when in ("first", "later")),
                ]
            )
    titles = ("replays, tok/s", "kernels as captured", "kernels fused", "ratio", "captures, first graph / later ones")
    return _table(titles, rows)


def _waiting(run: Data) -> str:
    summaries = ((entry["what"], entry.get("waiting", {}).get("summary")) for entry in run["cases"].values())
    rows = [_both(what, summary) for what, summary in summaries if summary]
    return _table(("replays, tok/s", "the host waits for each token", "one step late", "ratio"), rows)


def _both(what: str, summary: Data) -> list[str]:
    """Cells of two ways that took turns: their rates, and the ratio."""
    low, high = summary["ratio"]["quartiles"]
    rates = [_rate(found) for found in summary["tok_s"].values()]
    return [what, *rates, f"**{summary['ratio']['median']:.2f}** ({low:.2f} to {high:.2f})"]


def _all_bits(run: Data) -> str:
    entries = [
        entry
        for entry in run["cases"].values()
        if any(data.get("error") != "no time" for data in entry.get("bits", {}).values())
    ]
    scenarios = list(dict.fromkeys(scenario for entry in entries for scenario in entry["bits"]))
    rows = [
        [entry["what"], *(_bits(entry["bits"][name]) if name in entry["bits"] else "-" for name in scenarios)]
        for entry in entries
    ]
    return _table(("largest difference of logits", *scenarios), rows)


def _short(run: Data) -> str:
    entries = [entry for entry in run["cases"].values() if entry.get("short")]
    lengths = list(dict.fromkeys(length for entry in entries for length in entry["short"]))
    rows = [
        [entry["what"], *(_answer(entry["short"][name]) if name in entry["short"] else "-" for name in lengths)]
        for entry in entries
    ]
    return _table(("an answer, eager -> replayed", *(f"{length} tokens" for length in lengths)), rows)


def _compiled(run: Data) -> str:
    rows = []
    for entry in run.get("compiled", {}).values():
        summary = entry.get("speed", {}).get("summary")
        for way in summary["tok_s"] if summary else ():
            rows.append(
                [
                    f"{entry['what']}{', eager' if way == 'eager' else ''}",
                    f"{summary['first_call_s'][way]:.1f} s",
                    _rate(summary["tok_s"][way]),
                    _gib(summary["peak_gib"], way),
                    _gib(summary["peak_reserved_gib"], way),
                ]
            )
    return _table(("bf16 on the GPU", "first call", "tok/s", "VRAM peak, GiB", "reserved, GiB"), rows)


def _endurance(run: Data) -> str:
    rows = []
    for entry in run["cases"].values():
        summary = entry.get("endurance", {}).get("summary")
        if summary:
            held = (_from_to(summary.get(key)) for key in ("resident_gib", "reserved_gib"))
            wrong = f"{summary['wrong']} of {summary['compared']}"
            rows.append([entry["what"], f"{summary['tokens']:,} in {summary['calls']} calls", wrong, *held])
    return _table(("endurance", "tokens", "wrong of those compared", "held, first -> last quarter", "reserved"), rows)


def _from_to(pair: Any) -> str:
    return "-" if pair is None else f"{pair[0]:.3f} -> {pair[1]:.3f} GiB"


TABLES: tuple[Callable[[Data], str], ...] = (_speed, _fusing, _waiting, _all_bits, _short, _compiled, _endurance)


def table(run: Data) -> str:
    """All of them, for a run as a whole."""
    parts = [text for text in (part(run) for part in TABLES) if text]
    cut = [f"{run['shape']} is {run['cut_down']}."] if run.get("cut_down") else []
    return "\n\n".join([*cut, *parts])
