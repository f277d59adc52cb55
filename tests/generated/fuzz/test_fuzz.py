"""Hostile inputs in CI: a few for every reader, each that was ever found, and that the fuzzer sees what it must."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="needs hypothesis: pip install 'gemma4-compat[test]'")
if not sys.platform.startswith("linux"):
    pytest.skip("limits of memory and its peak are read as Linux has them", allow_module_level=True)

from hypothesis import strategies as st

from gemma4_compat import Gemma4CompatError
from tests.generated.fuzz import case as cases
from tests.generated.fuzz import guard, minimal, readers, values, worker
from tests.generated.fuzz import run as runs
from tests.generated.fuzz.case import Case, File
from tests.generated.fuzz.guard import Bound, Guard, Outcome
from tests.generated.fuzz.readers import READERS, Reader, find

_CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))
_SEED = 20
_TRIED, _TRIED_UPSTREAM = 60, 12


@pytest.fixture(scope="module")
def where() -> Iterator[Guard]:
    with worker.place() as guard:
        yield guard


def _marked(reader: Reader, name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.full if reader.upstream else ())


def _run(where: Guard, reader: Reader, case: Case) -> Outcome:
    if reader.upstream:
        worker.warm()
    with worker.little_space():
        return worker.run_case(where, reader, case)


# ----------------------------------------------------------------------------------------------- readers and commands


@pytest.mark.full
@pytest.mark.parametrize("name", [reader.name for reader in READERS])
def test_a_reader_answers_or_says_what_is_wrong(where: Guard, name: str) -> None:
    reader = find(name)
    failed: list[str] = []

    def visit(case: Case) -> None:
        outcome = _run(where, reader, case)
        if not outcome.good:
            failed.append(f"{outcome.signature}\n{outcome.detail}\n{case.as_text(reader=name)[:3000]}")

    worker.examples(reader.cases, _SEED, _TRIED_UPSTREAM if reader.upstream else _TRIED, visit)
    assert not failed, failed[0]


@pytest.mark.parametrize(
    "name", [_marked(find(file.name.rpartition("-")[0]), file.name) for file in _CORPUS] or [pytest.param("none")]
)
def test_an_input_that_was_found_stays_handled(where: Guard, name: str) -> None:
    case, about = cases.read((Path(__file__).parent / "corpus" / name).read_text())
    outcome = _run(where, find(about["reader"]), case)
    assert outcome.good, f"{about['found']}: {outcome.signature}\n{outcome.detail}"


# --------------------------------------------------------------------------------------------------- the fuzzer itself

_BOUND = Bound(seconds=0.3, seconds_per_mib=0, mib=20, mib_per_mib=0)


def _outcome(where: Guard, call: Callable[[Case, Path, Path], Any], files: dict[str, File] | None = None) -> Outcome:
    reader = Reader("none", "", st.nothing(), call, _BOUND)
    return _run(where, reader, Case(files or {"a": File(b"1")}))


def _refuse(*_: Any) -> None:
    raise Gemma4CompatError("no")


class _EchoError(Gemma4CompatError):
    def __str__(self) -> str:
        return "no" * 10_000


def _chatter(*_: Any) -> None:
    raise _EchoError


def _loop(*_: Any) -> None:
    while True:
        pass


def _recurse(*_: Any) -> None:
    _recurse()


@pytest.mark.parametrize(
    "call, kind, signature",
    [
        (lambda *_: 1, "answer", ""),
        (_refuse, "error", ""),
        (_chatter, "violation", "a message too long"),
        (_loop, "over time", "over time"),
        (_recurse, "traceback", "RecursionError"),
        (lambda *_: {}["a"], "traceback", "KeyError"),
        (lambda *_: sys.exit(3), "traceback", "SystemExit"),
        (lambda *_: bytearray(60 << 20), "over memory", "over memory"),
        (lambda *_: bytearray(5 << 30), "over memory", "over memory"),
        (lambda _, folder, __: (folder / "a").write_text("2"), "violation", "a file outside OUT was opened"),
        (lambda _, folder, __: (folder / "a").unlink(), "violation", "os.remove outside OUT"),
        (lambda _, folder, __: (folder / "a").rename(folder.parent / "b"), "violation", "os.rename outside OUT"),
        (lambda *_: Path("/tmp/fuzz-escaped").write_text(""), "violation", "a file outside OUT was opened"),
        (lambda _, __, out: (out / "a").write_text("2"), "answer", ""),
        (lambda *_: __import__("subprocess").run(["true"]), "violation", "subprocess.Popen was called"),
        (lambda *_: __import__("os").system("true"), "violation", "os.system was called"),
        (lambda *_: __import__("socket").getaddrinfo("localhost", 1), "violation", "socket.getaddrinfo was called"),
    ],
)
def test_the_guard_notices(where: Guard, call: Callable[..., Any], kind: str, signature: str) -> None:
    outcome = _outcome(where, call)
    assert (outcome.kind, outcome.signature[: len(signature)]) == (kind, signature)
    Path("/tmp/fuzz-escaped").unlink(missing_ok=True)


@pytest.mark.full
def test_the_guard_notices_a_reader_that_waits(where: Guard) -> None:
    outcome = _outcome(where, lambda _, folder, __: (folder / "a").read_bytes(), {"a": File(kind="fifo")})
    assert (outcome.kind, outcome.signature[:8]) == ("over time", "it waits")


def test_on_a_busy_machine_a_reader_does_not_wait(where: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not run, for others are, or its child is; the kernel says so. Found in a run with the lowest priority."""
    monkeypatch.setattr(guard, "_LOOK", 0.2)
    assert _outcome(where, lambda *_: time.sleep(0.7)).signature[:8] == "it waits"
    script = "while True: pass"
    busy = subprocess.Popen([sys.executable, "-c", script])
    try:
        assert _outcome(where, lambda *_: time.sleep(0.7)).kind == "answer"
    finally:
        busy.kill()
        busy.wait()
    monkeypatch.setattr(guard, "_scheduled", lambda _process: time.monotonic())
    assert _outcome(where, lambda *_: time.sleep(0.7)).kind == "answer"


@pytest.mark.full
def test_a_run_goes_on_behind_an_input_that_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simplest input, which every batch begins with, ends the worker. A second run goes on where the first was."""
    given = st.fixed_dictionaries({"number": st.integers(0, 50)})
    inputs = st.builds(Case, st.just({}), given)
    bound = Bound(seconds=5, seconds_per_mib=0, mib=100, mib_per_mib=0)
    reader = Reader("stub", "", inputs, lambda case, *_: case.options["number"] or os._exit(1), bound, batch=20)
    monkeypatch.setattr(readers, "READERS", (reader,))
    monkeypatch.setattr(runs, "_START", "fork")  # a worker knows the stub
    for count in (40, 60):
        run = runs.Run([reader], count, 1, tmp_path / "found.json", tmp_path / "found")
        run.run(1, None)
        item = run.data["readers"]["stub"]
        lost = count // 20
        assert (item["tried"], item["handled"], item["over_time"]) == (count, count - lost, lost)
    assert [failure["signature"] for failure in item["failures"]] == ["killed: it did not come back"]
    saved, about = cases.read((tmp_path / "found" / item["failures"][0]["file"]).read_text())
    assert (saved.options, about["reader"]) == ({"number": 0}, "stub")


def test_a_message_is_short_whatever_is_in_it() -> None:
    text = str(Gemma4CompatError("dtype " + "\x1b" * 10**6 + " is unknown; it is one of bf16, fp16"))
    assert len(text) < 4100
    assert text.startswith("dtype \\x1b")
    assert text.endswith(" is unknown; it is one of bf16, fp16")


def test_a_corpus_file_holds_any_input() -> None:
    case = Case(
        {"a\x1b\udcff": File(b"\xff" * 5000, hole=7), "b": File(b"..", kind="link"), "c": File(b"\xff"), "d": File()},
        {
            "number": 10**5000,
            "list": [1, (2,), "\ud800"],
            "map": {0: b"x"},
            "nan": float("-inf"),
            "plain": {"a": None},
        },
    )
    read, about = cases.read(case.as_text(reader="index"))
    assert (repr(read.files), about) == (repr(case.files), {"reader": "index"})
    assert read.options.pop("number") == case.options.pop("number")  # type: ignore[attr-defined]
    assert repr(read.options) == repr(case.options)


def test_a_failing_input_becomes_small() -> None:
    case = Case({"a": File(b"x" * 3000 + b"!" + b"y" * 500), "b": File(b"b")}, {"c": 1})
    found = minimal.minimal(case, lambda case: b"!" in case.files.get("a", File()).content)
    assert found == Case({"a": File(b"!")})


@pytest.mark.parametrize("write, name", [(values.as_json, "json"), (values.as_toml, "tomllib")])
def test_unchanged_documents_are_valid(write: Callable[[Any], bytes], name: str) -> None:
    if name == "tomllib" and sys.version_info < (3, 11):
        name = "tomli"
    document = {"a": {"b": [1, 2.5, True, "é\x1b"]}, "c d": [{"e": "f"}]}
    assert __import__(name).loads(write(values.apply(document, ())).decode()) == document


def test_the_same_seed_makes_the_same_inputs() -> None:
    found: list[list[str]] = [[], []]
    for texts in found:
        worker.examples(find("index").cases, 3, 20, lambda case, texts=texts: texts.append(case.as_text()))
    assert found[0] == found[1]
    assert len(set(found[0])) > 15
