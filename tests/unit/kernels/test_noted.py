"""Notes on steps that were fused: found again by the shapes of a model; anything else is as if it were not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemma4_compat._kernels.kernel_files import Compiled, Files, identity
from gemma4_compat._kernels.noted import MOST_KINDS, MOST_TEXTS, Note, Notes


def notes(folder: Path, key: str = "key") -> Notes:
    return Notes(Files(folder, key))


def test_another_process_finds_a_note(tmp_path: Path) -> None:
    assert notes(tmp_path).of("E2B") == Note()
    note = Note().with_more(["a", "b"], "one row", ["mean"]).with_more(["b", "c"], "two rows", [])
    assert note == Note(("a", "b", "c"), ("one row", "two rows"), ())
    notes(tmp_path).keep("E2B", note)
    assert notes(tmp_path).of("E2B") == note
    assert notes(tmp_path).of("E4B") == notes(tmp_path, "another GPU").of("E2B") == Note()


def test_what_is_known_is_not_written_again(tmp_path: Path) -> None:
    ours = notes(tmp_path)
    ours.keep("E2B", Note(("a",), ("one row",)))
    (file,) = tmp_path.iterdir()
    file.unlink()
    ours.keep("E2B", Note(("a",), ("one row",)))
    assert not list(tmp_path.iterdir())
    ours.keep("E2B", Note())
    assert notes(tmp_path).of("E2B") == Note()
    assert file.exists()


def test_without_a_folder_a_process_knows_its_own(tmp_path: Path) -> None:
    for files in (None, Files(None, "key")):
        ours = Notes(files)
        ours.keep("E2B", Note(("a",), ("one row",)))
        assert ours.of("E2B").texts == ("a",)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"{}", *(json.dumps(one).encode() for one in (
        {"texts": "a", "kinds": [], "inexact": []},
        {"texts": ["a"], "kinds": [1], "inexact": []},
        {"texts": ["a"], "kinds": []},
    ))],
)  # fmt: skip
def test_something_else_with_a_right_checksum_is_an_empty_note(tmp_path: Path, content: bytes) -> None:
    Files(tmp_path, "key").add(Compiled(content, {identity("E2B"): ""}))
    assert notes(tmp_path).of("E2B") == Note()


def test_a_note_is_bounded() -> None:
    note = Note()
    for number in range(MOST_KINDS + 5):
        note = note.with_more([f"{number} {text}" for text in range(20)], str(number), [])
    assert len(note.texts) == MOST_TEXTS
    assert len(note.kinds) == MOST_KINDS
    assert (note.texts[-1], note.kinds[-1]) == (f"{MOST_KINDS + 4} 19", str(MOST_KINDS + 4))
