"""The command: bad usage, a whole check of a tiny model, and nothing personal in its report."""

from __future__ import annotations

import getpass
import json
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gemma4_compat import cli
from gemma4_compat._doctor.check import prompts, run
from gemma4_compat._plan.cards import measured
from tests.helpers import child
from tests.unit.commands import helpers
from tests.unit.doctor.check import samples


def said(*arguments: str, code: int) -> Any:
    done = CliRunner().invoke(cli.app, ["check", *arguments])
    assert done.exit_code == code, done.output
    return done


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--minutes", "0"], "--minutes is 0; it must be more than 0"),
        (["--context", "8"], "--context is 8; it must be at least 64"),
        (["--quantize", "5bit"], "quantization '5bit' is unknown"),
        (["--image", "no-such.png"], "--image 'no-such.png' is not a file"),
        (["--json", "no-such-folder/report.json"], "there is no folder 'no-such-folder'"),
        (["--json", "."], "--json '.' is a folder"),
        (["no-such-model"], "the model 'no-such-model' is neither a folder nor in the cache"),
        (["--adapter", "no-such-adapter"], "the adapter 'no-such-adapter' is neither a folder nor in the cache"),
        (["./models/gemma-4-E2B-it"], "the folder './models/gemma-4-E2B-it' does not exist"),
        ([".", "--merge"], "--merge merges an adapter; give one with --adapter"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = said(*arguments, code=2)
    assert message in done.stderr
    assert done.stderr.startswith("gemma4-compat: checking ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("good", [True, False])
def test_what_is_printed_and_written(good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    against = samples.SAME if good else samples.OTHER
    of = samples.found(samples.outcome(), samples.outcome("in host memory: 2 towers", against))
    monkeypatch.setattr(run.Check, "run", lambda self: of)
    monkeypatch.chdir(tmp_path)
    done = said(code=0 if good else 1)
    lines = done.stdout.rstrip().splitlines()
    data = json.loads((tmp_path / "gemma4-compat-check.json").read_text())
    assert lines[-1] == data["verdict"]["text"]
    assert data["verdict"]["ok"] is good
    printed = json.loads(said("--json", "-", code=0 if good else 1).stdout)
    assert printed == data


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no such signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_check_that_is_interrupted_leaves_nothing(name: str, tmp_path: Path) -> None:
    """It is in its first child, which has said something."""
    started = helpers.started("-m", "gemma4_compat", "check", environment={"TMPDIR": str(tmp_path)}, folder=tmp_path)
    assert started.stderr is not None
    for line in started.stderr:
        if "survey" in line:
            break
    deadline = time.monotonic() + 300
    while not (folders := list(tmp_path.glob("gemma4-compat-check-*/tiny"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert folders
    started.send_signal(getattr(signal, name))
    started.communicate(timeout=30)
    assert started.returncode not in (0, None)
    assert list(tmp_path.glob("gemma4-compat-*")) == []


@pytest.mark.full
def test_a_tiny_model_with_a_fault_and_nothing_personal_in_the_report(workspace: Any, tmp_path: Path) -> None:
    """An adapter that does not fit, so that errors have names and paths; then all prompts, and the report's form."""
    secret = tmp_path / "secret-person"
    shutil.copytree(workspace.checkpoint, secret / "secret-model")
    shutil.copytree(workspace.mismatched_adapter(), secret / "secret-adapter")
    arguments = [str(secret / "secret-model"), "--adapter", str(secret / "secret-adapter"), "--context", "128"]
    environment = {"OMP_NUM_THREADS": "1", "SECRET_TOKEN": "secret-token"}
    done = child("-m", "gemma4_compat", "check", *arguments, "--quick", "--json", "-", environment=environment)
    assert done.code == 1, done.stderr
    assert "the adapter does not fit" in done.stderr.lower()
    assert "secret-" not in done.stdout
    for personal in (
        getpass.getuser(),
        socket.gethostname(),
        str(Path.home()),
        prompts._TEXT[:20],
        "lora_A",
        "up_proj",
    ):
        assert f"{personal}".lower() not in done.stdout.lower(), personal
    report = measured.read(done.stdout.encode(), "report")
    assert report.adapter.problems == ["shape"]
    assert report.verdict.problems[:2] == [
        "the adapter does not fit this base (shape)",
        "load the adapter: Gemma4CompatError (everything on the card; in host memory: per-layer embeddings, 2 towers)",
    ]
    answers = [answer for placement in report.placements for answer in placement.answers]
    assert {answer.prompt for answer in answers} == {"text", "long text", "image", "sound"}
    assert {answer.equal for answer in answers} == {None, True}
    assert [placement.failures[0].step for placement in report.placements] == ["load the adapter"] * 2


@pytest.mark.full
def test_without_a_model_it_checks_a_tiny_one_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    environment = {"OMP_NUM_THREADS": "1"}
    done = child("-m", "gemma4_compat", "check", "--quick", "--merge", "--json", str(file), environment=environment)
    assert done.code == 0, done.stdout + done.stderr
    assert done.stderr.startswith("gemma4-compat: checking a tiny model with random weights")
    report = measured.read(file.read_bytes(), "report")
    assert report.model.tiny
    assert report.merge.parity.ok
    assert [placement.merged for placement in report.placements] == [False, False, True, True]
    ways = {answer.way for placement in report.placements for answer in placement.answers if answer.equal}
    assert {"eager", "fast"} <= ways
    if report.machine.gpu is None:
        assert "no GPU: the CPU stands for the card" in done.stdout
