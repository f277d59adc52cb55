"""A program that PyInstaller froze, with a library that patches are for: without its sources, and with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PyInstaller", reason="needs PyInstaller: pip install pyinstaller")

from gemma4_compat._engine.detection import NO_SOURCE
from tests.helpers import CORE, ROOT, Library, fingerprint_in

pytestmark = pytest.mark.full
_PROGRAM = """
import json
import sys
import warnings

import gemma4_compat
from gemma4_compat._engine.engine import Engine
from gemma4_compat._engine.patch import ActsOn, Kind, Patch, Severity, Target


def tagged(original, *args, **kwargs):
    return "patched", original(*args, **kwargs)


def patches(library):
    return [
        Patch(
            id=f"fakelib-{module}-{name}",
            summary="double is right",
            symptom="silent: double is wrong",
            kind=Kind.REPAIR,
            severity=Severity.WRONG_RESULT,
            acts_on=ActsOn.EVERY_MODEL,
            failure_points=("F0",),
            distribution=library,
            affected=">=1",
            measured="1.0",
            retire_when="double is right",
            reproduce=lambda workspace: None,
            targets=(Target(module=f"{library}.{module}", name=name, replacement=tagged, known={known: "1.0"}),),
        )
        for module, name, known in KNOWN
    ]


found = {"frozen": getattr(sys, "frozen", False), "all": len(gemma4_compat.status())}
engines = {"BARE": Engine(patches("BARE")), "WHOLE": Engine(patches("WHOLE"))}
for engine in engines.values():
    engine.install()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import BARE.core, BARE.copy
    import WHOLE.core, WHOLE.copy
found["said"] = [str(one.message) for one in caught if one.category is gemma4_compat.Gemma4CompatWarning]
for core in (BARE.core, WHOLE.core):
    states = {str(one.state) for one in engines[core.__name__.partition(".")[0]].status().values()}
    found["bare" if core is BARE.core else "whole"] = [sorted(states), core.double(2)]
print(json.dumps(found))
"""
_HEAVY = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "numpy",
    "PIL",
    "scipy",
    "matplotlib",
    "IPython",
)


def _frozen(folder: Path, program: str, libraries: list[Library]) -> Path:
    """The program, frozen into a folder; the last library with its sources."""
    file, hooks = folder / "program.py", folder / "hooks"
    file.write_text(program, encoding="utf-8")
    hooks.mkdir()
    (hooks / f"hook-{libraries[-1].name}.py").write_text("module_collection_mode = 'pyz+py'\n", encoding="utf-8")
    options = ["--noconfirm", "--onedir", "--name=program", f"--additional-hooks-dir={hooks}"]
    options += ["--collect-all=gemma4_compat", *(f"--copy-metadata={library.name}" for library in libraries)]
    options += [f"--exclude-module={name}" for name in (*_HEAVY, "pytest")]
    search = os.pathsep.join([*(str(library.folder) for library in libraries), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": search}
    command = [sys.executable, "-m", "PyInstaller", *options, str(file)]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=600)
    return folder / "dist" / "program" / "program"


def test_what_a_frozen_program_says_and_does(tmp_path: Path) -> None:
    """One sentence for all patches of the library without sources; with the sources that it asks for they apply."""
    libraries = [Library.create(tmp_path / name, copy=CORE) for name in ("bare", "whole")]
    known = [
        (module, name, fingerprint_in(CORE, name)) for module in ("core", "copy") for name in ("double", "triple")
    ]
    program = _PROGRAM.replace("KNOWN", repr(known))
    for name, library in zip(("BARE", "WHOLE"), libraries, strict=True):
        program = program.replace(name, library.name)
    command = [str(_frozen(tmp_path, program, libraries))]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GEMMA4_COMPAT"))}
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    assert "Warning" not in done.stderr
    assert found["frozen"]
    assert found["all"]
    assert found["said"] == [NO_SOURCE]
    assert found["bare"] == [["failed"], 4]
    assert found["whole"] == [["applied"], ["patched", 4]]
