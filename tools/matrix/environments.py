"""An environment for each stack: this environment's torch, everything else of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.matrix.stacks import ROOT

_VERSIONS = (
    "import json, platform; from importlib.metadata import version; print(json.dumps({'python': "
    "platform.python_version()} | {name: version(name) for name in ('torch', 'transformers', 'accelerate', 'peft', "
    "'bitsandbytes', 'huggingface_hub', 'tokenizers', 'safetensors', 'packaging')}))"
)


def build(
    folder: Path,
    requirements: Sequence[str],
    *,
    options: Sequence[str] = (),
    over: bool = False,
    overrides: Sequence[str] = (),
) -> Path:
    """A virtual environment with these requirements and this environment's torch. Returns its Python.

    Args:
        folder: its place; what is there is removed.
        requirements: what it has, and no more than these need.
        options: of ``uv pip install``.
        over: what this function built there becomes the new one: what both have stays, with its bytecode.
        overrides: requirements that go before what other distributions ask for, beside torch.

    Raises:
        RuntimeError: uv cannot install them; the message is uv's.
    """
    uv = [sys.executable, "-m", "uv"]
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    file = folder / "overrides.txt"
    if not over or not file.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        checked([*uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
        question = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(checked([str(python), "-c", question]).strip())
        (site / "zz_torch.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    file.write_text("\n".join(['torch ; sys_platform == "never"', *overrides, ""]), encoding="utf-8")
    wanted = [
        "--overrides",
        str(file),
        *(["--exact", "--upgrade"] if over else []),
        *options,
        *requirements,
        "packaging",
        "typer",
        "msgspec",
        "wrapt",
        "pytest",
        "attrs",  # PEFT's CorDA imports it, and does not ask for it
    ]
    checked([*uv, "pip", "install", "--quiet", "--python", str(python), *wanted])
    return python


def checked(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or done.stdout.strip() or f"{command[0]} ended with {done.returncode}")
    return done.stdout


def child_environment(packages: Path | None = None) -> dict[str, str]:
    """The environment variables of a stack's processes.

    uv compiles nothing, so Python must be free to: else each process compiles the libraries again, for 9 s of CPU.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GEMMA4_COMPAT_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    path = [str(ROOT), *([str(packages)] if packages else [])]
    return environment | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def versions_in(python: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The releases that another environment holds, Python's with them."""
    done = subprocess.run(
        [str(python), "-c", _VERSIONS], env=dict(environment), capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found
