"""Run upstream's own tests twice, shim off and on, and fail on any test whose outcome differs.

python tools/upstream_suites.py --out docs/evidence/upstream/newest.json

Run it with the Python of an environment that holds the stack. It fetches the source distributions of the installed
accelerate and peft from pip's index, unpacks their tests, and runs what needs neither the hub nor a GPU in one process
with GEMMA4_COMPAT_DISABLE=all and one without. tests/upstream.toml says which tests, and why not the others.

Both processes import the shim, so only the patches differ. The run fails as well when it proved nothing: no patch
applied, one failed to apply, no test went through a repaired function.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.upstream_child import is_executed, matching  # noqa: E402

TABLE = ROOT / "tests" / "upstream.toml"
CHILD = ROOT / "tools" / "upstream_child.py"
STACK = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")
RERUNS = 2  # of a test that differs, in both modes


# What is run


@dataclass(frozen=True)
class Suite:
    """One distribution's part of tests/upstream.toml."""

    name: str
    files: Mapping[str, int]
    requires: tuple[str, ...] = ()
    package: bool = False
    not_run: Mapping[str, str] = field(default_factory=dict)
    deselected: Mapping[str, str] = field(default_factory=dict)
    expected_differences: Mapping[str, str] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)


def read_suites(table: Path) -> dict[str, Suite]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pytest brings it

    content = tomllib.loads(table.read_text(encoding="utf-8"))
    return {
        name: Suite(name=name, **{**entry, "requires": tuple(entry["requires"])}) for name, entry in content.items()
    }


# Fetching


def fetch(suite: Suite, version: str, cache: Path) -> tuple[Path, str]:
    """The unpacked tests of the release's source distribution, and its SHA-256. pip checks the index's hash."""
    downloads = cache / "downloads"
    archive = downloads / f"{suite.name}-{version}.tar.gz"
    if not archive.exists():
        # Only this one from source: what its metadata needs may come as wheels.
        requirement = f"{suite.name}=={version}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", suite.name]
        subprocess.run([*pip, "--dest", str(downloads), requirement], check=True)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if suite.sha256.get(version, digest) != digest:
        raise SystemExit(f"{archive.name} has the SHA-256 {digest}, not the one in {TABLE.name}; delete it")
    unpack(archive, cache, package=suite.package)
    return cache / f"{suite.name}-{version}", digest


def unpack(archive: Path, folder: Path, *, package: bool) -> None:
    """Only ``NAME-VERSION/tests``: with ``src`` beside them the tests would not run against what is installed."""
    if not hasattr(tarfile, "data_filter"):
        raise SystemExit("this Python unpacks archives without a check of their paths: use 3.10.12, 3.11.4 or newer")
    base = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as opened:
        members = [member for member in opened.getmembers() if member.name.startswith(f"{base}/tests/")]
        if not members:
            raise SystemExit(f"{archive.name} carries no tests")
        opened.extractall(folder, members, filter="data")
    if package:
        (folder / base / "tests" / "__init__.py").touch()


# One process


def run(
    suite: Suite, folder: Path, *, shim: str, only: list[str] | None = None, refuse_hub: bool = True
) -> dict[str, Any]:
    """One process: the suite's tests (or ``only`` some) with the shim ``"off"`` or ``"on"``."""
    present = {name: one_in for name, one_in in suite.files.items() if (folder / name).is_file()}
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "result.json")
        task = {
            "files": present,
            "deselected": dict(suite.deselected),
            "only": only,
            "refuse_hub": refuse_hub,
            "result": str(result),
        }
        Path(scratch, "task.json").write_text(json.dumps(task), encoding="utf-8")
        Path(scratch, "temporary").mkdir()
        log = folder.with_name(f"{folder.name}-{shim}{'-again' if only else ''}.log")
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                [sys.executable, str(CHILD), str(Path(scratch, "task.json"))],
                cwd=folder,
                env=environment(shim, scratch),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if done.returncode != 0 or not result.exists():
            tail = log.read_text(encoding="utf-8")[-4000:]
            raise SystemExit(f"{tail}\n{suite.name}, shim {shim}: the process ended with {done.returncode}")
        return dict(json.loads(result.read_text(encoding="utf-8")))


def environment(shim: str, scratch: str) -> dict[str, str]:
    """The same for both modes but for the shim's own switch: no hub, no GPU, nothing of this machine's caches."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GEMMA4_COMPAT_", "PYTEST_"))}
    kept |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(Path(scratch, "hub")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",  # node ids that are made from sets
        "TMPDIR": str(Path(scratch, "temporary")),
    }
    return kept | ({"GEMMA4_COMPAT_DISABLE": "all"} if shim == "off" else {})


# Comparing


@dataclass
class Comparison:
    """What two runs of the same tests say."""

    executed: int
    identical: int
    differences: dict[str, dict[str, list[str]]]
    flaky: dict[str, dict[str, list[str]]]


def compare(
    off: Mapping[str, str],
    on: Mapping[str, str],
    rerun: Callable[[str, list[str]], Mapping[str, str]] | None = None,
) -> Comparison:
    """Every test of either run. What differs is run again alone, in both modes.

    Flaky is only what the shim-off runs alone show to be: every outcome that was seen with the shim on was seen
    without it as well.
    """
    everything = sorted(off.keys() | on.keys())
    seen = {
        nodeid: {"off": [off.get(nodeid, "absent")], "on": [on.get(nodeid, "absent")]}
        for nodeid in everything
        if off.get(nodeid, "absent") != on.get(nodeid, "absent")
    }
    for _ in range(RERUNS if rerun is not None and seen else 0):
        for mode in ("off", "on"):
            outcomes = rerun(mode, list(seen))  # type: ignore[misc]
            for nodeid, both in seen.items():
                both[mode].append(outcomes.get(nodeid, "absent"))
    executed = [
        name for name in everything if is_executed(off.get(name, "absent")) or is_executed(on.get(name, "absent"))
    ]
    flaky = {nodeid: both for nodeid, both in seen.items() if set(both["on"]) <= set(both["off"])}
    return Comparison(
        executed=len(executed),
        identical=sum(nodeid not in seen for nodeid in executed),
        differences={nodeid: both for nodeid, both in seen.items() if nodeid not in flaky},
        flaky=flaky,
    )


def problems(suite: Suite, comparison: Comparison, off: Mapping[str, Any], on: Mapping[str, Any]) -> Iterator[str]:
    """Every reason for which the run is not the proof it is meant to be, one line each."""
    outcomes: dict[str, str] = on["outcomes"]
    for nodeid, both in comparison.differences.items():
        if matching(suite.expected_differences, nodeid) is None:
            yield f"{nodeid}: off {both['off']}, on {both['on']}"
    for pattern, reason in suite.expected_differences.items():
        ran = [nodeid for nodeid in outcomes if matching({pattern: ""}, nodeid) and is_executed(outcomes[nodeid])]
        if ran and not any(nodeid in comparison.differences for nodeid in ran):
            yield f"{pattern} is an expected difference ({reason}) but does not differ any more"
    for mode, result in (("off", off), ("on", on)):
        for nodeid, outcome in result["outcomes"].items():
            if outcome == "cannot be collected":
                yield f"{nodeid}: cannot be collected, shim {mode}"
        if result["exit code"] not in (0, 1):
            yield f"pytest ended with {result['exit code']}, shim {mode}"
        for patch_id, (state, reason) in result["states"].items():
            if state == "failed":
                yield f"{patch_id} failed to apply: {reason}"
    for patch_id, (state, _) in off["states"].items():
        if state != "skipped":
            yield f"{patch_id} is {state} with the shim off"
    if off["through"]:
        yield f"repaired functions were called with the shim off: {', '.join(off['through'])}"
    for patch_id, labels in on["overridden"].items():
        yield f"{patch_id}: {', '.join(labels)} were replaced by somebody else"
    if "applied" not in {state for state, _ in on["states"].values()}:
        yield "no patch was applied with the shim on"
    if not on["through"]:
        yield "no test went through a repaired function"
    if not comparison.executed:
        yield "no test was executed"


def summarize(
    suite: Suite, folder: Path, comparison: Comparison, off: Mapping[str, Any], on: Mapping[str, Any]
) -> dict[str, Any]:
    """The suite's part of the results file."""
    files = sorted(str(path.relative_to(folder)) for path in (folder / "tests").rglob("test_*.py"))
    expected = {
        nodeid: {"reason": suite.expected_differences[pattern], **both}
        for nodeid, both in comparison.differences.items()
        if (pattern := matching(suite.expected_differences, nodeid)) is not None
    }
    kinds = {mode: Counter(value.split(":")[0] for value in run["outcomes"].values()) for mode, run in runs(off, on)}
    return {
        "gemma4_compat": on["gemma4_compat"],
        "collected": on["collected"],
        "sampled out": on["sampled out"],
        "deselected": sum(on["deselected"].values()),
        "executed": comparison.executed,
        "identical": comparison.identical,
        "outcomes": {mode: dict(sorted(counts.items())) for mode, counts in kinds.items()},
        "different": {key: value for key, value in comparison.differences.items() if key not in expected},
        "expected differences": expected,
        "flaky": comparison.flaky,
        "failed off and on": {
            nodeid: outcome
            for nodeid, outcome in sorted(off["outcomes"].items())
            if on["outcomes"].get(nodeid) == outcome and outcome.startswith(("failed", "error"))
        },
        "tests through a repaired function": dict(sorted(on["through"].items())),
        "applied": [patch_id for patch_id, (state, _) in on["states"].items() if state == "applied"],
        "files": {name: one_in for name, one_in in suite.files.items() if name in files},
        "files not run": {
            name: suite.not_run.get(name, "not in the table") for name in files if name not in suite.files
        },
        "deselected because": {
            pattern: {"reason": suite.deselected[pattern], "tests": count}
            for pattern, count in sorted(on["deselected"].items())
        },
        "wall_s": {mode: run["wall_s"] for mode, run in runs(off, on)},
    }


def runs(off: Mapping[str, Any], on: Mapping[str, Any]) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    return ("off", off), ("on", on)


def twice(suite: Suite, folder: Path, *, refuse_hub: bool = True) -> tuple[dict[str, Any], list[str]]:
    """Off, on, the differing ones again: the suite's part of the results file, and what is wrong."""
    off, on = (run(suite, folder, shim=mode, refuse_hub=refuse_hub) for mode in ("off", "on"))

    def rerun(mode: str, nodeids: list[str]) -> dict[str, str]:
        return dict(run(suite, folder, shim=mode, only=nodeids, refuse_hub=refuse_hub)["outcomes"])

    comparison = compare(off["outcomes"], on["outcomes"], rerun)
    return summarize(suite, folder, comparison, off, on), list(problems(suite, comparison, off, on))


# The command


def main(arguments: list[str]) -> int:
    suites = read_suites(TABLE)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--cache", type=Path, help="keep the fetched tests and the logs there")
    parser.add_argument("--suite", action="append", choices=suites, help="only this one")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="one in N of what the table takes")
    options = parser.parse_args(arguments)
    chosen = [suites[name] for name in options.suite or suites]
    missing = sorted({name for suite in chosen for name in (suite.name, *suite.requires) if not version_of(name)})
    if missing:
        raise SystemExit(f"upstream's tests need more packages: pip install {' '.join(missing)}")
    with tempfile.TemporaryDirectory() as scratch:
        cache = (options.cache or Path(scratch)).resolve()
        results: dict[str, Any] = {}
        found: list[str] = []
        for suite in chosen:
            version = version_of(suite.name)
            assert version is not None
            files = {name: one_in * options.sample for name, one_in in suite.files.items()}
            folder, digest = fetch(suite, version, cache)
            result, wrong = twice(replace(suite, files=files), folder)
            results[suite.name] = {"version": version, "sha256": digest, **result}
            found += [f"{suite.name}: {line}" for line in wrong]
            print(table_row(suite.name, results[suite.name]), flush=True)
    report = {
        "command": command(options),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": {name: version_of(name) for name in STACK},
        "python": platform.python_version(),
        "executed": sum(result["executed"] for result in results.values()),
        "identical": sum(result["identical"] for result in results.values()),
        "problems": found,
        "suites": results,
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{report['executed']} executed, {report['identical']} identical shim off and on")
    for suite_name, result in results.items():
        for nodeid, both in {**result["flaky"], **result["expected differences"]}.items():
            print(f"{suite_name}: {nodeid}: {both}")
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


def table_row(name: str, result: Mapping[str, Any]) -> str:
    outcomes = ", ".join(f"{mode} {result['outcomes'][mode]} in {result['wall_s'][mode]} s" for mode in ("off", "on"))
    return (
        f"{name} {result['version']}: {result['collected']} collected, {result['deselected']} deselected, "
        f"{result['sampled out']} not in the sample; {outcomes}; "
        f"{result['executed']} executed, {result['identical']} identical, {len(result['flaky'])} flaky"
    )


def command(options: argparse.Namespace) -> str:
    """The command with which anybody repeats the run: no folder of this machine."""
    parts = ["python", "tools/upstream_suites.py"]
    for name in options.suite or ():
        parts += ["--suite", name]
    if options.sample != 1:
        parts += ["--sample", str(options.sample)]
    if options.out is not None and not options.out.is_absolute():
        parts += ["--out", options.out.as_posix()]
    return shlex.join(parts)


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
