"""How long is each command silent, how much CPU time does it take, and how many lines does it print?

python benchmarks/shim/commands.py [--only plan,scan] [--where terminal,pipe] [--out FILE]

Each command runs in a process of its own, once on a terminal of 80 columns and 24 lines, and once with pipes. A
silence is the time without a byte on either stream, that before the first byte and that after the last one included.
CPU seconds are those of the process and of all children that it waited for; those until the first byte, and in a
silence, say what a machine with nothing else to do would need. `wrong` has options and values that are refused. The
models are tiny and trained (tests/data); nothing is downloaded, and no GPU is used. `serve` ends with SIGTERM once it
listens.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks import common
from gemma4_compat._engine import versions

DATA = common.ROOT / "tests" / "data" / "trained_model"
#: Name and arguments. In these, MODEL and ADAPTER are the trained model's, and OUT is a new folder.
COMMANDS = {
    "--help": "--help",
    "status": "status",
    "list": "list",
    "list AREA": "list offload",
    "explain ID": "explain peft-keep-dispatch",
    "explain AREA": "explain offload",
    "explain ERROR": "explain KeyError: 'sliding_attention'",
    "run": "run -c pass",
    "env": "env",
    "reproduce": "reproduce peft-keep-dispatch",
    "needed": "needed",
    "plan": "plan E2B --vram 8GiB",
    "plan --card": "plan E4B --card RTX 3060",
    "plan-training": "plan-training E2B --vram 8GiB",
    "plan-training, long": "plan-training E4B --vram 8GiB --max-length 8192",
    "scan": "scan ADAPTER",
    "scan BASE": "scan ADAPTER E2B",
    "export": "export ADAPTER OUT --for vllm --base MODEL",
    "merge": "merge MODEL ADAPTER OUT",
    "repair": "repair MODEL OUT --from MODEL",
    "chat": "chat MODEL",
    "serve": "serve MODEL --port 0",
    "check --quick": "check --quick",
    "check --quick MODEL": "check MODEL --quick",
    "doctor ID": "doctor peft-keep-dispatch",
    "doctor --show": "doctor --show peft-adapter-keys",
    "doctor": "doctor",
    "wrong: plan --vram": "plan E2B --vram 8",
    "wrong: plan --card": "plan E2B --card RTX 9999",
    "wrong: plan --quantize": "plan E2B --vram 8GiB --quantize 3bit",
    "wrong: plan MODEL": "plan E9B --vram 8GiB",
    "wrong: plan --context": "plan E2B --vram 8GiB --context 0",
    "wrong: plan --adapter": "plan E2B --vram 8GiB --adapter no-such-folder",
    "wrong: plan-training --vram": "plan-training E2B --vram 8GB/s",
    "wrong: plan-training --r": "plan-training E2B --vram 8GiB --r 0",
    "wrong: scan ADAPTER": "scan no-such-folder E2B",
    "wrong: scan BASE": "scan ADAPTER no-such-folder",
    "wrong: scan --quantize": "scan ADAPTER E2B --quantize 3bit",
    "wrong: export --for": "export ADAPTER OUT --for tgi",
    "wrong: export ADAPTER": "export no-such-folder OUT --for vllm",
    "wrong: merge BASE": "merge no-such-folder ADAPTER OUT",
    "wrong: merge --start": "merge MODEL ADAPTER OUT --start somewhere",
    "wrong: merge --dtype": "merge MODEL ADAPTER OUT --dtype fp8",
    "wrong: repair --from": "repair MODEL OUT --from no-such-folder",
    "wrong: check MODEL": "check no-such-folder",
    "wrong: check --quantize": "check --quantize 3bit",
    "wrong: check --vram": "check --vram 8",
    "wrong: chat MODEL": "chat no-such-folder",
    "wrong: serve --quantize": "serve MODEL --quantize 3bit",
    "wrong: serve --card": "serve MODEL --card RTX 9999",
    "wrong: doctor ID": "doctor no-such-patch",
}
#: Arguments of several words.
PHRASES = ("RTX 3060", "RTX 9999", "KeyError: 'sliding_attention'")
INPUT = b"How many legs has a fox?\n/quit\n"
LISTENING = b"http://"


def words(text: str, out: Path) -> list[str]:
    """The arguments of a command of :data:`COMMANDS`."""
    places = {"MODEL": str(DATA / "model"), "ADAPTER": str(DATA / "adapter"), "OUT": str(out)}
    phrases = "|".join(map(re.escape, PHRASES))
    return [places.get(word, word) for word in re.findall(rf"{phrases}|\S+", text)]


@contextlib.contextmanager
def streams(where: str) -> Iterator[tuple[int, int, int]]:
    """What we read, the other end of it, and what we write input to."""
    if where == "pipe":
        ours, theirs = os.pipe()
        yield ours, theirs, -1
        return
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    settings = termios.tcgetattr(theirs)
    settings[3] &= ~termios.ECHO  # what is typed is not what the command says
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    yield ours, theirs, ours


def measured(arguments: list[str], where: str, *, chats: bool, serves: bool, limit: float) -> dict[str, Any]:
    """One run of a command."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"PYTHONPATH": str(common.ROOT), "HF_HUB_OFFLINE": "1", "TERM": "xterm", "CUDA_VISIBLE_DEVICES": ""}
    with streams(where) as (ours, theirs, keyboard):
        begun = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "gemma4_compat", *arguments],
            stdin=theirs if keyboard >= 0 else subprocess.PIPE if chats else subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        if chats:
            if process.stdin is None:
                os.write(keyboard, INPUT)
            else:
                process.stdin.write(INPUT)
                process.stdin.close()
        late = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        times, spent, said = [begun], [0.0], b""
        with contextlib.suppress(OSError):  # Linux, a terminal whose other end is closed
            while chunk := os.read(ours, 1 << 16):
                times.append(time.monotonic())
                spent.append(cpu_seconds(process.pid))
                said += chunk
                if serves and LISTENING in said:
                    process.terminate()
                    serves = False
        _, status, used = os.wait4(process.pid, 0)
        late.cancel()
        os.close(ours)
        process.returncode = os.waitstatus_to_exitcode(status)
    ended = time.monotonic()
    used_s = used.ru_utime + used.ru_stime
    gaps = [after - before for before, after in zip(times, [*times[1:], ended])]
    computed = [after - before for before, after in zip(spent, [*spent[1:], used_s])]
    return {
        "exit": process.returncode,
        "first_byte_s": round(times[1] - begun, 2) if len(times) > 1 else None,
        "longest_silence_s": round(max(gaps), 2),
        "first_byte_cpu_s": round(spent[1], 2) if len(spent) > 1 else None,
        "longest_silence_cpu_s": round(max(computed), 2),
        "wall_s": round(ended - begun, 2),
        "cpu_s": round(used_s, 2),
        "lines": len(re.sub(rb"\x1b\[\d*m|[^\n]*\r(?!\n)", b"", said).splitlines()),
    }


def cpu_seconds(process: int) -> float:
    """What a process has computed so far, with the children that it waited for; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of the names of commands, with commas (default: all)")
    parser.add_argument("--where", default="terminal,pipe", help="terminal, pipe or both (default)")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a command is ended")
    parser.add_argument("--out", type=Path, help="write the result here too")
    arguments = parser.parse_args()
    out = arguments.out and arguments.out.resolve()
    chosen = [name for name in COMMANDS if any(part in name for part in arguments.only.split(","))]
    rows = []
    print(f"{'command':<28} {'where':<8} exit first byte  silence    wall     CPU lines")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number, name in enumerate(chosen):
            given = words(COMMANDS[name], Path(folder, f"out{number}"))
            for where in arguments.where.split(","):
                if "OUT" in COMMANDS[name]:
                    given = words(COMMANDS[name], Path(folder, f"out{number}-{where}"))
                row = measured(given, where, chats=name == "chat", serves=name == "serve", limit=arguments.limit)
                rows.append({"name": name, "arguments": COMMANDS[name], "where": where, **row})
                print(
                    f"{name:<28} {where:<8} {row['exit']:>4} {row['first_byte_s']!s:>10} "
                    f"{row['longest_silence_s']:>8} {row['wall_s']:>7} {row['cpu_s']:>7} {row['lines']:>5}",
                    flush=True,
                )
                if out:
                    write(rows, out)


def write(rows: list[dict[str, Any]], out: Path) -> None:
    written = {"question": common.question(sys.modules[__name__]), "date": datetime.date.today().isoformat()}
    written |= {"python": platform.python_version(), "cores": os.cpu_count(), "versions": stack()}
    written |= {"load": [round(one, 1) for one in os.getloadavg()], "commands": rows}
    out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def stack() -> dict[str, str | None]:
    """The releases that were measured."""
    names = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")
    return {name: versions.installed(name) for name in names}


if __name__ == "__main__":
    main()
