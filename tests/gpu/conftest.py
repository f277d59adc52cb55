"""GPU tests run where a CUDA device is found and are skipped, with the reason, elsewhere.

``GEMMA4_COMPAT_GPU_RESULTS=FILE`` writes what they measured to a JSON file (`gpu/run.sh` does that for two stacks).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import _doctor


def _missing() -> str | None:
    try:
        import torch
    except ImportError:
        return "needs torch with CUDA: torch is not installed"
    return None if torch.cuda.is_available() else "needs a CUDA device: torch.cuda.is_available() is False"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    reason = _missing() if mine else None
    for item in mine:
        item.add_marker("gpu")
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def record() -> Iterator[Callable[[str, Any], None]]:
    """``record(name, data)`` keeps a measurement; they are written together at the end of the run."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    measured: dict[str, Any] = {}
    yield measured.__setitem__
    file = os.environ.get("GEMMA4_COMPAT_GPU_RESULTS")
    if file:
        results = {
            "gemma4_compat": gemma4_compat.__version__,
            "device": torch.cuda.get_device_name(0),
            "driver": driver[0] if driver else "unknown",
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            "versions": _doctor.stack(),
            "measured": measured,
        }
        Path(file).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
