"""``canary``: the newest release of everything, pre-releases included."""

from __future__ import annotations

import argparse
import shutil
import subprocess

from tools.matrix import environments, stacks
from tools.matrix.stacks import LIBRARIES


def canary(options: argparse.Namespace) -> int:
    """Everything at its newest, pre-releases included: what the doctor says there. Never fails, always says."""
    folder = options.work / "canary"
    newest = {name: found[-1] for name, found in stacks.releases().items()}
    environment = environments.child_environment()
    try:
        python = environments.build(folder, LIBRARIES, options=["--prerelease=allow", "--upgrade"])
        versions = environments.versions_in(python, environment)
        fresh = {name: versions[name] for name in LIBRARIES if versions[name] != newest[name]}
        if not fresh:
            print(f"nothing newer than the newest stack measured: {', '.join(map(' '.join, newest.items()))}")
            return 0
        print("newer than anything measured: " + ", ".join(map(" ".join, fresh.items())), flush=True)
        done = subprocess.run([str(python), "-m", "gemma4_compat", "doctor"], env=environment, check=False)
        print(f"the doctor's exit code there is {done.returncode}")
    except (RuntimeError, OSError, subprocess.SubprocessError, ValueError) as error:
        print(f"the canary could not be run: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0
