"""The tests of patches in one stack, and the verdict on each patch."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemma4_compat import Patch, Verdict
from gemma4_compat.patches import registry
from tools.matrix import environments, stacks
from tools.matrix.stacks import ROOT, Stack

REPAIRED, NOT_AFFECTED, NOT_APPLICABLE = Verdict.REPAIRED, Verdict.NOT_NEEDED, Verdict.NOT_APPLICABLE
UNREPAIRED, BROKEN, UNKNOWN = Verdict.REMAINS, Verdict.BROKEN, Verdict.NOT_MEASURED
AS_CLAIMED = frozenset(verdict for verdict in Verdict if verdict.good)

#: Seconds one stack may take; the slowest took a third of it on two busy cores.
TIMEOUT = 3600


def measure(
    stack: Stack, python: Path, patches: Sequence[Patch], packages: Path | None = None, only: str | None = None
) -> dict[str, Any]:
    """Run the tests of these patches with one stack's Python and say what they found, as data for JSON.

    ``only`` is pytest's ``-k``.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        files = [str(file.relative_to(ROOT)) for patch in patches for file in tests_of(patch.id)]
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
        command += [f"--junitxml={report}", f"--basetemp={folder}/tmp", *(["-k", only] if only else [])]
        if packages is not None:  # beside other copies of the libraries; Python uses the first, as intended here
            command += ["-W", "ignore:several releases of:gemma4_compat.Gemma4CompatWarning"]
        environment = environments.child_environment(packages)
        try:
            done = subprocess.run(
                [*command, *files], cwd=ROOT, env=environment, timeout=TIMEOUT, capture_output=True, text=True,
                encoding="utf-8", errors="replace", check=False,
            )  # fmt: skip
            code, wrote = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            code, wrote = -1, f"no end after {error.timeout:.0f} s"
        tests = read_report(report) if report.exists() else []
        releases = environments.versions_in(python, environment)
    result = summarize(stack, releases, patches, tests)
    failing = any(entry["failures"] for entry in result["patches"].values())
    if code != 0 and not failing:  # pytest itself, not a test
        result["error"] = " / ".join(wrote.replace(str(ROOT), ".").splitlines()[-5:])
    return result


def tests_of(patch_id: str) -> list[Path]:
    """The files with a patch's tests: ``test_<patch>.py``, and any ``test_<patch>_<subject>.py``."""
    folder = ROOT / "tests" / "patches" / registry.AREA_OF[patch_id]
    return [file for file in sorted(folder.glob("test_*.py")) if owner(file.stem.removeprefix("test_")) == patch_id]


def owner(name: str) -> str | None:
    """The patch whose tests are in ``test_<name>.py``; None if no patch has that name."""
    stems = {file.rpartition(".")[2] for file in registry.PATCHES}
    parts = name.split("_")
    found = ["_".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((stem.replace("_", "-") for stem in found if stem in stems), None)


def read_report(file: Path) -> list[dict[str, Any]]:
    """The tests of a JUnit report: file, name, outcome, message, seconds, and the reproductions they recorded."""
    found = []
    for item in ElementTree.parse(file).getroot().iter("testcase"):  # written by pytest a moment ago
        outcome, message = "passed", ""
        for child in item:
            if child.tag in ("failure", "error", "skipped"):
                outcome = {"failure": "failed", "error": "error"}.get(child.tag, "skipped")
                message = child.get("message") or (child.text or "")
        properties = {child.get("name"): child.get("value") for child in item.iter("property")}
        found.append(
            {
                "file": (item.get("classname") or "").split(".test_")[-1].split(".")[0],
                "name": item.get("name"),
                "outcome": outcome,
                "message": " ".join(message.split()),
                "seconds": float(item.get("time") or 0),
                "reproductions": {
                    str(key).removeprefix("reproduction "): json.loads(str(value))
                    for key, value in properties.items()
                    if str(key).startswith("reproduction ")
                },
            }
        )
    return found


def summarize(
    stack: Stack, versions: Mapping[str, str], patches: Sequence[Patch], tests: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What one stack's tests say about each patch."""
    found: dict[str, Any] = {}
    for patch in patches:
        own = [test for test in tests if owner(test["file"]) == patch.id]
        runs = {shim: seen for test in own for shim, seen in test["reproductions"].items()}
        outcomes = [test["outcome"] for test in own]
        found[patch.id] = {
            "verdict": str(verdict(runs)),
            "claimed": stacks.claimed(patch, stack.pins),
            **{shim: shown(seen) for shim, seen in runs.items()},
            "state": runs.get("on", {}).get("state"),
            "tests": {name: outcomes.count(name) for name in ("passed", "failed", "error", "skipped")},
            "failures": {
                test["name"]: test["message"][:400] for test in own if test["outcome"] in ("failed", "error")
            },
            "skipped": sorted({test["message"] for test in own if test["outcome"] == "skipped"}),
            "seconds": round(sum(test["seconds"] for test in own)),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "python": versions["python"],
            "torch": versions["torch"],
        }
    return {
        "cell": stack.name,
        "why": stack.why,
        "pins": dict(stack.pins),
        "versions": dict(versions),
        "patches": found,
    }


def shown(seen: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a reproduction: not the path of this machine that an ImportError names."""
    detail = re.sub(r" \((/|[A-Za-z]:\\)[^)]*\)", "", seen["detail"])
    return {"defect": seen["defect"], "detail": detail, "parity": seen["parity"]}


def joined(stack: Stack, parts: Sequence[Mapping[str, Any]], patches: Sequence[Patch]) -> dict[str, Any]:
    """Results of one stack as one: later parts replace what earlier ones say about the same patch."""
    versions: dict[str, str] = {}
    entries: dict[str, Any] = {}
    errors = []
    for part in parts:
        versions |= part.get("versions", {})
        entries |= part["patches"]
        errors += [part["error"]] if "error" in part else []
    wrong = [f"{key} is {versions.get(key)}" for key, pin in stack.pins.items() if versions.get(key) != pin]
    if wrong:
        errors.append(f"other releases than pinned: {', '.join(wrong)}")
    ordered = {patch.id: entries[patch.id] for patch in patches if patch.id in entries}
    good = all(entry["verdict"] in AS_CLAIMED and not entry["failures"] for entry in ordered.values())
    return {
        "cell": stack.name,
        "ok": good and bool(ordered) and not errors,
        **({"error": "; ".join(errors)} if errors else {}),
        "why": stack.why,
        "pins": dict(stack.pins),
        "versions": {key: value for key, value in versions.items() if key not in ("python", "torch")},
        "patches": ordered,
    }


def verdict(runs: Mapping[str, Mapping[str, Any]]) -> Verdict:
    """One patch in one stack, from its reproduction with the shim "off", "on" and "reverted"."""
    if not {"off", "on", "reverted"} <= runs.keys():
        return UNKNOWN
    off, on, reverted = runs["off"], runs["on"], runs["reverted"]
    if on["defect"]:
        return UNREPAIRED if off["defect"] else BROKEN
    if not off["applicable"]:
        return NOT_APPLICABLE
    if off["defect"] != reverted["defect"]:
        return BROKEN  # undoing it does not give upstream back
    return REPAIRED if off["defect"] else NOT_AFFECTED
