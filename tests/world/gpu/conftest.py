"""GPU tests run where a CUDA device is found. Elsewhere they are deselected, and the summary says why.

``GEMMA4_COMPAT_GPU_RESULTS=FILE`` writes what they measured to a JSON file (`gpu/run.sh` does that for two stacks);
with pytest-xdist each worker writes one of its own, ``FILE`` with its name before the suffix.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._doctor.reproductions import findings


def _missing() -> str | None:
    try:
        import torch
    except ImportError:
        return "needs torch with CUDA: torch is not installed"
    return None if torch.cuda.is_available() else "needs a CUDA device: torch.cuda.is_available() is False"


#: How many tests were left out here.
_left_out = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    for item in mine:
        item.add_marker("gpu")
    if mine and _missing():
        items[:] = [item for item in items if item not in set(mine)]
        config.hook.pytest_deselected(items=mine)
        config.stash[_left_out] = len(mine)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    count = config.stash.get(_left_out, None)  # none of a run by pytest-xdist, whose workers collect
    if reason := _missing():
        terminalreporter.write_line(
            f"{'' if count is None else f'{count} '}tests of tests/world/gpu left out: {reason}"
        )


def run(module: str, *arguments: str, shim: bool, timeout: int = 500, devices: str | None = None) -> dict[str, Any]:
    """The JSON in the last line of ``python -m tests.world.gpu.MODULE ARGUMENTS``, with the shim or all of it
    disabled.

    ``devices``: the CUDA_VISIBLE_DEVICES it gets; None: those of this process.
    """
    environment = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore")
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    if not shim:
        environment["GEMMA4_COMPAT_DISABLE"] = "all"
    command = [sys.executable, "-m", f"tests.world.gpu.{module}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=timeout)
    last = done.stdout.strip().rpartition("\n")[2]
    assert last.startswith("{"), done.stderr[-2000:]
    result: dict[str, Any] = json.loads(last)
    return result


def together(module: str, *arguments: str) -> list[dict[str, Any]]:
    """:func:`run` without the shim and with it; at once where each can have a GPU of its own, else in turn."""
    import torch

    own = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(own)))
    devices = visible.split(",")[:2] if own > 1 else [visible, visible]
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(own, 2)) as pool:
        sides = [
            pool.submit(run, module, *arguments, shim=shim, devices=device)
            for shim, device in zip((False, True), devices, strict=True)
        ]
        return [side.result() for side in sides]


@pytest.fixture(scope="session")
def e2b_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and an adapter in E2B's shape."""
    folder = tmp_path_factory.mktemp("e2b")
    built = run("scenarios", "build", str(folder), shim=False)
    assert built["error"] is None, built
    return folder


@pytest.fixture(scope="session")
def e2b(e2b_folder: Path, record: Callable[[str, Any], None]) -> tuple[Path, dict[str, Any]]:
    """The same folder, and what everything on the GPU takes; its answers are in the folder."""
    reference = run("scenarios", "all_gpu", str(e2b_folder), shim=True)
    assert reference["error"] is None, reference
    record("e2b all_gpu", reference)
    return e2b_folder, reference


@pytest.fixture(scope="session")
def record() -> Callable[[str, Any], None]:
    """``record(name, data)`` keeps a measurement; the file is written each time, for runs that are cut off."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    measured: dict[str, Any] = {}
    results = {
        "gemma4_compat": gemma4_compat.__version__,
        "device": torch.cuda.get_device_name(0),
        "driver": driver[0] if driver else "unknown",
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": findings.stack(),
        "measured": measured,
    }
    wanted, worker = os.environ.get("GEMMA4_COMPAT_GPU_RESULTS"), os.environ.get("PYTEST_XDIST_WORKER")
    file = Path(wanted) if wanted else None
    if file and worker:
        file = file.with_name(f"{file.stem}-{worker}{file.suffix}")

    def keep(name: str, data: Any) -> None:
        measured[name] = data
        if file:
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    return keep
