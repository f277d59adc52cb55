"""Row F28 on a real GPU: offloaded Linear8bitLt, shim off and on. Run it in the root of a checkout:

    python tests/world/gpu/int8_table.py            prints a table; writes $OUT/int8.json (./int8.json without OUT)

Two child processes (int8_checks.py), one with GEMMA4_COMPAT_DISABLE=all. Without a GPU the main device is the CPU and
only "disk" is measured (a smoke test of this file).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

BUILD = (
    "import gemma4_compat, pathlib, sys; from gemma4_compat._lab.workspace import Workspace; "
    "Workspace.build(pathlib.Path(sys.argv[1]))"
)


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="int8-"))
    call([sys.executable, "-c", BUILD, str(folder)], "", check=True)
    results = {}
    for shim in ("off", "on"):
        out = folder / f"{shim}.json"
        code = call(
            [sys.executable, "-m", "tests.world.gpu.int8_checks", str(folder), str(out)],
            "all" if shim == "off" else "",
        )
        results[shim] = json.loads(out.read_text()) if out.is_file() else {"died": code}
        results[shim]["rc"] = code
    target = Path(os.environ.get("OUT", ".")) / "int8.json"
    target.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{'check':58} {'off':42} on")
    names = dict.fromkeys(name for result in results.values() for name in result.get("checks", {}))
    for name in names:
        row = [short(results[shim].get("checks", {}).get(name)) for shim in ("off", "on")]
        print(f"{name:58} {row[0]:42} {row[1]}")
    codes = {shim: result.get("rc") for shim, result in results.items()}
    print(codes, results["on"].get("versions"), results["on"].get("patches"))
    return 0


def call(command: list[str], disable: str, *, check: bool = False) -> int:
    environment = {
        **os.environ,
        "GEMMA4_COMPAT_DISABLE": disable,
        "PYTHONPATH": f"{Path.cwd()}{os.pathsep}" + os.environ.get("PYTHONPATH", ""),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(command, env=environment, check=check).returncode


def short(result: dict | None) -> str:
    if result is None:
        return "-"
    if "error" in result:
        return result["error"][:41]
    return str(result.get("short", result))[:120]


if __name__ == "__main__":
    sys.exit(main())
