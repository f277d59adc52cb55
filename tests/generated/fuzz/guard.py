"""Run one input and judge what came of it: an answer or one error, in bounded time and memory, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from gemma4_compat import Gemma4CompatError
from gemma4_compat._engine.io import patterns

_LONGEST_MESSAGE = 10_000  # characters; an error is a message, not a copy of the input
#: Seconds in which an input that neither ran nor waited for a processor, but for this part of them, waits.
_LOOK, _IDLE = 4.0, 0.02
MIB = 1 << 20


class BoundError(BaseException):
    """The input is over its time. No reader catches it."""


class ViolationError(Exception):
    """What a reader did is not what is promised; the message says which promise, in a few words."""


@dataclass(frozen=True)
class Bound:
    """What one input may cost: a constant, and more for each byte of it, of which ``counted`` count at most.

    Attributes:
        seconds: of processor time.
        seconds_per_mib: more, for each MiB of the input.
        mib: of memory beyond what the process had before.
        mib_per_mib: more, for each MiB of the input.
        counted: the most bytes that count: beyond the limits of a reader nothing is read.
    """

    seconds: float
    seconds_per_mib: float
    mib: float
    mib_per_mib: float
    counted: int = 16 * MIB

    def time(self, nbytes: int) -> float:
        """Seconds that an input of that size may take."""
        return self.seconds + self.seconds_per_mib * min(nbytes, self.counted) / MIB

    def memory(self, nbytes: int) -> float:
        """MiB that it may take."""
        return self.mib + self.mib_per_mib * min(nbytes, self.counted) / MIB


@dataclass(frozen=True)
class Outcome:
    """What came of one input.

    Attributes:
        kind: "answer" or "error", which are good; "traceback", "over time", "over memory", "violation".
        signature: equal for inputs that fail for one reason; empty where the outcome is good.
        detail: the message or the end of the traceback.
        seconds: processor time.
        mib: the peak of memory beyond what the process had before.
    """

    kind: str
    signature: str
    detail: str
    seconds: float
    mib: float

    @property
    def good(self) -> bool:
        """Whether it is what is promised."""
        return self.kind in ("answer", "error")


class Guard:
    """Runs inputs in ``folder``: they may write below it, except into their own files, and nowhere else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inputs = folder / "in"
        self.out = folder / "out"
        self._events: list[str] | None = None
        sys.addaudithook(self._audit)

    def run(self, call: Callable[[], Any], nbytes: int, bound: Bound) -> Outcome:
        """The outcome of ``call`` on the files that lie in :attr:`inputs`."""
        before = _snapshot(self.inputs)
        self._events = events = []
        base = _reset_peak()
        started = time.process_time()
        kind, signature, detail = "answer", "", ""
        try:
            with _alarm(bound.time(nbytes)):
                call()
        except Gemma4CompatError as error:
            kind = "error"
            if len(str(error)) > _LONGEST_MESSAGE:
                kind, signature, detail = "violation", f"a message too long: {_place(error)}", str(error)[:300]
        except BoundError as error:
            kind, signature = "over time", f"{str(error) or 'over time'}: {_place(error)}"
        except MemoryError as error:
            kind, signature = "over memory", f"over memory: {_place(error)}"
        except ViolationError as error:
            kind, signature, detail = "violation", str(error).partition("\n")[0], str(error)
        except BaseException as error:  # noqa: BLE001 - this is what is looked for
            kind, signature = "traceback", f"{type(error).__name__}: {_place(error)}"
            detail = _ending(error)
        finally:
            self._events = None
        seconds, mib = time.process_time() - started, _peak_since(base)
        if kind in ("answer", "error"):
            changed = "" if _snapshot(self.inputs) == before else "a file of the input was changed"
            if problem := next(iter(events), "") or changed:
                kind, signature = "violation", problem
            elif seconds > bound.time(nbytes):
                kind, signature = "over time", f"over time: {kind} after {bound.time(nbytes):.0f} s"
            elif mib > bound.memory(nbytes):
                kind, signature, detail = "over memory", "over memory at its end", f"{mib:.0f} MiB"
        return Outcome(kind, signature, detail, seconds, mib)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what no reader may do: write elsewhere, reach the network, start a program.

        One is allowed: the child that tries regular expressions, whose code is a constant.
        """
        if self._events is None:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and isinstance(path, (str, bytes)) and not self._may_write(os.fsdecode(path)):
                self._events.append(f"a file outside OUT was opened to be written: {_plain(path)}")
        elif event in _CHANGES:
            if event == "os.mkdir" and os.path.isdir(arguments[0]):  # noqa: PTH112
                return  # it is there: nothing is made
            for path in arguments[: _CHANGES[event]]:
                if isinstance(path, (str, bytes)) and not self._may_write(os.fsdecode(path)):
                    self._events.append(f"{event} outside OUT: {_plain(path)}")
        elif event in _FORBIDDEN and not (event == "subprocess.Popen" and patterns._CHILD in arguments[1]):
            self._events.append(f"{event} was called")

    def _may_write(self, path: str) -> bool:
        whole = os.path.abspath(path)  # noqa: PTH100 - a Path would resolve links through the audited calls
        if whole == str(self.inputs) or whole.startswith(f"{self.inputs}{os.sep}"):
            return False
        return whole == os.devnull or whole.startswith((f"{self.folder}{os.sep}", "/proc/self/"))


#: Audit events that change files, and how many of their first arguments are paths.
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.truncate", "os.utime"), 1),
    **dict.fromkeys(("os.rename", "os.link"), 2),
    "shutil.rmtree": 1,
}
_FORBIDDEN = frozenset(
    [
        *("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"),
        *("socket.connect", "socket.getaddrinfo", "socket.bind", "webbrowser.open"),
    ]
)


def _plain(path: Any) -> str:
    return os.fsdecode(path)[:80].encode("ascii", "backslashreplace").decode()


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise :class:`BoundError` inside after so much processor time, or when it waits for something (a pipe)."""
    began = _busy()

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.5)  # again, in case a library took it for one of its own
        raise BoundError

    def look(_number: int, _frame: FrameType | None) -> None:
        nonlocal began
        former, began = began, _busy()
        if 0 <= began - former < _IDLE * _LOOK:  # less than 0: a child has ended
            raise BoundError("it waits")

    former = signal.signal(signal.SIGPROF, stop), signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _LOOK, _LOOK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former[0])
        signal.signal(signal.SIGALRM, former[1])


def _busy() -> float:
    """Seconds that this process and its children ran, or would have run if others had not: a machine may be busy."""
    return time.process_time() + sum(_scheduled(process) for process in ("self", *_children()))


def _children() -> list[str]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as stream:  # noqa: PTH123 - it runs in a signal handler
            return stream.read().split()
    except OSError:
        return []


def _scheduled(process: str) -> float:
    """Seconds that a process waited for a processor; with those that it ran where it is not this one."""
    try:
        with open(f"/proc/{process}/schedstat") as stream:  # noqa: PTH123 - it runs in a signal handler
            ran, waited, _ = map(int, stream.read().split())
    except (OSError, ValueError):  # it is over, or no Linux tells
        return 0.0
    return (waited if process == "self" else ran + waited) / 1e9


def _snapshot(folder: Path) -> tuple[Any, ...]:
    """What is in a folder: names, kinds, sizes, times."""
    found: list[Any] = []
    for root, folders, files in os.walk(folder):
        for name in sorted([*folders, *files]):
            state = os.lstat(os.path.join(root, name))  # noqa: PTH118 - names that are no text
            found.append((root, name, state.st_mode, state.st_size, state.st_mtime_ns, state.st_ino))
    return tuple(found)


def _reset_peak() -> int:
    """Let the kernel forget the peak of this process; returns what it holds, in KiB. 0 where there is no /proc."""
    try:
        with open("/proc/self/clear_refs", "w") as stream:  # noqa: PTH123 - it runs for every input
            stream.write("5")
        return status("VmRSS:")
    except OSError:
        return 0


def _peak_since(before: int) -> float:
    return max(0, status("VmHWM:") - before) / 1024 if before else 0.0


def status(name: str) -> int:
    """A size of this process in KiB, such as "VmSize:"."""
    with open("/proc/self/status") as stream:  # noqa: PTH123 - it runs for every input
        return next(int(line.split()[1]) for line in stream if line.startswith(name))


def _place(error: BaseException) -> str:
    """The innermost function of the package on the way to the error, and the library it left through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_globals["__name__"] != __name__]
    ours = [frame for frame in frames if "gemma4_compat/" in frame.f_code.co_filename]
    if not ours:
        return "outside the package"
    code = ours[-1].f_code
    after = frames[-1].f_globals.get("__name__", "").partition(".")[0]
    where = f"{code.co_filename.rpartition('gemma4_compat/')[2]} {code.co_name}"
    return where if frames[-1] is ours[-1] else f"{where} > {after}"


def _ending(error: BaseException) -> str:
    lines = traceback.format_exception(error, limit=-6)
    return "".join(lines)[-3000:]
