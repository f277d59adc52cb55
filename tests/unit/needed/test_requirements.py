"""``gemma4-compat needed`` on requirements files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gemma4_compat import Gemma4CompatError
from gemma4_compat._needed import judge, requested
from tests.helpers import ROOT
from tests.unit.needed.helpers import OLDEST, PATCHES, PINS, SAMPLES, Ask, only, patch_on, states, verdicts


def test_requirements_that_uv_exported_with_hashes() -> None:
    assessment = judge.assess(SAMPLES / "pins" / "requirements.txt", tuple(PATCHES.values()))
    assert states(assessment) == {
        "transformers": "5.6.2",
        "accelerate": "1.13.0",
        "peft": "0.19.1",
        "bitsandbytes": "0.49.2",
    }
    assert assessment.notes == ()
    assert verdicts(assessment)["accelerate-hf-initialized"] == "needed"
    assert verdicts(assessment)["transformers-assistant-sharing"] == "not_needed"


def test_a_requirements_file_as_people_write_it(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEFT_RELEASE", "0.19.1")
    assessment = ask(
        "\ufeff# what we train with\n"
        "--extra-index-url https://download.pytorch.org/whl/cu128\n"
        "--pre\n"
        "-r base.txt\n"
        "\n"
        "Transformers[torch] >= 5.5 , != 5.9.0 \\\n"
        "    # why not\n"
        "bits_and_bytes==1.0\n"
        "BitsAndBytes == 0.49.2 --hash=sha256:00 \\\n"
        "    --hash=sha256:11   # from the mirror\n"
        "peft==${PEFT_RELEASE}\n"
        "torch @ https://example.org/torch-2.13.0-cp311-none-any.whl#sha256=00\n"
        "-ctop.txt",
        base="accelerate>=1.13;python_version>='3'\n--requirement=more.txt\n",
        more="transformers<5.23\n",
        top="accelerate<1.15\nsafetensors==1\n",
    )
    assert states(assessment) == {
        "transformers": ">=5.5,<5.23,!=5.9.0",
        "accelerate": ">=1.13,<1.15",
        "peft": "0.19.1",
        "bitsandbytes": "0.49.2",
    }
    assert assessment.notes == ()


def test_a_line_whose_marker_is_false_here_is_left_out_and_that_is_said(ask: Ask) -> None:
    old, new = "python_version < '3'", "python_version >= '3'"
    assessment = ask(f"transformers==5.6.2; {new}\ntransformers==5.5.0; {old}\npeft; {old}\ntorch; {old}")
    assert states(assessment)["transformers"] == "5.6.2"
    assert states(assessment)["peft"] == "not named in requirements.txt"
    left_out = [note.partition(": ")[2] for note in assessment.notes]
    assert left_out == [
        f'{name} is left out, its marker is false here: python_version < "3"' for name in ("transformers", "peft")
    ]
    assert "requirements.txt line 2: " in assessment.notes[0]


def test_a_constraint_alone_says_what_it_would_be_not_that_it_is_there(ask: Ask) -> None:
    assessment = ask("transformers==5.6.2\n-c top.txt", top="accelerate>=1.14\npeft<0.19\n")
    assert states(assessment)["accelerate"] == "not named in requirements.txt (there, it would be >=1.14)"
    assert verdicts(assessment)["accelerate-hf-initialized"] == "not_needed"
    assert verdicts(assessment)["accelerate-nested-map"] == "depends"
    assert verdicts(assessment)["peft-keep-dispatch"] == "depends"


@pytest.mark.parametrize(
    "line",
    [
        "transformers @ git+https://github.com/huggingface/transformers@main",
        "git+https://github.com/huggingface/transformers.git@main",
        "git+ssh://git@github.com/someone/fork#egg=transformers",
        "-e git+https://github.com/huggingface/transformers@0123456#egg=transformers",
        "-e ../transformers",
        "--editable='../transformers[torch]'",
        "-e ../transformers ; sys_platform != 'never'",
        "./vendor/transformers/",
        "https://github.com/huggingface/transformers/archive/main.zip",
        "transformers===nightly",
    ],
)
def test_what_does_not_tell_its_release_is_named_and_nothing_is_guessed(ask: Ask, line: str) -> None:
    assessment = ask(f"accelerate==1.13.0\n{line}")
    (note,) = assessment.notes
    assert note.startswith("cannot tell the release of transformers: ")
    assert "requirements.txt line 2" in note
    assert "transformers==RELEASE" in note
    found = verdicts(assessment)
    assert {found[name] for name in found if name.startswith("transformers-")} == {"depends"}
    assert found["accelerate-nested-map"] == "needed"
    hf_initialized = patch_on(">=1.12", "transformers")
    assert only(ask(f"accelerate==1.13.0\n{line}", hf_initialized)).verdict == "needed", "whichever release"


@pytest.mark.parametrize(
    "line",
    [
        "./wheels/transformers-5.6.2-py3-none-any.whl",
        "transformers @ https://example.org/transformers-5.6.2-py3-none-any.whl",
        "https://example.org/transformers-5.6.2.tar.gz#sha256=00",
        "transformers-5.6.2-py3-none-any.whl ; python_version >= '3'",
        "transformers-5.6.2-py3-none-any.whl",
        "transformers-5.6.2.tar.gz",
    ],
)
def test_the_name_of_an_archive_tells_its_release(ask: Ask, line: str) -> None:
    assessment = ask(line)
    assert states(assessment)["transformers"] == "5.6.2"
    assert assessment.notes == ()


@pytest.mark.parametrize("text", ["a", "Py_Torch", "a..b--c", "a ==1", "a==1.0.2", "zope.interface==7", "0==0"])
def test_what_is_skipped_without_a_parser_is_a_requirement(text: str) -> None:
    found = requested._PLAIN.fullmatch(text)
    assert found
    assert Requirement(text).name == found[1]


@pytest.mark.parametrize("text", ["", "-a", "a-", "a b", "a==", "a==1 2", "a=1", "a==1.", "a== x", "\u00e9", "a\n"])
def test_what_is_no_requirement_is_not_skipped(text: str) -> None:
    assert not requested._PLAIN.fullmatch(text)
    with pytest.raises(Gemma4CompatError, match="is not a requirement"):
        requested.Requests(("peft",)).parse(text, "line 1")


def test_a_project_installed_from_its_folder_and_an_unknown_option_are_said(ask: Ask) -> None:
    assessment = ask("transformers\n-e .[train]\n--weather=fine\n-r https://example.org/more.txt\ngit+https://a.b/c")
    said = [re.sub(r"^.*requirements.txt", "", note) for note in assessment.notes]
    assert said == [
        " line 2: what .[train] requires is not looked into; check its own file as well",
        " line 3: the option --weather is not understood and ignored",
        " line 4: https://example.org/more.txt is not read; ask about a copy of it",
    ]


def test_a_file_that_powershell_wrote(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_bytes(PINS.replace("\n", "\r\n").encode("utf-16"))
    assert states(judge.assess(path, tuple(PATCHES.values())))["transformers"] == "5.6.2"


@pytest.mark.parametrize("name", ["newest", "thread"])
def test_the_constraints_of_this_repository(name: str) -> None:
    path = ROOT / "constraints" / f"{name}.txt"
    assessment = judge.assess(path, tuple(PATCHES.values()))
    pins = dict(line.split("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)
    assert states(assessment) == {library: pins[library] for library in OLDEST}
    assert {str(need.verdict) for need in assessment.needs} == {"needed", "not_needed"}
