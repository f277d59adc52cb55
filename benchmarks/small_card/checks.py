"""What does `gemma4-compat check` say of a real shape on a card with little memory, and of four planted faults?

python benchmarks/small_card/checks.py --shape E2B --out FILE.json [--free 12,8,6] [--minutes 5] [--only patch,disk]

Random weights in the real shape and a rank-16 adapter on the language model. A tensor of this process fills the card,
so that the named GiB are free. The faults, planted with the last of these sizes: a patch that is off, an adapter that
does not fit, a full disk (a tmpfs as TMPDIR, which only root can mount), a budget that other programs have taken.

Exit code 1: a check without a fault was not good, or one with a fault was.

`--shape tiny` needs no GPU: nothing is filled, and the last fault is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import Data  # noqa: E402

GIB = 1 << 30
#: Off, what is offloaded stays in bf16, silently.
PATCH = "transformers-quantize-offloaded"
#: Builds the checkpoint and adapters, in a process whose memory on the card is gone when it ends.
BUILD = """
import json, sys
from pathlib import Path
from benchmarks.decoding import models
print(json.dumps(models.build(sys.argv[1], Path(sys.argv[2]))))
"""


def built(shape: str, folder: Path) -> Data:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, shape, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    done.check_returncode()
    found: Data = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def misfit(folder: Path) -> Path:
    """The adapter with one weight of another width."""
    import torch
    from safetensors.torch import load_file, save_file

    other = folder / "adapter-misfit"
    shutil.copytree(folder / "adapter", other)
    weights = load_file(other / "adapter_model.safetensors")
    name = next(name for name in weights if name.endswith("lora_A.weight"))
    weights[name] = torch.zeros(weights[name].shape[0], weights[name].shape[1] + 32)
    save_file(weights, other / "adapter_model.safetensors", metadata={"format": "pt"})
    return other


def filled(free: int) -> Any:
    """A tensor that leaves ``free`` GiB of the card."""
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()
    return torch.empty(max(0, torch.cuda.mem_get_info()[0] - free * GIB), dtype=torch.uint8, device=0)


def check(arguments: list[str], environment: dict[str, str] | None = None) -> Data:
    """One run of the command: exit code, seconds, what it said, its report (None if it wrote none)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "gemma4_compat", "check", *arguments, "--json", str(file)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        started = time.perf_counter()
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path} | (environment or {}), capture_output=True, text=True
        )
        seconds = round(time.perf_counter() - started, 1)
        report = json.loads(file.read_text()) if file.exists() else None
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return {"code": done.returncode, "seconds": seconds, "said": said[-12:], "report": report}


def runs(folder: Path, sizes: list[int], minutes: float) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Each run: its name, whether it should be good, and the arguments of :func:`check`; the card is filled for it."""
    model, limits = str(folder / "checkpoint"), ["--minutes", f"{minutes:g}"]
    plain = [model, "--adapter", str(folder / "adapter"), *limits]
    ballast = None
    for size in sizes:
        del ballast
        ballast = filled(size)
        yield f"card-{size}GiB", True, {"arguments": plain}
        yield f"card-{size}GiB-quick", True, {"arguments": [*plain, "--quick"]}
    yield "patch", False, {"arguments": [*plain, "--quick"], "environment": {"GEMMA4_COMPAT_DISABLE": PATCH}}
    yield "adapter", False, {"arguments": [model, "--adapter", str(misfit(folder)), *limits, "--quick"]}
    full = folder / "full"
    full.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(full)]).returncode == 0:
        (full / "filler").write_bytes(b"x" * ((64 << 20) - (128 << 10)))
        yield "disk", False, {"arguments": [*plain, "--quick"], "environment": {"TMPDIR": str(full)}}
        subprocess.run(["umount", str(full)], check=True)
    if ballast is not None:
        yield "filled", True, {"arguments": [*plain, "--quick", "--vram", f"{sizes[-1] + 2}GiB"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--free", default="12,8,6")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    room = "/dev/shm" if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 40 * GIB else None
    wrong = 0
    with tempfile.TemporaryDirectory(dir=room) as name:
        found = built(options.shape, Path(name)) | {"shape": options.shape, "runs": {}}
        for run, good, arguments in runs(Path(name), [int(size) for size in options.free.split(",")], options.minutes):
            if options.only and run not in options.only.split(","):
                continue
            found["runs"][run] = entry = check(**arguments) | {"should_be_good": good}
            wrong += (entry["code"] == 0) != good
            print(f"{run}: exit {entry['code']} after {entry['seconds']} s: {entry['said'][-1]}", flush=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
