"""What the benchmarks share: processes that are told what to measure, in turns, and what is done with the figures.

A worker is a process that imports the stack, says so, and then answers one line of JSON with one line of JSON, until
its input ends. Several can be alive at once, so that two settings are measured in turns: machines drift within
seconds, and a turn drifts less than a process.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import inspect
import json
import math
import os
import queue
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
MARK = "@@ "  # before each line of JSON that a child says
Order = dict[str, Any]
Data = dict[str, Any]


class Process:
    """A child of a benchmark, which is run again with ``--child``; the shim off where ``shim`` is not set.

    ``more``: of its environment.
    """

    def __init__(self, script: Path, *, shim: bool, log: Path, more: dict[str, str] | None = None) -> None:
        environment = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore", PYTHONUNBUFFERED="1")
        environment.pop("GEMMA4_COMPAT_DISABLE", None)
        if not shim:
            environment["GEMMA4_COMPAT_DISABLE"] = "all"
        environment |= more or {}
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(script.resolve()), "--child"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def send(self, order: Order) -> None:
        """Say what to do."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended; its exit code says so
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def said(self, timeout: float) -> str | None:
        """The next line of its output; None at its end.

        Raises:
            queue.Empty: there was none for ``timeout`` seconds.
        """
        return self.lines.get(timeout=max(0.0, timeout))

    def end(self) -> str | None:
        """How it ended, if not well."""
        code = self.process.wait()
        last = self.log.read_text(errors="replace").strip().rpartition("\n")[2][:300]
        return f"the process ended with {code}: {last}" if code else None

    def close(self) -> None:
        """End the process, if it has not ended."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]


class Worker(Process):
    """A child of :func:`serve`: any number of orders, one after another."""

    ready = False

    def wait(self, timeout: float = 120) -> None:
        """Until its imports are behind it, so that nothing else runs while something is timed."""
        if not self.ready:
            self.ready = True
            found = self._answer(timeout)
            if "error" in found:
                raise SystemExit(f"a process could not be started: {found['error']}")

    def __call__(self, order: Order, timeout: float = 170) -> Data:
        """Its answer; ``error`` in it is None unless something was raised, or nothing was heard in time."""
        self.wait()
        self.send(order)
        return {"error": None, **self._answer(timeout)}

    def _answer(self, timeout: float) -> Data:
        while True:
            try:
                line = self.said(timeout)
            except queue.Empty:
                self.close()
                return {"error": f"no end after {timeout:.0f} s"}
            if line is None:
                return {"error": self.end() or "the process has ended"}
            if line.startswith(MARK):
                found: Data = json.loads(line.removeprefix(MARK))
                return found


@contextlib.contextmanager
def workers(script: Path, folder: Path) -> Iterator[Callable[..., Worker]]:
    """Starts workers of ``script``, with the shim on or off and more of an environment if need be, and ends them."""
    started: list[Worker] = []

    def start(shim: bool, **more: str) -> Worker:
        started.append(Worker(script, shim=shim, log=folder / f"log-{len(started)}.txt", more=more))
        return started[-1]

    try:
        yield start
    finally:
        for worker in started:
            worker.close()


def serve(actions: dict[str, Callable[[Order], Data]], *, stack: bool = True) -> int:
    """Be a worker: import the stack (unless told not to), then do what ``order["do"]`` says. A crash is an answer."""
    if stack:
        import bitsandbytes  # noqa: F401
        import peft  # noqa: F401
        from transformers import Gemma4ForConditionalGeneration  # noqa: F401

    def say(data: Data) -> None:
        print(f"{MARK}{json.dumps(data)}", flush=True)

    say({})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            say(actions[order["do"]](order))
        except Exception as error:  # noqa: BLE001  (a crash is a result)
            say({"error": told(error, Path(order["folder"]))})
    return 0


def told(error: Exception, folder: Path) -> str:
    """An exception in a line, without the paths of this machine."""
    text = " ".join(str(error).split()).replace(str(folder), "WORK").replace(str(ROOT), ".")
    return f"{type(error).__name__}: {text[:300]}"


def child(script: Path, shape: str, what: str, work: Path) -> Data:
    """The JSON that ``script`` prints last when it is run once, by itself, with ``--child WHAT WORK``.

    Raises:
        SystemExit: it failed; its standard error is the message.
    """
    command = [sys.executable, str(script.resolve()), "--shape", shape, "--child", what, str(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what} ended with {done.returncode}:\n{done.stderr}")
    found: Data = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


# In the process that has a model


def parts(model: Any, **named: Any) -> Any:
    """The model with these parts of ``train_fast``, and no other."""
    import gemma4_compat

    off: dict[str, Any] = dict.fromkeys(("loss", "mlp", "windows", "products", "graphs"), False)
    return gemma4_compat.train_fast(model, **{**off, **named})


def checkpointing(model: Any, *, offload: bool = False) -> None:
    """Checkpoint each layer. ``offload``: what that keeps is in host memory (transformers 5.17 or newer).

    It is an argument of its own: among those of ``torch.utils.checkpoint`` the method leaves it unread (F112).
    """
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # 5.23 or newer
    enable({"use_reentrant": False}, **({"offload": True} if offload else {}))


# What is done with the figures


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def interval(values: Sequence[float], *, share: float = 0.95, draws: int = 2000) -> tuple[float, float]:
    """Where the median of so many values lies: a bootstrap interval, the same for the same values."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(draws))
    cut = int(draws * (1 - share) / 2)
    return medians[cut], medians[-1 - cut]


def spread(values: Sequence[float]) -> Data:
    """Ratios, summed up."""
    low, middle, high = quartiles(values)
    return {"median": middle, "quartiles": [low, high], "interval_95": list(interval(values)), "of": len(values)}


def rounded(data: Any) -> Any:
    """Four significant digits are more than the machine's drift leaves; infinity becomes a string, for strict JSON."""
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [rounded(value) for value in data]
    if isinstance(data, float):
        return float(f"{data:.4g}") if math.isfinite(data) else str(data)
    return data


def script(benchmark: str) -> str:
    """The path of a benchmark by its name, from the root of the repository."""
    (found,) = FOLDER.glob(f"*/{benchmark}.py")
    return found.relative_to(FOLDER.parent).as_posix()


def question(module: ModuleType) -> str:
    """The first paragraph of a benchmark's docstring, in a line."""
    return " ".join(str(inspect.getdoc(module)).partition("\n\n")[0].split())


def header(script: Path, module: ModuleType, shape: str, options: Sequence[str], note: str | None = None) -> Data:
    """What every result begins with; the machine is added when the checkpoint was built.

    ``note``: what a reader must know of the run and the figures do not say; the report shows it beside them.
    """
    import gemma4_compat

    return {
        "question": question(module),
        "command": " ".join(["python", script.resolve().relative_to(ROOT).as_posix(), *options]),
        "shape": shape,
        "date": datetime.date.today().isoformat(),
        "note": note,
        "gemma4_compat": gemma4_compat.__version__,
        "problems": [],
        "not_run": [],
    }


def write(result: Data, out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(rounded(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def parser(doc: str | None, shapes: Sequence[str], *, minutes: float) -> argparse.ArgumentParser:
    """The options that these benchmarks have in common."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--shape", choices=shapes, help="what is built")
    made.add_argument("--minutes", type=float, default=minutes, help=f"start nothing that ends later ({minutes})")
    made.add_argument("--out", type=Path, help="write the result here, and after every step what there is")
    made.add_argument("--note", help="kept in the result and shown beside it: what else the machine did, say")
    made.add_argument("--work", type=Path, help="folder for the checkpoint (default: /dev/shm, or a temporary one)")
    return made


@contextlib.contextmanager
def temporary(prefix: str, folder: Path) -> Iterator[Path]:
    """A work folder, removed with what was offloaded from it to a disk."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True) as work:
        try:
            yield Path(work)
        finally:
            shutil.rmtree(Path(tempfile.gettempdir()) / f"{Path(work).name}-offload", ignore_errors=True)


def shown(arguments: argparse.Namespace) -> list[str]:
    """The options that decide what is measured, as they are given on a command line."""
    hidden = ("child", "out", "work", "note")
    found: list[str] = []
    for name, value in vars(arguments).items():
        if value is not None and value is not False and name not in hidden:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            found += [f"--{name.replace('_', '-')}"] + [text] * (value is not True)
    return found


def chosen(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, option: str, known: Collection[str]
) -> None:
    """Turn ``A,B``, the value of an option, into a list; a name that is not ``known`` is an error of the parser."""
    names = [name for name in getattr(arguments, option).split(",") if name]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown {option}: {', '.join(unknown)}; known: {', '.join(known)}")
    setattr(arguments, option, names)


def ended(result: Data) -> int:
    """Print the problems of a run. Returns the exit code: 1 if there are any."""
    for problem in result["problems"]:
        print(f"PROBLEM {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0
