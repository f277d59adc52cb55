"""tools/english.py: the turns it finds, the English it leaves alone, and that nothing new slips in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import ROOT
from tools import english

BAD = {
    "is none": ["this name is none of those", "the model needs a head, and X is none"],
    ", too": ["It is slow, too.", "This is for adapters, too: they load.", "| works, too |"],
    "as ever": ["Other steps run as ever."],
    "but for": ["equal but for rounding", "all are quantized, but\nfor the head."],
    "whoever": ["Whoever waits looks at it.", "for whoever asks"],
    "is of": ["The plan is of one device.", "these keys are of another model"],
    "alone for only": ["This runs on Linux alone.", "It reads headers alone and no weights."],
    "another one": ["an entry inside another one", "Another one waits."],
    "one error that": ["That is one error that names it."],
    "sentence opening with Of": ["It is read. Of the rest nothing is.", "Of two weights one stays."],
    "sentence opening with Who": ["The lock is held. Who waits looks at it.", "Who reads it gets nothing."],
    "be it": ["a variable that is set, be it empty"],
    "for ever": ["two threads would wait for ever"],
    "None where": ["The group of a layer; None where it has none.", "a list, empty where nothing is left"],
    "included at the end": ["every attribute (new ones included)", "the bits of one on the CPU, gradients included."],
    "once a": ["A tower runs once a prompt.", "inputs that are moved 18 times a layer"],
    "copied out of": ["Layers are copied out of pinned memory."],
    "let go of": ["Let go of all graphs. It lets go of them."],
    "put off": ["Operations are put off until then."],
    "held against": ["an adapter held against a base"],
    "the same of": ["bytes of the layer; the same of its experts"],
    "lies": ["The report lies beside the model.", "layers lie on the CPU"],
    "own arithmetic": ["In own arithmetic, bits are equal.", "It computes with kernels of its own."],
    "matrix units": ["Matrix units multiply 16-bit tensors."],
    "multiprocessors": ["a card with fewer multiprocessors", "blocks of a multiprocessor"],
    "words of 16 bytes": ["Weights are read in words of 16 bytes."],
    "shares of the softmax": ["The shares of the softmax are rounded."],
    "other bits": ["The kernel has other bits there.", "It gives other bits."],
    "in rounds": ["Texts are decoded in rounds.", "After 64 rounds with drafts, one without."],
    "in pieces": ["It computes MLPs in pieces.", "prompts in pieces"],
    "round otherwise": ["Chunks round otherwise.", "It is rounded otherwise."],
    "wait for Python": ["Short steps wait for Python."],
    "asleep": ["The target is asleep.", "The first model awakens it."],
    "what checkpointing keeps": ["Keep what checkpointing keeps in host memory."],
}
GOOD = [
    "If there is none, uninstall it.",
    "The value is None.",
    "It is too large, and too many files are open.",
    "Not for speed but for memory.",
    "It takes long, but for now it is enough. But for example this is fine.",
    "It is often right, of course, and a course of action is of no use.",
    "The tensor is of type int64.",
    "It leaves other models alone. Other dtypes are left alone. Let alone this.",
    "The weights alone take 4 GiB.",
    "A stand-alone script.",
    "One of the two. The name of one.",
    "It reads another file.",
    "It is done for everyone, once a step is over. Three times as large.",
    "The included file. It is included in the list, and what is included there stays.",
    "Cannot run out of memory. The model is read from disk.",
    "The values are false. Where they are true, nothing happens.",
    "Who calls this? It may be it.",
    "It waits for Python to launch each kernel. Other bits of the mask are set, and numbers are rounded up.",
    "A file is copied in pieces, and a benchmark has three rounds.",
    "`is none`, ``as ever`` and `, too.` are code.",
]


def found(tmp_path: Path, text: str, name: str = "PAGE.md") -> list[str]:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return [one.turn for one in english.findings(file)]


@pytest.mark.parametrize("turn, text", [(turn, text) for turn, texts in BAD.items() for text in texts])
def test_a_turn_is_found_in_pages_docstrings_comments_and_messages(tmp_path: Path, turn: str, text: str) -> None:
    line = " ".join(text.split())
    assert turn in found(tmp_path, f"# Page\n\n{text}\n")
    assert turn in found(tmp_path, f'def f() -> None:\n    """{text}"""\n', "docstring.py")
    assert turn in found(tmp_path, f"x = 1\n# {line}\n", "comment.py")
    assert turn in found(tmp_path, f'raise ValueError("{line}")\n', "message.py")


def test_every_turn_has_an_example() -> None:
    assert list(BAD) == list(english.TURNS)


@pytest.mark.parametrize("text", GOOD)
def test_correct_english_is_left_alone(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, f"{text}\n") == []
    assert found(tmp_path, f'"""{text}"""\n', "page.py") == []


def test_a_turn_over_two_lines_two_strings_or_two_comments_is_found(tmp_path: Path) -> None:
    assert found(tmp_path, "equal but\nfor rounding\n") == ["but for"]
    assert found(tmp_path, 'x = (\n    f"{y} is "\n    "none of them"\n)\n', "a.py") == ["is none"]
    assert found(tmp_path, "# it runs as\n# ever\n", "b.py") == ["as ever"]


def test_code_is_not_read(tmp_path: Path) -> None:
    assert found(tmp_path, "```python\nprint('as ever')\n```\n") == []
    assert found(tmp_path, "Of = is_ = none = 1\nwhoever = Of is none\n", "a.py") == []
    assert found(tmp_path, 'x = ["Linux", alone]  # a list\n', "b.py") == []


def test_a_finding_names_file_line_turn_and_remedy(tmp_path: Path) -> None:
    page = tmp_path / "PAGE.md"
    page.write_text("# Page\n\nFine.\n\nIt runs as ever.\n", encoding="utf-8")
    (one,) = english.findings(page)
    assert str(one).startswith(f"{page}:5: as ever (better: as before")
    assert english.main([str(page)]) == 1


def test_a_file_that_may_have_none_fails_and_one_on_the_list_may_not_get_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(english, "ROOT", tmp_path)
    monkeypatch.setattr(english, "PENDING", tmp_path / "pending.txt")
    for folder in ("docs", "benchmarks"):
        (tmp_path / folder).mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"):
        (tmp_path / name).write_text("Fine.\n", encoding="utf-8")
    page = tmp_path / "docs" / "A.md"
    page.write_text("It runs as ever.\n", encoding="utf-8")
    assert english.main([]) == 1
    assert "docs/A.md:1: as ever" in capsys.readouterr().out
    assert english.main(["--write"]) == 0
    assert english.pending() == {"docs/A.md": 1}
    assert english.main([]) == 0
    page.write_text("It runs as ever. It is slow, too.\n", encoding="utf-8")
    assert english.main([]) == 1


def test_the_pages_and_the_package_have_no_new_turns() -> None:
    assert english.main([]) == 0, "python -m tools.english shows them"


def test_the_list_names_files_that_are_there() -> None:
    assert [name for name in english.pending() if not (ROOT / name).is_file()] == []
