"""Run the patch tests in every cell of tests/matrix.toml and write what was measured to docs/matrix.

python tools/matrix.py run                     every cell
python tools/matrix.py run newest bnb-0.49.0   some cells
python tools/matrix.py run --patches PATCH     one patch in every cell, beside what is known of the others
python tools/matrix.py run --ci                the cells of CI, in each the patches that have a gate there
python tools/matrix.py canary                  the newest of everything, pre-releases included; reports, never fails
python tools/matrix.py bisect PATCH LIBRARY    where a library's affected releases begin and end, and what to write
python tools/matrix.py releases                the releases the index holds, as matrix.toml writes them

`nox -s matrix`, `nox -s canary` and `nox -s bisect` call this in an environment with torch. A cell borrows that
environment's torch and gets everything else of its own, so it costs seconds and no download of torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
CELLS = ROOT / "tests" / "matrix.toml"
RESULTS = ROOT / "docs" / "matrix"
LIBRARIES = ("transformers", "accelerate", "peft", "bitsandbytes")

REPAIRED = "affected, repaired"
NOT_AFFECTED = "not affected"
NOT_APPLICABLE = "not applicable"
UNREPAIRED = "AFFECTED, NOT REPAIRED"
BROKEN = "BROKEN BY THE PATCH"
UNKNOWN = "NOT MEASURED"
AS_CLAIMED = frozenset({REPAIRED, NOT_AFFECTED, NOT_APPLICABLE})

#: Seconds one cell may take; the slowest took a third of it on two busy cores.
TIMEOUT = 3600

sys.path.insert(0, str(ROOT))

import gemma4_compat  # noqa: E402
from gemma4_compat import Patch  # noqa: E402
from gemma4_compat._engine import versions as _versions  # noqa: E402
from gemma4_compat.patches import registry  # noqa: E402

# ------------------------------------------------------------------------------------------------- cells and gates


@dataclass(frozen=True)
class Cell:
    """One environment: exact pins, why it is in the matrix, and what of it CI runs.

    Attributes:
        name: its name in matrix.toml and of its results file.
        pins: distribution -> release, the four libraries.
        why: what this cell is there to show.
        tests: "all" tests of every patch, or its "reproductions" only.
        ci: "" (not in CI), "gates" (in CI, the patches that have a gate here), "all" (in CI, every patch's
            reproduction) or "suite" (in steps of their own: every reproduction, in the newest stack the whole suite).
    """

    name: str
    pins: Mapping[str, str]
    why: str
    tests: str = "all"
    ci: str = ""


@dataclass(frozen=True)
class Gate:
    """A release at which a patch begins or ceases to be needed.

    Attributes:
        patch: the patch.
        distribution: the library whose release decides.
        last: the newest release below the bound.
        first: the oldest release at or above it.
    """

    patch: Patch
    distribution: str
    last: str
    first: str

    def __str__(self) -> str:
        return f"{self.patch.id}: {self.distribution} {self.last} | {self.first}"


def cells(file: Path = CELLS) -> dict[str, Cell]:
    """The cells of matrix.toml, by name."""
    table = tomllib.loads(file.read_text(encoding="utf-8"))["cells"]
    found = {}
    for name, entry in table.items():
        rest = {key: value for key, value in entry.items() if key not in LIBRARIES}
        found[name] = Cell(name=name, pins={library: entry[library] for library in LIBRARIES}, **rest)
    return found


def releases(file: Path = CELLS) -> dict[str, list[str]]:
    """Every release of the four libraries from the supported floor up, oldest first, as matrix.toml lists them."""
    listed: dict[str, list[str]] = tomllib.loads(file.read_text(encoding="utf-8"))["releases"]
    return listed


def conditions(patch: Patch) -> dict[str, str]:
    """Distribution -> specifier: the patch is needed where all of them hold."""
    requirements = map(Requirement, patch.requires)
    return {patch.distribution: patch.affected, **{item.name: str(item.specifier) for item in requirements}}


def claimed(patch: Patch, pins: Mapping[str, str]) -> bool:
    """Whether the patch says that it is needed with these releases."""
    return all(_versions.admits(specifier, pins[name]) for name, specifier in conditions(patch).items())


def gates(patch: Patch, listed: Mapping[str, Sequence[str]]) -> list[Gate]:
    """The gates of a patch above the supported floor: two neighbouring releases, one inside and one outside."""
    found = []
    for name, specifier in conditions(patch).items():
        inside = [_versions.admits(specifier, release) for release in listed.get(name, ())]
        found += [
            Gate(patch, name, listed[name][index - 1], listed[name][index])
            for index in range(1, len(inside))
            if inside[index - 1] != inside[index]
        ]
    return found


def sides(gate: Gate, among: Iterable[Cell]) -> tuple[list[Cell], list[Cell]]:
    """The cells just below and just above a gate in which this gate, and no other condition, decides."""
    others = {name: text for name, text in conditions(gate.patch).items() if name != gate.distribution}
    deciding = [
        cell for cell in among if all(_versions.admits(text, cell.pins[name]) for name, text in others.items())
    ]
    below = [cell for cell in deciding if cell.pins[gate.distribution] == gate.last]
    above = [cell for cell in deciding if cell.pins[gate.distribution] == gate.first]
    return below, above


def pairs(gate: Gate, among: Iterable[Cell]) -> list[tuple[Cell, Cell]]:
    """The cells just below and just above a gate that differ in nothing else."""
    below, above = sides(gate, among)
    alone = {gate.distribution: ""}
    return [(one, other) for one in below for other in above if {**one.pins, **alone} == {**other.pins, **alone}]


def patches_in_ci(cell: Cell, listed: Mapping[str, Sequence[str]]) -> list[Patch]:
    """What CI runs in a cell: every patch, or those that have a gate just here."""
    if cell.ci == "all":
        return list(gemma4_compat.patches())
    return [
        patch
        for patch in gemma4_compat.patches()
        if any(cell in pair for gate in gates(patch, listed) for pair in pairs(gate, cells().values()))
    ]


# ------------------------------------------------------------------------------------------------------ environments


def build(folder: Path, requirements: Sequence[str], *, options: Sequence[str] = ()) -> Path:
    """A virtual environment with these requirements and this environment's torch. Returns its Python.

    Raises:
        RuntimeError: uv cannot install them; the message is uv's.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    uv = [sys.executable, "-m", "uv"]
    _checked([*uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(_checked([str(python), "-c", asked]).strip())
    (site / "zz_torch.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    overrides = folder / "overrides.txt"
    overrides.write_text('torch ; sys_platform == "never"\n', encoding="utf-8")
    wanted = ["--overrides", str(overrides), *options, *requirements, "wrapt", "packaging", "typer", "pytest"]
    _checked([*uv, "pip", "install", "--quiet", "--python", str(python), *wanted])
    return python


def _checked(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or done.stdout.strip() or f"{command[0]} ended with {done.returncode}")
    return done.stdout


def child_environment(packages: Path | None = None) -> dict[str, str]:
    """The environment variables of a cell's processes."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GEMMA4_COMPAT_")}
    path = [str(ROOT), *([str(packages)] if packages else [])]
    return environment | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


# ------------------------------------------------------------------------------------------------------- one cell


def measure(
    cell: Cell, python: Path, patches: Sequence[Patch], packages: Path | None = None, only: str | None = None
) -> dict[str, Any]:
    """Run the tests of these patches with one cell's Python and say what they found, as data for JSON.

    ``only`` is pytest's ``-k``.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        files = [f"tests/patches/{registry.area(patch.id)}/test_{patch.id.replace('-', '_')}.py" for patch in patches]
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
        command += [f"--junitxml={report}", f"--basetemp={folder}/tmp", *(["-k", only] if only else [])]
        if packages is not None:  # beside other copies of the libraries; Python uses the first, as intended here
            command += ["-W", "ignore:several releases of:gemma4_compat.Gemma4CompatWarning"]
        environment = child_environment(packages)
        try:
            done = subprocess.run(
                [*command, *files], cwd=ROOT, env=environment, timeout=TIMEOUT, capture_output=True, text=True,
                encoding="utf-8", errors="replace", check=False,
            )  # fmt: skip
            code, wrote = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            code, wrote = -1, f"no end after {error.timeout:.0f} s"
        tests = read_report(report) if report.exists() else []
        versions = json.loads(_checked_in(python, _VERSIONS, environment))
    result = summarize(cell, versions, patches, tests)
    failing = any(entry["failures"] for entry in result["patches"].values())
    if code != 0 and not failing:  # pytest itself, not a test
        result["error"] = " / ".join(wrote.replace(str(ROOT), ".").splitlines()[-5:])
    return result


_VERSIONS = (
    "import json, platform; from importlib.metadata import version; print(json.dumps({'python': "
    "platform.python_version()} | {name: version(name) for name in ('torch', 'transformers', 'accelerate', 'peft', "
    "'bitsandbytes', 'huggingface_hub', 'tokenizers', 'safetensors', 'wrapt', 'packaging')}))"
)


def _checked_in(python: Path, code: str, environment: Mapping[str, str]) -> str:
    done = subprocess.run([str(python), "-c", code], env=dict(environment), capture_output=True, text=True, check=True)
    return done.stdout


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
    cell: Cell, versions: Mapping[str, str], patches: Sequence[Patch], tests: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What one cell's tests say about each patch."""
    found: dict[str, Any] = {}
    for patch in patches:
        own = [test for test in tests if test["file"] == patch.id.replace("-", "_")]
        runs = {shim: seen for test in own for shim, seen in test["reproductions"].items()}
        outcomes = [test["outcome"] for test in own]
        found[patch.id] = {
            "verdict": verdict(runs),
            "claimed": claimed(patch, cell.pins),
            **{shim: _shown(seen) for shim, seen in runs.items()},
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
    return {"cell": cell.name, "why": cell.why, "pins": dict(cell.pins), "versions": dict(versions), "patches": found}


def _shown(seen: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a reproduction; an ImportError names a file of this machine, which is not."""
    detail = re.sub(r" \((/|[A-Za-z]:\\)[^)]*\)", "", seen["detail"])
    return {"defect": seen["defect"], "detail": detail, "parity": seen["parity"]}


def joined(cell: Cell, parts: Sequence[Mapping[str, Any]], patches: Sequence[Patch]) -> dict[str, Any]:
    """Results of one cell as one: later parts replace what earlier ones say about the same patch."""
    versions: dict[str, str] = {}
    entries: dict[str, Any] = {}
    errors = []
    for part in parts:
        versions |= part.get("versions", {})
        entries |= part["patches"]
        errors += [part["error"]] if "error" in part else []
    wrong = [f"{key} is {versions.get(key)}" for key, pin in cell.pins.items() if versions.get(key) != pin]
    if wrong:
        errors.append(f"other releases than pinned: {', '.join(wrong)}")
    ordered = {patch.id: entries[patch.id] for patch in patches if patch.id in entries}
    good = all(entry["verdict"] in AS_CLAIMED and not entry["failures"] for entry in ordered.values())
    return {
        "cell": cell.name,
        "ok": good and bool(ordered) and not errors,
        **({"error": "; ".join(errors)} if errors else {}),
        "why": cell.why,
        "pins": dict(cell.pins),
        "versions": {key: value for key, value in versions.items() if key not in ("python", "torch")},
        "patches": ordered,
    }


def verdict(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """One patch in one cell, from its reproduction with the shim "off", "on" and "reverted"."""
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


# ------------------------------------------------------------------------------------------------------------- matrix


def run(options: argparse.Namespace) -> int:
    known, listed, everything = cells(), releases(), list(gemma4_compat.patches())
    for asked, names, what in (
        (options.cells, list(known), "cell is named"),
        (options.patches, [patch.id for patch in everything], "patch has the id"),
    ):
        if unknown := [name for name in asked if name not in names]:
            return _usage(f"no {what} {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [cell for cell in known.values() if cell.name in options.cells or not options.cells]
    if options.ci:
        if options.patches:
            return _usage("--ci chooses the patches of each cell; leave out --patches")
        chosen = [cell for cell in chosen if cell.ci in ("all", "gates")]
    if not chosen:
        return _usage(f"CI's matrix step runs none of {', '.join(options.cells)}, so nothing would be measured")
    asked_for = [patch for patch in everything if patch.id in options.patches or not options.patches]
    options.out.mkdir(parents=True, exist_ok=True)

    def one(cell: Cell) -> dict[str, Any]:
        patches, reproductions = asked_for, options.reproductions or cell.tests == "reproductions"
        if options.ci:
            patches, reproductions = patches_in_ci(cell, listed), reproductions or cell.ci == "all"
        only = "TestPromise" if reproductions else None
        file = options.out / f"{cell.name}.json"
        earlier = [json.loads(file.read_text(encoding="utf-8"))] if options.patches and file.exists() else []
        folder = options.work / cell.name
        try:
            python, packages = Path(sys.executable), None
            if options.packages is not None:
                packages = options.packages / cell.name
            else:
                python = build(folder, [f"{name}=={pin}" for name, pin in cell.pins.items()])
            groups = split(patches, options.split, durations(cell))
            with ThreadPoolExecutor(max_workers=len(groups)) as pool:
                parts = list(pool.map(lambda group: measure(cell, python, group, packages, only), groups))
        except (RuntimeError, OSError, subprocess.SubprocessError, ValueError) as error:  # the other cells go on
            parts = [{"error": str(error), "patches": {}}]
        finally:
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)
        result = joined(cell, [*earlier, *parts], everything)
        file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return result

    bad = []
    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        for job in as_completed([pool.submit(one, cell) for cell in chosen]):
            result = job.result()
            print(line(result), flush=True)
            bad += [] if result["ok"] else [result["cell"]]
    print(
        f"\n{len(chosen) - len(bad)} of {len(chosen)} cells as claimed" + (f"; not: {', '.join(bad)}" if bad else "")
    )
    return 1 if bad else 0


def durations(cell: Cell) -> dict[str, float]:
    """Patch -> seconds of its tests in this cell when it was last measured, else in the newest stack."""
    for name in (cell.name, "newest"):
        file = RESULTS / f"{name}.json"
        if file.exists():
            entries = json.loads(file.read_text(encoding="utf-8"))["patches"]
            return {patch_id: float(entry["seconds"]) for patch_id, entry in entries.items() if entry["seconds"]}
    return {}


def split(patches: Sequence[Patch], parts: int, seconds: Mapping[str, float]) -> list[list[Patch]]:
    """Groups of about equal duration, for as many processes; where nothing is known every patch counts the same."""
    groups: list[list[Patch]] = [[] for _ in range(min(parts, len(patches)))]
    loads = [0.0] * len(groups)
    for patch in sorted(patches, key=lambda patch: -seconds.get(patch.id, 60.0)):
        lightest = loads.index(min(loads))
        groups[lightest].append(patch)
        loads[lightest] += seconds.get(patch.id, 60.0)
    return groups


def line(result: Mapping[str, Any]) -> str:
    """One cell in the terminal: a line, and the failures."""
    entries = result["patches"]
    said = [entry["verdict"] for entry in entries.values()]
    counts = ", ".join(f"{said.count(name)} {name}" for name in sorted(set(said)))
    seconds = sum(entry["seconds"] or 0 for entry in entries.values())  # None: not recorded
    lines = [f"{result['cell']:<24} {'ok ' if result['ok'] else 'BAD'} {counts} ({seconds} s)"]
    lines += [f"    {result['error']}"] if "error" in result else []
    lines += [
        f"    {patch_id}::{test}: {message[:200]}"
        for patch_id, entry in entries.items()
        for test, message in entry["failures"].items()
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- canary


def canary(options: argparse.Namespace) -> int:
    """Everything at its newest, pre-releases included: what the doctor says there. Never fails, always says."""
    folder = options.work / "canary"
    newest = {name: found[-1] for name, found in releases().items()}
    try:
        python = build(folder, LIBRARIES, options=["--prerelease=allow", "--upgrade"])
        versions = json.loads(_checked_in(python, _VERSIONS, child_environment()))
        fresh = {name: versions[name] for name in LIBRARIES if versions[name] != newest[name]}
        if not fresh:
            print(f"nothing newer than the newest stack measured: {', '.join(map(' '.join, newest.items()))}")
            return 0
        print("newer than anything measured: " + ", ".join(map(" ".join, fresh.items())), flush=True)
        done = subprocess.run([str(python), "-m", "gemma4_compat", "doctor"], env=child_environment(), check=False)
        print(f"the doctor's exit code there is {done.returncode}")
    except (RuntimeError, OSError, subprocess.SubprocessError, ValueError) as error:
        print(f"the canary could not be run: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


# ------------------------------------------------------------------------------------------------------------- bisect


@dataclass(frozen=True)
class Bounds:
    """What a bisection found: the neighbours of the affected releases; None where the listed releases end."""

    last_good_before: str | None
    first_bad: str
    last_bad: str
    first_good_after: str | None

    @property
    def specifier(self) -> str:
        """The range to write."""
        below = f">={self.first_bad}"
        return below if self.first_good_after is None else f"{below},<{self.first_good_after}"


def boundaries(candidates: Sequence[str], known_bad: str, is_bad: Callable[[str], bool]) -> Bounds:
    """Where the run of affected releases around ``known_bad`` begins and ends; each side by halving.

    ``candidates`` are sorted. On each side of ``known_bad`` affected releases must not come back after good ones: a
    bisection cannot see that, the matrix can.

    Raises:
        ValueError: ``known_bad`` is not affected.
    """
    middle = candidates.index(known_bad)
    if not is_bad(known_bad):
        raise ValueError(f"the defect is not seen with {known_bad}, so there is nothing to bisect from it")

    def edge(outermost: int, step: int) -> int:
        """The affected candidate farthest from the middle, toward ``outermost``."""
        bad, good = middle, outermost + step  # beyond the end nothing is known; it stands for "good"
        if is_bad(candidates[outermost]):
            return outermost
        good = outermost
        while abs(good - bad) > 1:
            probe = (good + bad) // 2
            bad, good = (probe, good) if is_bad(candidates[probe]) else (bad, probe)
        return bad

    first, last = edge(0, -1), edge(len(candidates) - 1, +1)
    return Bounds(
        last_good_before=candidates[first - 1] if first > 0 else None,
        first_bad=candidates[first],
        last_bad=candidates[last],
        first_good_after=candidates[last + 1] if last + 1 < len(candidates) else None,
    )


def bisect(options: argparse.Namespace) -> int:
    patches = {patch.id: patch for patch in gemma4_compat.patches()}
    known = cells()
    if options.patch not in patches:
        return _usage(f"no patch has the id {options.patch!r}; ids: {', '.join(patches)}")
    if options.library not in LIBRARIES:
        return _usage(f"{options.library!r} is none of {', '.join(LIBRARIES)}")
    if options.cell not in known:
        return _usage(f"no cell is named {options.cell!r}; tests/matrix.toml has {', '.join(known)}")
    patch, base = patches[options.patch], known[options.cell]
    candidates = index_releases(options.library)
    bad = options.bad or _affected_release(patch, options.library, candidates)
    if bad not in candidates:
        return _usage(f"{options.library} {bad} is not among {', '.join(candidates)}")
    seen: dict[str, bool] = {}

    def is_bad(release: str) -> bool:
        if release not in seen:
            pins = {**base.pins, options.library: release}
            folder = options.work / f"bisect-{options.library}-{release}"
            try:
                python = build(folder, [f"{name}=={pin}" for name, pin in pins.items()])
                found = _reproduce(patch, python)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            seen[release] = found["defect"]
            said = "affected" if found["defect"] else "good" if found["applicable"] else "good (not applicable)"
            print(f"{options.library} {release:<10} {said:<22} {found['detail'][:150]}", flush=True)
        return seen[release]

    print(f"{patch.id}, {options.library}; the rest: " + ", ".join(
        f"{name} {pin}" for name, pin in base.pins.items() if name != options.library))  # fmt: skip
    try:
        found = boundaries(candidates, bad, is_bad)
    except (ValueError, RuntimeError) as error:
        return _usage(str(error))
    print(f"\naffected:   {options.library} {found.first_bad} - {found.last_bad}")
    print(f"good before {found.last_good_before or '(nothing older is supported)'}, "
          f"good after {found.first_good_after or '(no newer release)'}")  # fmt: skip
    print(f"to write:   {options.library}{found.specifier}")
    stated = conditions(patch).get(options.library)
    print(
        f"written:    {options.library}{stated}"
        if stated is not None
        else f"the patch says nothing of {options.library}"
    )
    if stated is not None:
        differ = [r for r in candidates if _versions.admits(stated, r) != _versions.admits(found.specifier, r)]
        print("the two agree on every release" if not differ else f"THEY DIFFER on {', '.join(differ)}")
        return 1 if differ else 0
    return 0


def _affected_release(patch: Patch, library: str, candidates: Sequence[str]) -> str:
    if library == patch.distribution:
        return patch.measured
    inside = [release for release in candidates if _versions.admits(conditions(patch).get(library, ""), release)]
    return inside[-1]


def _reproduce(patch: Patch, python: Path) -> dict[str, Any]:
    """The reproduction without the shim in another environment."""
    with tempfile.TemporaryDirectory() as folder:
        environment = child_environment() | {"GEMMA4_COMPAT_DISABLE": "all"}
        found: dict[str, Any] = {}
        for command in ("build", patch.id):
            done = subprocess.run(
                [str(python), "-m", "gemma4_compat._doctor.child", command, folder],
                env=environment, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False,
            )  # fmt: skip
            last = done.stdout.strip().rpartition("\n")[2]
            if not last.startswith("{"):
                wrote = (done.stderr or done.stdout).strip().splitlines()
                raise RuntimeError(f"the reproduction ended with {done.returncode}: {wrote[-1] if wrote else ''}")
            found = json.loads(last)
        return found


def index_releases(library: str) -> list[str]:
    """The releases of a library that pip's index has, from the supported floor up, oldest first."""
    wrote = _checked([sys.executable, "-m", "pip", "index", "versions", library])
    listed = re.search(r"Available versions: (.*)", wrote)
    assert listed, wrote
    found = sorted(map(Version, listed.group(1).split(", ")))
    return [str(item) for item in found if item >= Version(_versions.OLDEST[library])]


def print_releases(options: argparse.Namespace) -> int:
    written = releases()
    for library in LIBRARIES:
        found = index_releases(library)
        fresh = [release for release in found if release not in written.get(library, ())]
        print(f"{library} = {json.dumps(found)}" + (f"  # new: {', '.join(fresh)}" if fresh else ""))
    return 0


# --------------------------------------------------------------------------------------------------------------- main


def _usage(message: str) -> int:
    print(f"matrix: {message}", file=sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=ROOT / ".nox" / "cells", help="where environments are built")
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("run", help="patch tests in cells")
    command.add_argument("cells", nargs="*", metavar="CELL", help="default: all of them")
    command.add_argument("--ci", action="store_true", help="only CI's cells, and there the patches that have a gate")
    command.add_argument(
        "--patches",
        nargs="+",
        default=[],
        metavar="PATCH",
        help="only these; what a cell's result says about the others stays",
    )
    command.add_argument(
        "--reproductions",
        action="store_true",
        help="without the patch, with it, undone; none of the patch's other tests",
    )
    command.add_argument("--split", type=int, default=1, help="processes a cell (default: 1)")
    command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cells at once (default: one a core)")
    command.add_argument("--out", type=Path, default=RESULTS, help="where the results go (default: docs/matrix)")
    command.add_argument("--keep", action="store_true", help="keep the environments")
    command.add_argument(
        "--packages",
        type=Path,
        help="a folder with one folder of installed packages for each cell (pip install --target): nothing is "
        "installed, for machines without a network",
    )
    command.set_defaults(act=run)

    command = commands.add_parser("canary", help="the newest pre-releases of everything")
    command.set_defaults(act=canary)

    command = commands.add_parser("bisect", help="first and last affected release of a library")
    command.add_argument("patch", metavar="PATCH")
    command.add_argument("library", metavar="LIBRARY", help=", ".join(LIBRARIES))
    command.add_argument("--cell", default="newest", help="pins of the other libraries (default: newest)")
    command.add_argument("--bad", metavar="RELEASE", help="a release known to be affected (default: from the patch)")
    command.set_defaults(act=bisect)

    command = commands.add_parser("releases", help="the releases on the index")
    command.set_defaults(act=print_releases)

    options = parser.parse_args(argv)
    result: int = options.act(options)
    return result


if __name__ == "__main__":
    sys.exit(main())
