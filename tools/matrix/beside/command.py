"""``python -m tools.matrix beside``: build each environment, run its processes, and write what came of them."""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools import evidence
from tools.matrix import UsageError, environments
from tools.matrix.beside import stacks, verdicts
from tools.matrix.beside.actions import ACTIONS
from tools.matrix.beside.child import WAYS
from tools.matrix.beside.stacks import Beside

FILE = "beside.json"
LIMIT_S = 1800
#: What a library asks for and does not get: it needs another torch, or a GPU.
WITHOUT = (
    *("torchvision", "torchaudio", "torchao", "torchdata", "torchcodec", "xformers", "vllm", "flash-attn"),
    *("deepspeed", "nvidia-ml-py", "fla-core", "flash-linear-attention", "cut_cross_entropy"),
)
#: The four libraries, and others whose releases a table names.
NAMED = ("trl", "liger-kernel", "triton", "axolotl", "llamafactory", "ms-swift", "unsloth", "unsloth_zoo")
_BUILD = (
    "import sys; from pathlib import Path; from gemma4_compat._lab.workspace import Workspace; "
    "Workspace.build(Path(sys.argv[1]))"
)
_RELEASES = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        continue
print(json.dumps(found))
"""


def beside(options: argparse.Namespace) -> int:
    """Measure, write and print; 1 where a cell is neither as one of the two alone nor one error."""
    known = stacks.read()
    if unknown := [name for name in options.others if name not in known]:
        raise UsageError(f"no library is named {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.others or known if known[name].ci or not options.ci]
    file = options.out / FILE
    bad = []
    for one in chosen:
        try:
            result = measure(one, options.work / "beside", options.actions, keep=options.keep, jobs=options.jobs)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            bad.append(f"{one.name}: {error}")
            print(bad[-1], flush=True)
            continue
        write(file, result, list(known), options.actions)
        wrong = verdicts.bad(result)
        bad += wrong
        seconds = sum(way["seconds"] for way in result["ways"].values())
        print(f"{one.name:<22} {'BAD' if wrong else 'ok '} ({seconds:.0f} s)", *wrong, sep="\n    ", flush=True)
    print(f"\n{len(bad)} cells are not as they should be" if bad else "\nevery cell is as it should be")
    return 1 if bad else 0


def write(file: Path, result: dict[str, Any], order: list[str], actions: Sequence[str] = ()) -> None:
    """Put a result into the file in the place of an earlier one, in the order of matrix.toml.

    ``actions``: only these were done; what is known of the others stays.
    """
    before = evidence.read(file)
    for way, found in before.get(result["name"], {"ways": {}})["ways"].items() if actions else ():
        done = found["actions"] | result["ways"][way]["actions"]
        result["ways"][way] = {**found, "actions": {name: done[name] for name in ACTIONS if name in done}}
    found = {**before, result["name"]: result}
    evidence.write(file, {name: found[name] for name in order if name in found})


def measure(
    one: Beside, work: Path, actions: Sequence[str] = (), *, keep: bool = False, jobs: int = 1
) -> dict[str, Any]:
    """What came of the four ways, ``jobs`` of them at once, in an environment of its own."""
    never = [f'{name} ; sys_platform == "never"' for name in WITHOUT]
    # Entries with the same requirements share an environment.
    folder = work / "-".join(requirement.replace("==", "-") for requirement in [*one.install, *one.pinned[:1]])
    if not (keep and (folder / "overrides.txt").exists()):
        environments.build(folder, [*one.pinned, *one.install], overrides=[*one.pinned, *never])
    python = folder / "bin" / "python"
    environment = environments.child_environment()
    asked = [str(python), "-c", _RELEASES, *one.pins, *NAMED]
    releases = json.loads(environments.checked(asked))
    with tempfile.TemporaryDirectory() as scratch:
        samples = Path(scratch, "samples")
        _run([str(python), "-c", _BUILD, str(samples)], environment | {"GEMMA4_COMPAT_DISABLE": "all"}, scratch)
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            found = pool.map(
                lambda way: _way(python, [one.name, way, str(samples), *actions], environment, scratch), WAYS
            )
            ways = dict(zip(WAYS, found))
    return {
        "name": one.name,
        "called": one.called,
        "module": one.module,
        "releases": dict(sorted(releases.items())),
        "ways": ways,
    }


def _way(python: Path, arguments: list[str], environment: Mapping[str, str], scratch: str) -> dict[str, Any]:
    printed = _run([str(python), "-m", "tools.matrix.beside.child", *arguments], environment, scratch)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def _run(command: list[str], environment: Mapping[str, str], folder: str) -> str:
    done = subprocess.run(
        command, env=dict(environment), cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {' '.join(done.stderr.split())[-500:]}")
    return done.stdout
