"""The measured parts of docs/TRAINED_MODEL.md: what the models learned, what ``--show`` and other software said."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.peers import trained as peers
from gemma4_compat._doctor.reproductions.scenes import SCENES
from gemma4_compat._lab.trained import PLACE, TWINS
from tools.pages.markers import ROOT, details, shorten
from tools.trained_model import measure

_PLACES = {"E2B": PLACE, **TWINS}
_KINDS = {
    "picture": "pictures, drawn anew",
    "unseen_colour": "the colour in pictures of a shape in a colour that training never showed together",
    "unseen": "colour and shape in these",
    "sound": "sounds, drawn anew",
    "fact": "facts",
    "docstring": "docstrings",
    "addition": "additions",
    "reading": "who has which thing, drawn anew",
    "adapter": "pictures, sounds, facts and docstrings, with the adapter, as a pirate",
}


def learned() -> str:
    """Held-out loss, right answers by kind, and size; of another training and of the twins as well."""
    runs = _runs()
    minutes = ", ".join(f"{title} in {run['training']['minutes']} minutes" for title, run in runs.items())
    losses = ", ".join(f"{title} {run['held_out_loss']:.3f}" for title, run in runs.items())
    sizes = ", ".join(f"{kind} {_megabytes(place):.1f}" for kind, place in _PLACES.items())
    rows = [
        f"| {title} | {' | '.join(_share(run, kind) for run in runs.values())} |" for kind, title in _KINDS.items()
    ]
    return (
        f"Trained here on one thread of a CPU, beside other work on the machine: {minutes}. Megabytes of all files: "
        f"{sizes}. Held-out loss in nats a token of the answers: {losses}. Answers that are right, word for word, on "
        "200 questions of each kind (-: not asked):\n\n"
        f"| questions | {' | '.join(runs)} |\n|---|{'---:|' * len(runs)}\n" + "\n".join(rows)
    )


def _share(run: dict[str, Any], kind: str) -> str:
    return f"{run['right'][kind]:.1%}" if kind in run["right"] else "-"


def on_gpu() -> str:
    """Each kind that was trained in one run on an H100: how long it took and which bounds it misses; which was not."""
    said, missed, absent = [], [], []
    for kind in _PLACES:
        file = ROOT / "docs" / "evidence" / f"trained_on_h100{'' if kind == 'E2B' else f'-{kind}'}.json"
        if not file.exists():
            absent.append(kind)
            continue
        run = json.loads(file.read_text(encoding="utf-8"))
        said.append(f"{kind} in {run['training']['minutes']} minutes ([raw](docs/evidence/{file.name}))")
        missed += [f"{kind}: {bound}" for bound in measure.missed(run)]
    outside = (
        f"not within the bounds: {'; '.join(missed)}" if missed else "models and adapters are within the same bounds"
    )
    text = f"With `--device cuda`, in one run on an H100: {', '.join(said)}; {outside}."
    return f"{text} Not in one run yet: {', '.join(absent)}." if absent else text


def drafts() -> str:
    """What the assistant drafts."""
    found = _measured(PLACE)["drafts"]
    return (
        f"Given all before it, the first of four drafts is right in {found['right'][0]:.1%}, the fourth in "
        f"{found['right'][-1]:.1%}. With four drafts, a forward of the model gives {found['tokens_a_forward']:.1f} "
        "tokens of a greedy answer; with the pirate adapter, which the assistant does not have, "
        f"{found['with_adapter']:.1f}."
    )


def compared() -> str:
    """Answers of quantized and merged models."""
    runs = {title: run["compared"] for title, run in _runs().items()}
    names = dict.fromkeys(name for run in runs.values() for name in run)  # in the order in which they were measured
    lines = []
    for name in names:
        cells = [
            f"{run[name]['right']:.1%} | {run[name]['nats']:.4f}" if name in run else "- | -" for run in runs.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    heads = f"| model | {' | '.join(f'{title} | nats' for title in runs)} |"
    return "\n".join((heads, f"|---|{'---:|' * 2 * len(runs)}", *lines))


def shown() -> str:
    """What the model answered without the shim and with it, on each stack."""
    parts = []
    for file in sorted((ROOT / "docs" / "evidence" / "show").glob("*.json")):
        run: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        stack = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        rows = [f"**{file.stem}**: {stack}.", "", "| patch | what is done | without | with |", "|---|---|---|---|"]
        for patch_id, answer in run["answers"].items():
            without, with_shim = (shorten(answer[side], 80) for side in ("without", "with"))
            rows.append(f"| `{patch_id}` | {SCENES[patch_id].does} | {without} | {with_shim} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def elsewhere() -> str:
    """What other software generates, beside transformers."""
    file = sorted((ROOT / "benchmarks" / "results").glob("*/trained.json"))[-1]
    run: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    where = file.relative_to(ROOT).as_posix()
    releases = ", ".join(f"{name} {release}" for name, release in run["releases"].items())
    ways = _ways(run)
    refused: list[str] = []
    table = _table({"": run}, refused)
    notes = [f"{number}. `{shorten(note, 160)}`" for number, note in enumerate(refused, 1)]
    return (
        f"{len(run['questions'])} questions. {releases}, on a CPU, {run['date']} (`{run['command']}`; "
        f"[raw]({where})).\n\n" + "\n".join(table) + "\n\n" + "\n".join([*notes, ""]) + "\n" + _differing(run, ways)
    )


def media() -> str:
    """What other software says of pictures and sounds, by the kind of the model."""
    folder = max(file.parent for file in (ROOT / "benchmarks" / "results").glob("*/trained_media-*.json"))
    runs = {}
    for kind in peers.KINDS:
        file = folder / f"trained_media-{kind}.json"
        runs[kind] = json.loads(file.read_text(encoding="utf-8")) | {"where": file.relative_to(ROOT).as_posix()}
    first = next(iter(runs.values()))
    releases = ", ".join(f"{name} {release}" for name, release in first["releases"].items())
    counts = ", ".join(
        f"{kind} {_count(run, 'picture')}{_count(run, 'sound', ' and ')} ([raw](../{run['where']}))"
        for kind, run in runs.items()
    )
    texts = [one for run in runs.values() for case in run["cases"].values() for one in _read(run, case)]
    equal, of = sum(one["equal"] for one in texts), sum(one["of"] for one in texts)
    return (
        f"{counts}. {releases}, on a CPU, {first['date']} (`{first['command']}`).\n\n"
        + "\n".join(_table(runs, []))
        + f"\n\n{equal} of {of} answers are those of transformers."
    )


def _count(run: dict[str, Any], kind: str, before: str = "") -> str:
    count = sum(kind in one for one in run["media"])
    return f"{before}{count} {kind}{'s' * (count > 1)}" if count else ""


def _read(run: dict[str, Any], case: dict[str, Any]) -> list[dict[str, Any]]:
    found = (case[name].get(way) for name, way in _ways(run))
    return [one for one in found if one is not None]


def _ways(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Each software that ran, and each of its dtypes, without transformers."""
    ran = [name for name in peers.WAYS if name in run["releases"] and name != peers.TRANSFORMERS]
    return [(name, way) for name in ran for way in peers.WAYS[name]]


def _table(runs: dict[str, dict[str, Any]], refused: list[str]) -> list[str]:
    """Lines: a row for each run and case, a column for each way; names of runs only if there are several."""
    ways = _ways(next(iter(runs.values())))
    first = ["model"] if len(runs) > 1 else []
    heads = [*first, "written by", "as a pirate", *(f"{name}, {way}" for name, way in ways)]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---|" * len(first) + "---:|" * (len(ways) + 1)]
    for kind, run in runs.items():
        for case in run["cases"].values():
            cells = [_said(case[name].get(way), refused) for name, way in ways]
            pirate = str(case[peers.TRANSFORMERS]["float32"]["pirate"])
            lines.append(f"| {' | '.join([*([kind] if first else []), case['title'], pirate, *cells])} |")
    return lines


def _said(found: dict[str, Any] | None, refused: list[str]) -> str:
    """A cell: how many texts are those of transformers, and how far logits are apart."""
    if found is None:
        return "-"
    if "equal" in found:
        return f"{found['equal']}, {found['apart']:.0e}" if found["apart"] else f"{found['equal']}, 0"
    if found["error"] not in refused:
        refused.append(found["error"])
    return f"refused [{refused.index(found['error']) + 1}]"


def _differing(run: dict[str, Any], ways: list[tuple[str, str]]) -> str:
    """How many texts were compared, what rounding does, and each text that differs."""
    found = [
        (case, name, way, case[name][way])
        for case in run["cases"].values()
        for name, way in ways
        if case[name].get(way)
    ]
    texts = sum(one.get("of", 0) for *_, one in found)
    fine_texts = [one for _, name, way, one in found if peers.WAYS[name][way] == "float32" and "of" in one]
    other, of = sum(len(one["differ"]) for one in fine_texts), sum(one["of"] for one in fine_texts)
    rows = [
        f"| {case['title']} | {name}, {way} | {_asked(run, one)} | {one['token'] + 1} | {one['gap']:.2g} | "
        f"{one['its_gap']:.2g} |"
        for case, name, way, read in found
        for one in read.get("differ", [])
    ]
    said = [case[peers.TRANSFORMERS] for case in run["cases"].values()]
    fine, coarse = (max(one[dtype]["rounding"] for one in said) for dtype in ("float32", "bfloat16"))
    gap = max((one["gap"] for *_, read in found for one in read.get("differ", [])), default=0.0)
    heads = "| written by | read by | question | token | transformers | the other |"
    return (
        f"{len(rows)} of {texts} texts differ; in float32, {other} of {of}. At the first other token of each, "
        f"transformers prefers its own by {gap:.2g} at most. Rounding to bfloat16 changes transformers' own logits by "
        f"up to {coarse:.2g}, rounding to float32 by {fine:.0e}.\n\n"
        + details(
            "The texts that differ, and by how much each prefers its own token there",
            "\n".join((heads, "|---|---|---|---:|---:|---:|", *rows)),
        )
    )


def _asked(run: dict[str, Any], differs: dict[str, Any]) -> str:
    return shorten(str(run["questions"][differs["question"]][-1]), 60)


def _runs() -> dict[str, dict[str, Any]]:
    """What was measured of the first, of a second run of the training script from nothing, and of the twins."""
    first, *twins = ((kind, _measured(place)) for kind, place in _PLACES.items())
    again = json.loads((ROOT / "docs" / "evidence" / "trained_again.json").read_text(encoding="utf-8"))
    return dict([first, ("trained again", again), *twins])


def _measured(place: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / place / "measured.json").read_text(encoding="utf-8"))
    return found


def _megabytes(place: str) -> float:
    return sum(file.stat().st_size for file in (ROOT / place).rglob("*") if file.is_file()) / 1e6
