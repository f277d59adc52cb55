"""How a child ended is always clear, and no child outlives its parent. A fork gives the result of a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._doctor.processes import Process, environment, how
from gemma4_compat._doctor.reproductions import child, children
from gemma4_compat._doctor.reproductions.children import Forks
from tests.unit.commands.helpers import ROOT


@pytest.fixture(
    scope="module", params=[pytest.param("", id="shim on"), pytest.param("all", id="shim off", marks=pytest.mark.full)]
)
def disabled(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def forks(workspace: Any, disabled: str) -> Iterator[Forks]:
    import torch

    if sys.platform != "linux" or torch.cuda.is_available():
        pytest.skip("no forks on this system, or a GPU, which does not survive one")
    with Forks(workspace.folder, disabled) as forks:
        yield forks


def test_a_fork_says_what_a_process_of_its_own_says(workspace: Any, forks: Forks, disabled: str) -> None:
    found = forks("no-such-patch")  # one that dies, and the next is none the worse
    assert found["defect"] is True
    assert found["detail"] == "the process ended with 1: KeyError: 'no-such-patch'"
    command = "accelerate-map-check" if disabled else "accelerate-map-check:reverted"
    found, alone = forks(command), children.alone(command, workspace.folder, disabled=disabled)
    assert {**found, "seconds": 0} == {**alone, "seconds": 0}


def test_a_process_that_cannot_import_the_libraries_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "accelerate.py").write_text("raise ImportError('half an installation')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with Forks(tmp_path) as forks:
        for _ in range(2):
            found = forks("accelerate-map-check")
            assert found["defect"] is True
            assert found["detail"] == "the process ended with 1: ImportError: half an installation"


HANGS = """
import time
from pathlib import Path
from gemma4_compat._doctor import processes
from gemma4_compat._doctor.reproductions import child, children, server
children.TIMEOUT = 1

def answer(command, folder):
    time.sleep({"long": 60, "short": 0}[command])
    return {"command": command}

child.answer = answer
server.Server(Path("nowhere"), processes.events()).run()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_a_reproduction_that_hangs_is_stopped_and_holds_nobody_up() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("0 long\n1 short\n2 none\n")
    process.stdin.flush()
    replies = [json.loads(process.stdout.readline()) for _ in range(3)]
    found = {reply["number"]: reply["result"] for reply in replies}
    assert replies[-1]["number"] == "0"
    assert found["1"] == {"command": "short"}
    assert found["2"]["detail"] == "the process ended with 1: KeyError: 'none'"
    assert found["0"]["detail"] == "no result after 1 s"
    process.stdin.write("3 long\n")
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()


def test_commands_side_by_side_get_their_own_results(forks: Forks) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(forks, [f"none-{number}" for number in range(3)]))
    assert [item["detail"].partition("KeyError: ")[2] for item in found] == [f"'none-{number}'" for number in range(3)]


THREADS = """
import threading, time
from pathlib import Path
from gemma4_compat._doctor import processes
from gemma4_compat._doctor.reproductions import child, server

ended = []

def preload(*_):
    threading.Thread(target=lambda: (time.sleep(0.3), ended.append(True))).start()

server.Workspace.preload = preload
child.answer = lambda command, folder: {"ended": len(ended)}
server.Server(Path("nowhere"), processes.events()).run()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_no_fork_while_threads_of_a_load_run() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("0 first\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline()) == {"number": "0", "result": {"ended": 1}}
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()


LOOKS = """
import os, sys, threading
from pathlib import Path
from gemma4_compat import _shim
from gemma4_compat._doctor.reproductions import child, server
from gemma4_compat._engine import hooks
from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import Workspace
from tests.contract.observation import FOR_GPUS

def answer(command, folder):
    workspace, loads, load = Workspace(folder), [], tiny.load
    tiny.load = lambda *args, **options: loads.append(args) or load(*args, **options)
    if command == "reverted":
        workspace.forget()
    workspace.load("4bit" if command == "quantized" else None)
    runs, outputs = [], Workspace.outputs
    Workspace.outputs = lambda *args: runs.append(args) or outputs(*args)
    workspace.reference("4bit" if command == "quantized" else None)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(5)  # those of the load itself end; one that shows its progress would not
    known = {target.module for patch in _shim.engine.patches() for target in patch.targets}
    return {
        "loads": len(loads),
        "runs": len(runs),
        "threads": len(os.listdir("/proc/self/task")),
        "late": sorted(name for name in known - {*sys.modules, *FOR_GPUS} if not hooks.is_absent(name)),
    }

child.answer = answer
server.PRELOADED = ((1, None, 1), (4, "4bit", 1))
server.PREPARED = ((1, None), (4, "4bit"))
server.serve(Path(sys.argv[1]))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="no forks on this system")
def test_a_fork_finds_imported_and_loaded_what_it_needs(workspace: Any, disabled: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOKS, str(workspace.folder)],
        env={**os.environ, "GEMMA4_COMPAT_DISABLE": disabled},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("0 first\n1 second\n2 reverted\n3 quantized\n")
    process.stdin.flush()
    replies = [json.loads(process.stdout.readline()) for _ in range(4)]
    found = {reply["number"]: reply["result"] for reply in replies}
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()
    # The third one's model must not be what was loaded with the shim, nor its reference what was computed with it.
    assert found == {
        number: {"loads": 2 * own, "runs": int(own), "threads": 1, "late": []}
        for number, own in zip("0123", (False, False, True, False))
    }


def test_only_what_needs_a_gpu_may_fail_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute that is missing elsewhere is a defect, and ends the child with its traceback."""
    torch = pytest.importorskip("torch")
    (tmp_path / "reads_what_is_not_there.py").write_text("import sys\nsys.no_such_name\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    patch: Any = types.SimpleNamespace(targets=[types.SimpleNamespace(module="reads_what_is_not_there")])
    with pytest.raises(AttributeError, match="no_such_name"):
        child.import_targets([patch])
    monkeypatch.setattr(child, "FOR_GPUS", ("reads_what_is_not_there",))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    child.import_targets([patch])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(AttributeError, match="no_such_name"):
        child.import_targets([patch])
    absent: Any = types.SimpleNamespace(targets=[types.SimpleNamespace(module="no_such_module.at_all")])
    child.import_targets([absent])


SAYS = "import json, sys, time; print(json.dumps({'pid': __import__('os').getpid()}), flush=True);"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_events_and_how_a_child_ended() -> None:
    with Process("-c", f"{SAYS} sys.exit(sys.stdin.read())", environment=environment({})) as process:
        assert process.event(60) is not None
        process.tell("its last words", last=True)
        assert process.event(60) is None
        assert not process.late
        assert how(*process.ended()) == "the process ended with 1: its last words"


def test_a_child_that_closes_its_output_and_goes_on_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemma4_compat._doctor.processes._ENDING", 0.2)
    with Process("-c", "import os, time; os.close(1); time.sleep(60)", environment=environment({})) as process:
        assert process.event(60) is None
        assert process.ended()[0] != 0


def test_a_late_child_is_ended() -> None:
    with Process("-c", f"{SAYS} time.sleep(60)", environment=environment({})) as process:
        said = process.event(60)
        assert said is not None
        assert process.event(0.1) is None
        assert process.late
        assert gone(said["pid"])


def test_an_interrupted_parent_ends_its_child() -> None:
    process = Process("-c", f"{SAYS} time.sleep(60)", environment=environment({}))
    said = process.event(60)
    process.__exit__(KeyboardInterrupt)
    assert said is not None
    assert gone(said["pid"])


def test_whoever_waits_for_a_reproduction_is_told_that_it_was_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(children, "_CHILD", "sleeps")
    found = []
    waiting = threading.Thread(target=lambda: found.append(children.alone("any", tmp_path)))
    waiting.start()
    while not children._running:
        time.sleep(0.01)
    children.end()
    waiting.join(30)
    assert found[0]["defect"] is True
    assert found[0]["detail"].startswith("the process ended with ")


def test_a_reproduction_that_takes_too_long_is_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(children, "_CHILD", "sleeps")
    monkeypatch.setattr(children, "TIMEOUT", 1)
    assert children.alone("any", tmp_path)["detail"] == "no result after 1 s"
