"""The measurements in docs/evidence: a file for each patch, and what is known of the stacks they were taken in.

``patches/PATCH.json`` has three lists of outcomes: ``matrix`` (each stack of tests/matrix.toml), ``variants`` (each
variant of Gemma 4) and ``gpu``. An outcome is written once, ``seen`` says where, when and for how many seconds. So a
new patch is one new file, a retired one a deleted file, and another measurement with the same outcome a changed line.
What is left out has its usual value: ``reverted`` is as ``off``, no test failed, nothing was skipped.

``matrix.json``, ``variants.json`` and ``gpu/STACK.json`` have the rest: releases, devices, and measurements that
belong to no patch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "docs" / "evidence"
#: Of an entry of the matrix: when and where it was taken, which makes no other outcome.
WHEN = ("date", "python", "torch")
TESTS = ("passed", "failed", "error", "skipped")
#: How an outcome is written.
ORDER = ("verdict", "claimed", "off", "reverted", "on", "state", "tests", "failures", "skipped")
Result = dict[str, Any]


def read(file: Path) -> Any:
    """What a JSON file holds; an empty object if there is no such file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(file: Path, data: Any) -> None:
    """Write a JSON file as :func:`text` has it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text(data) + "\n", encoding="utf-8")


def text(data: Any, indent: int = 0, width: int = 118) -> str:
    """``data`` as JSON in which what fits into a line is a line, so that a diff shows what changed."""
    line = json.dumps(data, ensure_ascii=False)
    if indent + len(line) <= width or not data or not isinstance(data, (dict, list)):
        return line
    pad, begin, end = " " * (indent + 1), *("{}" if isinstance(data, dict) else "[]")
    items = (
        [f"{json.dumps(key, ensure_ascii=False)}: {text(value, indent + 1, width)}" for key, value in data.items()]
        if isinstance(data, dict)
        else [text(value, indent + 1, width) for value in data]
    )
    return f"{begin}\n{pad}" + f",\n{pad}".join(items) + f"\n{' ' * indent}{end}"


def patch_files(folder: Path) -> dict[str, Any]:
    """Patch -> what its file holds."""
    return {file.stem: read(file) for file in sorted((folder / "patches").glob("*.json"))}


def _add(outcomes: list[Result], outcome: Result, path: tuple[str, ...], value: Any, order: Iterable[str]) -> None:
    """Note that ``outcome`` was seen: ``value`` under ``path`` of its ``seen``, innermost keys in this ``order``."""
    held = next((item for item in outcomes if {**item, "seen": None} == {**outcome, "seen": None}), None)
    if held is None:
        outcomes.append(held := {**outcome, "seen": {}})
    at = held["seen"]
    for key in path[:-1]:
        at = at.setdefault(key, {})
    at[path[-1]] = value
    place = {name: number for number, name in enumerate(order)}
    ordered = sorted(at.items(), key=lambda item: place.get(item[0], len(place)))
    at.clear()
    at.update(ordered)


def _forget(outcomes: list[Result], name: str) -> None:
    """Remove what was seen in the stack ``name``, and outcomes that were seen nowhere else."""

    def without(seen: Any) -> Any:
        kept = {key: without(value) for key, value in seen.items() if key != name} if isinstance(seen, dict) else seen
        return {key: value for key, value in kept.items() if value != {}} if isinstance(kept, dict) else kept

    for outcome in outcomes:
        outcome["seen"] = without(outcome["seen"])
    outcomes[:] = [outcome for outcome in outcomes if outcome["seen"]]


# The matrix


def matrix(known: Mapping[str, Any], folder: Path = EVIDENCE, patches: Iterable[str] = ()) -> dict[str, Result]:
    """The result of each stack in ``known`` (name -> :class:`tools.matrix.stacks.Stack`) that was measured.

    Their patches are in the order of ``patches``, others after them.
    """
    stacks, found = read(folder / "matrix.json"), {}
    for name, stack in known.items():
        if name in stacks:
            held = {key: value for key, value in stacks[name].items() if key not in ("ok", "versions")}
            found[name] = {"cell": name, "ok": stacks[name]["ok"], **held, "why": stack.why, "pins": dict(stack.pins)}
            found[name] |= {"versions": stacks[name]["versions"], "patches": {}}
    files = patch_files(folder)
    for patch in [*(name for name in patches if name in files), *(files.keys() - set(patches))]:
        for outcome in files[patch].get("matrix", ()):
            for when, seconds in outcome["seen"].items():
                for name, took in seconds.items():
                    if name in found:
                        found[name]["patches"][patch] = _whole(outcome, when, took)
    return found


def _whole(outcome: Result, when: str, seconds: Any) -> Result:
    """An entry of the matrix with everything that was left out."""
    entry = {key: value for key, value in outcome.items() if key != "seen"}
    if "off" in entry:
        entry.setdefault("reverted", entry["off"])
    for run in ("off", "on", "reverted"):
        if run in entry:
            entry[run] = {**entry[run], "parity": entry[run].get("parity")}
    entry["tests"] = dict.fromkeys(TESTS, 0) | entry["tests"]
    return {"failures": {}, "skipped": []} | entry | {"seconds": seconds} | dict(zip(WHEN, when.split(", ")))


def _short(entry: Result) -> Result:
    """An outcome without what :func:`_whole` knows."""
    kept = {key: value for key, value in entry.items() if key not in (*WHEN, "seconds") and value not in ({}, [])}
    for run in ("off", "on", "reverted"):
        if run in kept:
            kept[run] = {key: value for key, value in kept[run].items() if (key, value) != ("parity", None)}
    if "off" in kept and kept.get("reverted") == kept["off"]:
        del kept["reverted"]
    kept["tests"] = {name: count for name, count in entry["tests"].items() if count}
    return {key: kept[key] for key in sorted(kept, key=lambda key: (key not in ORDER, [*ORDER, key].index(key)))}


def write_matrix(results: Mapping[str, Result], order: Iterable[str], folder: Path = EVIDENCE) -> None:
    """Write the results of these stacks, whole, beside those of the others. ``order``: of all stacks."""
    order = tuple(order)
    held = read(folder / "matrix.json")
    for name, result in results.items():
        held[name] = {key: value for key, value in result.items() if key not in ("cell", "why", "pins", "patches")}
    write(folder / "matrix.json", {name: held[name] for name in order if name in held})
    files = patch_files(folder)
    for patch in dict.fromkeys([*files, *(patch for result in results.values() for patch in result["patches"])]):
        outcomes = files.setdefault(patch, {}).get("matrix", [])
        for name, result in results.items():
            _forget(outcomes, name)
            if patch in result["patches"]:
                entry = result["patches"][patch]
                when = ", ".join(entry[key] for key in WHEN)
                _add(outcomes, _short(entry), (when, name), entry["seconds"], order)
        _put(folder, patch, files[patch], "matrix", outcomes)


def _put(folder: Path, patch: str, data: Result, part: str, outcomes: list[Result]) -> None:
    """Write one part of a patch's file, the widest outcome first; where nothing is left, there is no file."""

    def places(outcome: Result) -> int:
        return sum(len(value) if isinstance(value, dict) else 1 for value in outcome["seen"].values())

    for outcome in outcomes:
        outcome["seen"] = dict(sorted(outcome["seen"].items()))
    parts = {**data, part: sorted(outcomes, key=lambda outcome: (-places(outcome), text(outcome)))}
    kept = {name: parts[name] for name in ("matrix", "variants", "gpu") if parts.get(name)}
    file = folder / "patches" / f"{patch}.json"
    if kept:
        write(file, kept)
    else:
        file.unlink(missing_ok=True)


# Variants of Gemma 4


def variants(folder: Path = EVIDENCE, patches: Iterable[str] = ()) -> dict[str, Result]:
    """Stack -> releases, date of its last measurement, and variant -> patch -> entry (or ``{"missing": why}``)."""
    found = read(folder / "variants.json")
    for run in found.values():
        missing = run.pop("missing", {})
        run["date"] = ""
        run["variants"] = {name: {"missing": missing[name]} if name in missing else {} for name in run["variants"]}
    files = patch_files(folder)
    for patch in [*(name for name in patches if name in files), *(files.keys() - set(patches))]:
        for outcome in files[patch].get("variants", ()):
            entry = {key: value for key, value in outcome.items() if key != "seen"}
            for side in {"off", "on", "alone"} & entry.keys():
                entry[side] = {"parity": None, "applicable": True} | entry[side]
            for name, seen in outcome["seen"].items():
                for variant, date in seen.items():
                    if "missing" not in found[name]["variants"][variant]:
                        found[name]["variants"][variant][patch] = entry
                    found[name]["date"] = max(found[name]["date"], date)
    return found


def write_variants(name: str, run: Result, measured: Iterable[tuple[str, str]], folder: Path = EVIDENCE) -> None:
    """Write a stack's variants; ``measured`` are the pairs (variant, patch) that get the date of ``run``."""
    held = read(folder / "variants.json")
    missing = {variant: found["missing"] for variant, found in run["variants"].items() if "missing" in found}
    held[name] = {"versions": run["versions"], "variants": list(run["variants"])} | (
        {"missing": missing} if missing else {}
    )
    write(folder / "variants.json", held)
    files, measured = patch_files(folder), set(measured)
    for patch in {patch for _, patch in measured}:
        outcomes = files.setdefault(patch, {}).get("variants", [])
        before = {variant: date for outcome in outcomes for variant, date in outcome["seen"].get(name, {}).items()}
        _forget(outcomes, name)
        for variant, found in run["variants"].items():
            if patch in found:
                entry = dict(found[patch])
                for key in ("off", "on", "alone"):
                    if key in entry:
                        usual = {"parity": None, "applicable": True}
                        entry[key] = {a: b for a, b in entry[key].items() if a not in usual or b != usual[a]}
                date = run["date"] if (variant, patch) in measured else before[variant]
                _add(outcomes, entry, (name, variant), date, run["variants"])
        _put(folder, patch, files[patch], "variants", outcomes)


# GPUs


def gpu(name: str, folder: Path = EVIDENCE) -> Result:
    """What was measured on GPUs with a stack: machine, parts, and ``measured``: patches, then everything else."""
    run: Result = read(folder / "gpu" / f"{name}.json")
    patches: Result = {}
    for patch, data in patch_files(folder).items():
        for outcome in data.get("gpu", ()):
            if name in outcome["seen"]:
                patches[patch] = {
                    side: {**outcome[side], "seconds": seconds}
                    for side, seconds in zip(("without", "with"), outcome["seen"][name])
                }
    states = [{patch: state for state, held in item.items() for patch in held} for item in run.pop("states", [])]
    others = _walk(run.get("measured", {}), lambda found: {**found, "patches": states[found["patches"]]})
    return {**run, "measured": patches | others}


def write_gpu(name: str, run: Result, folder: Path = EVIDENCE) -> None:
    """Write what was measured on GPUs with a stack; what it lacks of a patch stays as it was."""
    files, measured = patch_files(folder), dict(run["measured"])
    for patch in sorted(_patches() & measured.keys()):
        found = measured.pop(patch)
        outcomes = files.setdefault(patch, {}).get("gpu", [])
        _forget(outcomes, name)
        outcome = {side: {k: v for k, v in found[side].items() if k != "seconds"} for side in ("without", "with")}
        _add(outcomes, outcome, (name,), [found[side]["seconds"] for side in ("without", "with")], ())
        _put(folder, patch, files[patch], "gpu", outcomes)
    states: list[Any] = []

    def numbered(found: Result) -> Result:
        by_state: dict[str, list[str]] = {}
        for patch, state in sorted(found["patches"].items()):
            by_state.setdefault(state, []).append(patch)
        if by_state not in states:
            states.append(by_state)
        return {**found, "patches": states.index(by_state)}

    measured = _walk(measured, numbered)
    write(folder / "gpu" / f"{name}.json", {**run, "measured": measured, "states": states})


def _patches() -> set[str]:
    """The ids of the patches, without an import of the package, which a GPU's machine may lack the libraries for."""
    return {file.stem.replace("_", "-") for file in (ROOT / "gemma4_compat" / "patches").glob("*/*.py")}


def _walk(data: Any, change: Any) -> Any:
    """``data`` with every object changed that says which state each patch was in."""
    if isinstance(data, list):
        return [_walk(item, change) for item in data]
    if not isinstance(data, dict):
        return data
    found = {key: value if key == "patches" else _walk(value, change) for key, value in data.items()}
    return change(found) if "patches" in found else found


def main(arguments: list[str]) -> int:
    """``python -m tools.evidence STACK.json ...``: what `gpu/run.sh` has written, beside what is known."""
    for file in map(Path, arguments):
        known, run = gpu(file.stem), read(file)
        both = {key: known.get(key, {}) | run.get(key, {}) for key in ("parts", "measured")}
        write_gpu(file.stem, known | run | both)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
