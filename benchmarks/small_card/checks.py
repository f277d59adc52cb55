"""What does `gemma4-compat check` say of a real shape on a card with little memory, and of four planted faults?

python benchmarks/small_card/checks.py --shape E2B --out FILE.json [--free 12,8,6] [--full 8] [--only faults,12GiB]
    [--limit 480]

Random weights in the real shape and a rank-16 adapter on the language model. A tensor of this process fills the card,
so that the named GiB are free; `--quick` checks them, and those in `--full` are also checked at length, last. The
faults: a budget that other programs have taken (`--vram` asks for 2 GiB more than the last of the sizes), a patch that
is off, an adapter that does not fit, a full disk (a tmpfs as TMPDIR: where it cannot be mounted, the result says so).
The last three run at once on the whole card, with `--vram`. No figure of theirs is a speed.

Exit code 1: a check had another exit code than it should, or did not say what it should.

`--shape tiny` needs no GPU: nothing is filled then, and the budget is not a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import Data  # noqa: E402
from benchmarks.decoding import models  # noqa: E402

GIB = 1 << 30
#: Off, what is offloaded stays in bf16, silently.
PATCH = "transformers-quantize-offloaded"
#: Budgets for which the plan offloads decoder layers: per-layer embeddings, which leave first, are not quantized.
STREAMED = {"E2B": "1.5GiB", "E4B": "2.5GiB"}
#: Tokens to plan for in a quick check: its longest text has 544, and a plan for more says little about its peaks.
QUICK_CONTEXT = 576
GOOD = "The same weights gave the same bits in"
TAKEN = "ther programs hold"
#: Builds the checkpoint and adapters, in a process whose memory on the card is gone when it ends.
BUILD = """
import json, sys
from pathlib import Path
from benchmarks.decoding import models
print(json.dumps(models.build(sys.argv[1], Path(sys.argv[2]))))
"""


@dataclass(frozen=True)
class Run:
    """One run of the command, the exit code that it should have, and what it should say."""

    name: str
    arguments: list[str]
    code: int
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def built(shape: str, folder: Path) -> Data:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", BUILD, shape, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
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


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[str | None]:
    """``folder`` is the place of a disk with 128 KiB left; gives None, or why it cannot be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        yield str(error)
        return
    if done.returncode:
        yield f"mount: {done.stderr.strip() or done.returncode}"
        return
    try:
        (folder / "filler").write_bytes(b"x" * ((64 << 20) - (128 << 10)))
        yield None
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def filled(free: int) -> Iterator[bool]:
    """Inside, a tensor leaves ``free`` GiB of the card; whether there is one."""
    import torch

    if not torch.cuda.is_available():
        yield False
        return
    there = torch.cuda.mem_get_info()[0]
    if there < free * GIB:
        raise SystemExit(f"the card has {there / GIB:.1f} GiB free, not {free}")
    ballast = torch.empty(there - free * GIB, dtype=torch.uint8, device=0)
    try:
        yield True
    finally:
        del ballast
        torch.cuda.empty_cache()


def check(run: Run, minutes: float) -> Data:
    """Exit code, seconds, what it said, its report (None if it wrote none), and what it should have said."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "gemma4_compat", "check", *run.arguments]
        command += ["--minutes", f"{minutes:.2f}", "--json", str(file)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        started = time.perf_counter()
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path} | run.environment, capture_output=True, text=True
        )
        seconds = round(time.perf_counter() - started, 1)
        report = json.loads(file.read_text()) if file.exists() else None
    said = f"{done.stdout.strip()}\n{'' if report else done.stderr.strip()}".strip()
    said = "\n".join(text for text in said.splitlines() if str(file) not in text)
    return judged(run, done.returncode, said) | {"seconds": seconds, "report": report}


def judged(run: Run, code: int, said: str) -> Data:
    """Whether a run ended as it should: ``good``; if not, ``missing`` says what it did not say, wrapped or not."""
    words = " ".join(said.split())
    missing = [word for word in run.words if word not in words]
    good = code == run.code and not missing
    asked = [word for word in run.arguments if not Path(word).is_absolute()]
    ended = {"arguments": asked, "code": code, "should_be": run.code, "good": good, "missing": missing}
    return ended | {"said": said.splitlines()[-30:]}


def verdict(entry: Data) -> str:
    """In a sentence: of its report, or the last line that it printed."""
    return str(entry["report"]["verdict"]["text"] if entry["report"] else (entry["said"] or [""])[-1])


def line(name: str, entry: Data) -> str:
    """A run, and the peaks of its placements beside the planned ones, as printed."""
    if "left_out" in entry:
        return f"{name}: left out, {entry['left_out']}"
    lines = [f"{name}: {'as it should be' if entry['good'] else 'NOT AS IT SHOULD BE'}, exit {entry['code']}, "]
    lines[0] += f"{entry['seconds']} s. {verdict(entry)}"
    lines += [f"  it did not say {word!r}" for word in entry["missing"]]
    for place in entry["report"]["placements"] if entry["report"] else ():
        if place["planned"] and place["running_peak"]:
            planned = place["planned"]["loading"], max(place["planned"]["prefill"], place["planned"]["decode"])
            measured = place["loading_peak"], place["running_peak"]
            pairs = [f"{a / GIB:.2f} of {b / GIB:.2f}" for a, b in zip(measured, planned)]
            lines.append(f"  {place['title']}, GiB of those planned: loading {pairs[0]}, running {pairs[1]}")
    if not entry["good"]:
        lines += [f"  | {text}" for text in entry["said"]]
    return "\n".join(lines)


class Checks:
    """All runs of a shape; the file is written after each.

    Args:
        options: of the command line.
        folder: of checkpoint and adapters.
        found: what the file has; ``runs`` is filled.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, found: Data) -> None:
        self._options, self._folder, self._found = options, folder, found
        self._began, self._longest = options.began, 0.0
        self._sizes = [int(size) for size in options.free.split(",")]
        self._plain = [str(folder / "checkpoint"), "--adapter", str(folder / "adapter")]
        self._quick = ["--quick", "--context", str(QUICK_CONTEXT)]

    def run(self) -> None:
        """Those that the command line names: a size, the faults, the other sizes, sizes at length."""
        for size in self._sizes:
            if self._wanted(f"{size}GiB"):
                with filled(size) as is_filled:
                    self._one(self._size(size, filled=is_filled))
            if size == self._sizes[0] and self._wanted("faults"):
                self._faults()
        for size in [int(size) for size in self._options.full.split(",") if size]:
            with filled(size):
                self._one(Run(f"{size}GiB-full", self._plain, 0, [GOOD]))

    def _wanted(self, name: str) -> bool:
        return not self._options.only or name in self._options.only.split(",")

    def _size(self, size: int, *, filled: bool) -> Run:
        if filled and size == self._sizes[-1]:
            asked = f"{size + 2}GiB"
            words = [GOOD, TAKEN, f", not {asked}"]
            return Run(f"{size}GiB", [*self._plain, *self._quick, "--vram", asked], 0, words)
        return Run(f"{size}GiB", [*self._plain, *self._quick], 0, [GOOD, *([TAKEN] if filled else [])])

    def _faults(self) -> None:
        budget = f"{self._sizes[-1]}GiB"
        streamed = [*self._plain, *self._quick, "--vram", STREAMED.get(self._options.shape, budget)]
        quick = [*self._plain, *self._quick, "--vram", budget]
        other = [self._plain[0], "--adapter", str(misfit(self._folder)), *self._quick, "--vram", budget]
        with full_disk(self._folder / "full") as refused, ThreadPoolExecutor() as together:
            off = {"GEMMA4_COMPAT_DISABLE": PATCH}
            runs = [
                Run("patch", streamed, 1, ["other bits for", f"Off: {PATCH}."], off),
                Run("adapter", other, 1, ["the adapter does not fit this base (shape)"]),
            ]
            if refused:
                self._note("disk", {"left_out": refused})
            else:
                at = {"TMPDIR": str(self._folder / "full")}
                runs.append(Run("disk", quick, 1, ["No space left on device", "The disk is full."], at))
            if (minutes := self._minutes([run.name for run in runs])) is None:
                return
            started = {together.submit(check, run, minutes): run.name for run in runs}
            for done in as_completed(started):
                self._note(started[done], done.result() | {"at_once": len(runs)})

    def _one(self, run: Run) -> None:
        if (minutes := self._minutes([run.name])) is not None:
            self._note(run.name, check(run, minutes))

    def _minutes(self, names: list[str]) -> float | None:
        """What is left for runs; None if that is less than the longest one took: they are left out then."""
        left = self._began + self._options.limit - time.monotonic()
        if left > self._longest:
            return min(self._options.minutes, left / 60)
        for name in names:
            self._note(name, {"left_out": f"{left:.0f} s were left"})
        return None

    def _note(self, name: str, entry: Data) -> None:
        self._found["runs"][name] = entry
        self._longest = max(self._longest, entry.get("seconds", 0.0))
        print(f"[{time.monotonic() - self._began:.0f} s] {line(name, entry)}", flush=True)
        self._options.out.parent.mkdir(parents=True, exist_ok=True)
        self._options.out.write_text(json.dumps(self._found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--free", default="12,8,6", help="GiB")
    parser.add_argument("--full", default="", help="GiB: also without --quick")
    parser.add_argument("--minutes", type=float, default=5, help="of one run")
    parser.add_argument("--limit", type=float, default=3600, help="seconds: what would end later is left out")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    options.began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=models.work_folder(options.shape)) as name:
        found = built(options.shape, Path(name)) | {"shape": options.shape, "runs": {}}
        print(f"[{time.monotonic() - options.began:.0f} s] built {options.shape}", flush=True)
        Checks(options, Path(name), found).run()
    return 0 if all(entry.get("good", True) for entry in found["runs"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
