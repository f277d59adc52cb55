"""No code from files, no network, no pickle, nothing written outside OUT: watched by Python's audit events."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, child
from tests.unit.gemma4.adapters.adapter_files import write_adapter

EVIL = "import pathlib; pathlib.Path({marker!r}).write_text('code of a file was run')\n"
SAMPLES = sorted(path for path in (ROOT / "tests/unit/needed/samples").rglob("*") if path.is_file())


class Payload:
    """Unpickled, it writes the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return exec, (EVIL.format(marker=str(self.marker)),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code-was-run"


@pytest.fixture
def hostile(tmp_path: Path, marker: Path) -> Path:
    """A folder with everything that makes one tool or another run code, as an adapter, a model and a project."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    evil = EVIL.format(marker=str(marker))
    for name in ("modeling_evil.py", "setup.py", "conftest.py", "sitecustomize.py", "backend.py", "torch.py"):
        (folder / name).write_text(evil, encoding="utf-8")
    custom = {"auto_map": {name: "modeling_evil.Evil" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")}}
    config = {"model_type": "gemma4", "trust_remote_code": True, "architectures": ["Evil"], **custom}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "evil/model"}
    mapping = {"auto_mapping": {"base_model_class": "Evil", "parent_library": "modeling_evil"}}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **mapping, **custom}), encoding="utf-8")
    for name in ("adapter_model.bin", "pytorch_model.bin", "model.safetensors"):
        (folder / name).write_bytes(pickle.dumps(Payload(marker)))
    (folder / "requirements.txt").write_text(
        "--index-url http://127.0.0.1:9/simple\n-r http://127.0.0.1:9/more.txt\n-e .\n./backend.py\n"
        "evil @ git+http://127.0.0.1:9/evil.git\npeft @ http://127.0.0.1:9/peft-0.18.0-py3-none-any.whl\n",
        encoding="utf-8",
    )
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "evil"\ndynamic = ["version", "dependencies"]\n',
        encoding="utf-8",
    )
    return folder


def audited(tmp_path: Path, *commands: list[str], timeout: float = 60) -> Any:
    out = tmp_path / "out"
    out.mkdir()
    words = [json.dumps(one) for one in commands]
    # The network is there, as far as the libraries know: the test is that nobody asks.
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "0"}
    done = child("-m", "tests.project.security.audited", str(out), *words, environment=environment, timeout=timeout)
    assert done.code == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def test_the_watch_sees_what_it_is_there_for(tmp_path: Path, marker: Path) -> None:
    program = (
        "import sys, pickle, socket, pathlib, tests.project.security.audited as a\n"
        f"watch = a.Watch(pathlib.Path({str(tmp_path / 'out')!r}))\n"
        f"payload = {pickle.dumps(Payload(marker))!r}\n"
        "with watch.watching():\n"
        "    pickle.loads(payload)\n"
        "    socket.socket().close()\n"
        "    compile('1', 'config.json', 'eval')\n"
        f"    open({str(tmp_path / 'elsewhere')!r}, 'w').close()\n"
        "print([one.partition(' ')[0] for one in watch.found])\n"
    )
    done = child("-c", program)
    assert done.code == 0, done.stderr
    assert {"pickle.find_class", "exec", "compile", "socket.__new__", "open"} <= set(eval(done.stdout)), done.stdout
    assert marker.exists()


def test_readers_of_hostile_files(tmp_path: Path, hostile: Path, marker: Path) -> None:
    named = [["needed", str(hostile / "requirements.txt")], ["needed", str(hostile / "pyproject.toml")]]
    found = audited(tmp_path, ["scan", str(hostile)], ["scan", str(hostile), "--json"], *named)
    assert found["found"] == []
    assert not marker.exists()
    assert set(found["codes"]) <= {0, 1, 2}


def test_readers_of_files_that_are_right(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", {"base_model.model.a.q_proj.lora_A.weight": (4, 8)})
    commands = [["needed", str(path)] for path in SAMPLES]
    found = audited(tmp_path, ["scan", str(adapter)], *commands)
    assert found["found"] == []
    assert found["codes"][1:] == [0] * len(SAMPLES)


@pytest.mark.full
def test_with_a_base_and_in_a_merge(tmp_path: Path, workspace: Any, hostile: Path, marker: Path) -> None:
    adapter, base = str(workspace.adapter("language")), str(workspace.checkpoint)
    unsafe = tmp_path / "unsafe"  # the adapter is in order, but for its weights
    shutil.copytree(adapter, unsafe)
    (unsafe / "adapter_model.safetensors").unlink()
    shutil.copy(hostile / "adapter_model.bin", unsafe)
    found = audited(
        tmp_path,
        ["plan", base, "--vram", "1GiB"],
        ["plan", str(hostile), "--vram", "1GiB"],
        ["scan", adapter, base],
        ["scan", adapter, str(hostile)],
        ["merge", base, adapter, "OUT"],
        ["merge", str(hostile), adapter, "OUT"],
        ["merge", base, str(hostile), "OUT"],
        ["merge", base, str(unsafe), "OUT", "--allow-pickle"],
        ["repair", str(hostile), "--from", base, "OUT"],
        ["repair", base, "--from", str(hostile), "OUT"],
        ["export", adapter, "OUT", "--for", "gguf", "--base", base],
        ["export", str(hostile), "OUT", "--for", "vllm", "--base", base],
        ["export", adapter, "OUT", "--for", "mlx", "--base", str(hostile)],
        timeout=280,
    )
    assert found["found"] == []
    assert not marker.exists()
    assert found["codes"][::2] == [0, 0, 0, 2, 2, 0, 2], found["codes"]
