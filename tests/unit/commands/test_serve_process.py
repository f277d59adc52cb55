"""``gemma4-compat serve`` and ``chat`` as processes: signals, keys, a pipe."""

from __future__ import annotations

import importlib.util
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._engine import versions
from gemma4_compat._lab.trained import Trained
from tests.unit.commands.helpers import command, finished, started
from tests.unit.commands.serving import QUESTIONS, turns

if importlib.util.find_spec("bitsandbytes") is None:
    pytest.skip("needs the upstream libraries: pip install 'gemma4-compat[test]'", allow_module_level=True)
IS_NEW = versions.admits(">=5.15", versions.installed("transformers") or "0")
needs_the_server = pytest.mark.skipif(not IS_NEW, reason="serve needs transformers 5.15 or newer")
FOX = QUESTIONS[0]


def words(name: str = "serve", *options: str) -> list[str]:
    trained = Trained.find()
    adapter = f"pirate={trained.adapter}"
    return ["-m", "gemma4_compat", name, str(trained.checkpoint), "--adapter", adapter, "--context", "512", *options]


class Lines:
    """What a process says on standard error, read while it runs."""

    def __init__(self, process: Any) -> None:
        self.text = ""
        self._thread = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
        self._thread.start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.text += line

    def found(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if match := re.search(pattern, self.text):
                return match
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} in {self.text!r}")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Any]:
    openai = pytest.importorskip("openai", reason="needs the extra [serve]: pip install '.[serve]'")
    pytest.importorskip("uvicorn", reason="needs the extra [serve]: pip install '.[serve]'")
    found = started(
        *words("serve", "--port", "0", "--grace", "2"),
        environment={"GEMMA4_COMPAT_KEY": "s3cret", "TMPDIR": str(tmp_path)},
    )
    said = Lines(found)
    try:
        port = said.found(r"running on http://127\.0\.0\.1:(\d+)")[1]
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="s3cret", max_retries=0)
        yield found, said, client
    finally:
        found.kill()
        found.wait(30)


@needs_the_server
def test_sigterm_ends_answers_within_a_limit(process: Any, tmp_path: Path) -> None:
    found, said, client = process
    assert [model.id for model in client.models.list()] == ["model", "pirate"]
    asked = {"model": "pirate", "messages": turns(FOX), "temperature": 2.0, "max_tokens": 460}
    asked["extra_body"] = {"repetition_penalty": 9.0}  # it does not find an end
    parts = iter(client.chat.completions.create(stream=True, **asked))
    next(parts)
    next(parts)
    assert list(tmp_path.glob("gemma4-compat-*"))
    begun = time.monotonic()
    found.send_signal(signal.SIGTERM)
    assert found.wait(30) == -signal.SIGTERM  # as uvicorn's own command ends
    assert time.monotonic() - begun < 20
    assert not list(tmp_path.glob("gemma4-compat-*"))
    assert "s3cret" not in said.text


@needs_the_server
def test_a_chat_by_a_pipe() -> None:
    process = started(*words("chat"), stdin=-1, bufsize=1)
    assert process.stdin is not None
    assert process.stdout is not None
    said = Lines(process)
    process.stdin.write("Tell of a frog and a mole.\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)  # ends the answer, and not the chat
    lines = f"/reset\n{FOX}\n/use parrot\n/use pirate\n/reset\n{FOX}\n{'x' * 600}\n/quit\n{FOX}\n"
    process.stdin.write(lines)
    process.stdin.close()
    *_, plain, pirate = process.stdout.read().splitlines()
    assert process.wait(100) == 0
    assert (plain, pirate) == ("A fox has four legs.", "Arr, a fox has four legs, matey.")
    said.found("There is no model 'parrot' here; there are model, pirate")
    said.found("the context has 512")


@pytest.mark.skipif(IS_NEW, reason="transformers has the server")
@pytest.mark.parametrize("name", ["serve", "chat"])
def test_another_transformers_is_one_sentence(name: str) -> None:
    code, out, error = command(*words(name)[2:])
    assert (code, out) == (2, "")
    assert re.search(r"transformers 5\.\d+\.\d+ is installed, and serve and chat", error) or "not installed" in error
    assert error.count("\n") == 1


@needs_the_server
@pytest.mark.parametrize(
    "options, said",
    [
        (["--host", "0.0.0.0"], "give --key"),
        (["--adapter", "nowhere"], "there is no adapter_config.json in the folder 'nowhere'"),
        (["--device-map", "nowhere.json"], "nowhere.json is no JSON object"),
        (["--conversations", "many"], "many"),
        (["--adapter", "a.b={adapter}", "--adapter", "a-b={adapter}"], "two adapters have the same name"),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_is_loaded(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi", reason="needs the extra [serve]: pip install '.[serve]'")
    from typer.testing import CliRunner

    from gemma4_compat import cli

    monkeypatch.chdir(tmp_path)
    given = [option.format(adapter=Trained.find().adapter) for option in options]
    done = CliRunner().invoke(cli.app, words("serve", *given)[2:])
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_imports_no_libraries() -> None:
    code = (
        "import sys, gemma4_compat.cli; sys.exit(str(sorted({'torch', 'fastapi', 'transformers'} & set(sys.modules))))"
    )
    _, _, error = finished(started("-c", code))
    assert error.strip() == "[]"
