"""A process whose steps another one has fused captures each once, with fused kernels, and has the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from gemma4_compat._graphs import decoder, fused_steps
from gemma4_compat._kernels import kernel_files, kernels, noted
from tests.unit.generation import calls
from tests.unit.generation.calls import Models
from tests.unit.kernels.host_kernels import HostCompiler

#: Captures of a first process: the step as it is, which kernels it needs, without operations that have other bits here
#: (GELU, means), and with all kernels.
FIRST = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


@pytest.fixture
def process(tapes: Any, models: Models, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A new process, in which a model answers; returns its statistics, with the captures that were made."""
    reason = HostCompiler.unsupported_reason()
    if reason is not None:
        pytest.skip(reason)

    class Kept(HostCompiler):
        def __init__(self, device: Any) -> None:
            super().__init__(device)
            self.notes = noted.Notes(kernel_files.Files(folder, "key"))

    captures: list[None] = []
    capture = tapes.capture

    def counted(self: Any, run: Any) -> Any:
        captures.append(None)
        return capture(self, run)

    monkeypatch.setattr(tapes, "capture", counted)
    monkeypatch.setitem(kernels.COMPILERS, "cpu", Kept)
    monkeypatch.setattr(fused_steps.Progress, "after", 2)

    def answer(*where: Any, new: int = 6) -> tuple[Any, int]:
        monkeypatch.setattr(kernels, "_kernels", {})
        model = models.fresh(*where)
        captures.clear()
        calls.compared(model, calls.ask(model, new=new))
        assert calls.steps(model).replayed == new - 2
        found = calls.steps(model), len(captures)
        decoder.of(calls.base(model)).clear()
        return found

    return answer


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    "where", [(), ("4bit-double", "language"), pytest.param((None, None, "streamed"), marks=pytest.mark.full)]
)
def test_the_second_process_captures_once(process: Callable[..., Any], folder: Path, where: tuple[Any, ...]) -> None:
    found, captures = process(*where)
    assert (found.captured, found.fused, captures) == (1, 1, FIRST)
    (file,) = files_of(folder)
    before = file.read_bytes()
    found, captures = process(*where)
    assert (found.captured, found.fused, captures) == (1, 1, 1)
    assert found.not_fused == ()
    assert file.read_bytes() == before


def test_another_model_begins_anew(process: Callable[..., Any], folder: Path) -> None:
    process()
    found, captures = process(None, "language")
    assert (found.fused, captures) == (1, FIRST)
    assert len(files_of(folder)) == 2


def test_a_text_that_ends_before_steps_are_fused_is_not_fused_at_once(process: Callable[..., Any]) -> None:
    process()
    found, captures = process(new=3)
    assert (found.captured, found.fused, captures) == (1, 0, 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-3] + b"abc",
        pytest.param(lambda _: b"", marks=pytest.mark.full),
        pytest.param(lambda data: data[: len(data) // 2], marks=pytest.mark.full),
    ],
)
def test_a_damaged_note_is_written_again(process: Callable[..., Any], folder: Path, damage: Any) -> None:
    process()
    (file,) = files_of(folder)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    found, captures = process()
    assert (found.fused, found.not_fused, captures) == (1, (), FIRST)
    assert file.read_bytes() == whole


def test_a_note_that_lacks_kernels_is_completed(
    process: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an update that writes them in another way."""
    process()
    read = noted._parsed

    def half(data: bytes) -> noted.Note:
        return dataclasses.replace(read(data), texts=read(data).texts[::2])

    monkeypatch.setattr(noted, "_parsed", half)
    found, captures = process()
    assert (found.captured, found.fused, found.not_fused, captures) == (1, 1, (), 2)


def test_a_kernel_that_has_become_inexact_is_left_out(
    process: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process()
    launch = kernels.Kernels.launch

    def wrong(self: kernels.Kernels, kernel: Any) -> None:
        launch(self, kernel)
        if "tanhf(" in kernel.text:
            kernel.tensors[-1].zero_()

    monkeypatch.setattr(kernels.Kernels, "launch", wrong)
    found, captures = process()
    assert (found.captured, found.fused) == (1, 1)
    (reason,) = found.not_fused
    assert "differs bitwise" in reason
    assert captures == 1 + FIRST
    found, captures = process()
    assert (found.fused, found.not_fused, captures) == (1, (), 1)


def test_a_failure_at_once_is_no_failure(process: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    process()
    compare = fused_steps._compare

    def fails(*_: Any) -> Any:
        monkeypatch.setattr(fused_steps, "_compare", compare)
        raise RuntimeError("no kernel today")

    monkeypatch.setattr(fused_steps, "_compare", fails)
    found, _ = process()
    assert (found.captured, found.fused, found.not_fused) == (1, 1, ("RuntimeError: no kernel today",))
