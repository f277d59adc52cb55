"""Run the case in one interpreter, in every way, and compare the outcomes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.world.interpreters.ways import NEEDED, ROOT, STUB_ONLY, WAYS, Given, environment

LIMIT = 600  # seconds for one; ten or so where nothing else runs
_ASK = """
import importlib.util, json, platform, sys
libraries = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")
found = {"python": platform.python_version(), "versions": {}}
try:
    for name in libraries:
        found["versions"][name] = __import__(name).__version__
except ImportError as error:
    found["missing"] = f"{name}: {error}"
found["tools"] = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
print("\\n" + json.dumps(found))
"""


def build_samples(folder: Path) -> None:
    """The tiny checkpoint and its adapters, built by this interpreter."""
    build = (
        "import sys; from pathlib import Path; from gemma4_compat._lab.workspace import Workspace; "
        "Workspace.build(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", build, str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=LIMIT, capture_output=True, text=True)
    write_requirements(folder)


def write_requirements(folder: Path) -> None:
    """A file for the command ``needed``."""
    (folder / "requirements.txt").write_text("transformers==5.6.2\naccelerate==1.13.0\n", encoding="utf-8")


def everything(
    python: str, names: list[str], samples: Path, scratch: Path, size: str | None = None
) -> Iterator[dict[str, Any]]:
    """One result for each way, as they come; ``problem`` is empty where the outcome is that of plain ``python``."""
    ask = [python, "-c", _ASK, *(module for module, _ in NEEDED.values())]
    done = subprocess.run(ask, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    asked = json.loads(done.stdout.strip().rpartition("\n")[2])
    tools = asked.pop("tools")
    size = size or ("stub" if "missing" in asked else "model")
    expected: dict[str, Any] = {}
    for name in names:
        if name in NEEDED and NEEDED[name][0] not in tools:
            print(f"{asked['python']} {name}: not run, pip install {NEEDED[name][1]}", flush=True)
            continue
        if name == "PyInstaller" and "missing" not in asked:
            print(
                f"{asked['python']} {name}: not run, its program is without the libraries, and this environment is not"
            )
            continue
        one = "stub" if name in STUB_ONLY else size
        if one not in expected:
            expected[one] = once(python, "python", one, samples, scratch)[0]
        begun = time.perf_counter()
        outcome, error = once(python, name, one, samples, scratch)
        problem = error or difference(expected[one], outcome, documented=name != "-OO")
        seconds = round(time.perf_counter() - begun, 1)
        result = {**asked, "way": name, "size": one, "problem": problem, "seconds": seconds, "outcome": outcome}
        print(f"{asked['python']} {name} ({one}, {seconds} s): {problem or 'as expected'}", flush=True)
        yield result


def once(python: str, name: str, size: str, samples: Path, scratch: Path) -> tuple[dict[str, Any], str]:
    """The outcome, and what went wrong if there is none."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    try:
        command = WAYS[name](Given(python, size, samples, folder))
    except subprocess.CalledProcessError as error:
        said = error.stderr if isinstance(error.stderr, str) else (error.stderr or b"").decode(errors="replace")
        return {}, f"not built: {' '.join(said.split())[-200:]}"
    try:
        done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {}, f"not over after {LIMIT} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    if not lines:
        return {}, f"exit {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
    outcome = json.loads(lines[-1])
    return outcome, outcome.get("error", "")


def difference(expected: dict[str, Any], outcome: dict[str, Any], *, documented: bool = True) -> str:
    """What is not as in plain ``python``; empty where nothing is. Without docstrings, commands have less to say."""
    if not documented:
        expected, outcome = (
            {**one, "commands": {name: said["exit"] for name, said in one["commands"].items()}}
            for one in (expected, outcome)
        )
    wrong = [
        f"{key}: {outcome.get(key)!r}, expected {value!r}"
        for key, value in expected.items()
        if outcome.get(key) != value
    ]
    if outcome.get("difference", 0.0) != 0.0 or outcome.get("failed") or not outcome.get("reverted"):
        wrong.append(f"not exact, failed or not reverted: {outcome}")
    return "; ".join(wrong)[:600]
