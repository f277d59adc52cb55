"""``gemma4-compat needed`` on pyproject.toml and on lock files."""

from __future__ import annotations

import sys

import pytest
from packaging.version import Version

from gemma4_compat import Gemma4CompatError
from gemma4_compat._needed import judge
from tests.helpers import ROOT
from tests.unit.needed.helpers import OLDEST, PATCHES, SAMPLES, Ask, states, verdicts


def test_a_pyproject_with_ranges_extras_groups_and_constraints() -> None:
    assessment = judge.assess(SAMPLES / "ranges" / "pyproject.toml", tuple(PATCHES.values()))
    assert states(assessment) == {
        "transformers": ">=5.22.2,<6",
        "accelerate": ">=1.13,<1.15",
        "peft": ">=0.18,<0.22 (group adapters, group Dev)",
        "bitsandbytes": ">=0.48.2,<0.49 (extra gpu)",
    }
    (note,) = assessment.notes
    assert note.endswith('extra windows: peft is left out, its marker is false here: sys_platform == "never"')
    needs = {need.patch.id: need for need in assessment.needs}
    assert needs["accelerate-hf-initialized"].because == (
        "accelerate <1.14.0; bitsandbytes >=0.48.2,<0.49 (extra gpu); transformers >=5.22.2,<6"
    )
    assert needs["bitsandbytes-cpu-packing"].because == ("bitsandbytes >=0.48.2,<0.49 is outside >=0.49.0")
    assert needs["transformers-shared-kv"].because == "transformers <5.23.0"


def test_what_a_project_always_asks_for_holds_what_its_extras_ask_for(ask: Ask) -> None:
    assessment = ask(
        '[project]\nname = "x"\ndependencies = ["accelerate>=1.13"]\n'
        '[project.optional-dependencies]\nold = ["accelerate<1.14", "peft==0.18.0"]\nNew_One = ["peft==0.19.1"]\n',
        name="pyproject.toml",
    )
    assert states(assessment)["accelerate"] == ">=1.13"
    assert states(assessment)["peft"] == "0.18.0 or 0.19.1 (extra old, extra New_One)"


def test_overrides_replace_what_was_asked_for_and_constraints_do_not_apply_to_them(ask: Ask) -> None:
    assessment = ask(
        '[project]\nname = "x"\ndependencies = ["accelerate==1.13.0"]\n'
        '[tool.uv]\noverride-dependencies = ["accelerate>=1.14", "peft==0.20.0"]\n'
        'constraint-dependencies = ["accelerate<1.14"]\ndev-dependencies = ["bitsandbytes"]\n',
        name="pyproject.toml",
    )
    assert states(assessment)["accelerate"] == ">=1.14"
    assert states(assessment)["peft"] == "not named in pyproject.toml (there, it would be 0.20.0)"
    assert states(assessment)["bitsandbytes"] == "any release (group dev)"


def test_a_group_that_includes_another_asks_for_both(ask: Ask) -> None:
    assessment = ask(
        '[dependency-groups]\nbase = ["peft>=0.19"]\n"Dev.Group" = [{include-group = "BASE"}, "peft<0.20"]\n'
        'all = [{include-group = "dev-group"}]\n',
        name="pyproject.toml",
    )
    assert states(assessment)["peft"] == ">=0.19 or >=0.19,<0.20 (group base, group Dev.Group, group all)"


def test_a_uv_source_does_not_tell_the_release_and_an_index_does_not_matter(ask: Ask) -> None:
    assessment = ask(
        '[project]\nname = "x"\ndependencies = ["transformers>=5.5", "accelerate==1.13.0"]\n[tool.uv.sources]\n'
        'transformers = [{git = "https://github.com/huggingface/transformers", marker = "sys_platform != \'x\'"}]\n'
        'accelerate = {index = "mirror"}\npeft = {git = "https://github.com/huggingface/peft"}\n',
        name="pyproject.toml",
    )
    assert states(assessment)["transformers"].startswith("from git https://github.com/huggingface/transformers")
    assert states(assessment)["accelerate"] == "1.13.0"
    assert states(assessment)["peft"] == "not named in pyproject.toml"


def test_dynamic_dependencies_are_said_not_to_be_read(ask: Ask) -> None:
    (first, second) = ask('[project]\nname = "x"\ndynamic = ["dependencies"]', name="pyproject.toml").notes
    assert "has none of transformers, accelerate, peft, bitsandbytes" in first
    assert "dependencies are dynamic and not read" in second


def test_the_stack_extra_asks_for_the_oldest_supported_releases() -> None:
    assessment = judge.assess(ROOT / "pyproject.toml", tuple(PATCHES.values()))
    for stated in assessment.distributions:
        (text,) = stated.ranges
        assert text.startswith(">=")
        assert Version(text[2:]) == Version(OLDEST[stated.distribution])
        assert stated.origin == "extra stack"
    assert assessment.notes == ()


@pytest.mark.parametrize("name", ["uv.lock", "pylock.toml", "pyproject.toml"])
def test_locks_that_uv_wrote_say_what_the_requirements_do(name: str) -> None:
    exported = judge.assess(SAMPLES / "pins" / "requirements.txt", tuple(PATCHES.values()))
    assessment = judge.assess(SAMPLES / "pins" / name, tuple(PATCHES.values()))
    assert (assessment.distributions, assessment.notes, assessment.needs) == (
        exported.distributions,
        (),
        exported.needs,
    )


def test_all_forks_of_a_uv_lock_count() -> None:
    assessment = judge.assess(SAMPLES / "fork" / "uv.lock", tuple(PATCHES.values()))
    assert states(assessment)["transformers"] == "5.6.2 or 5.23.0"
    need = next(need for need in assessment.needs if need.patch.id == "transformers-shared-kv")
    assert (need.verdict, need.because) == ("needed_by_some", "transformers 5.6.2")


@pytest.mark.skipif(sys.platform not in ("linux", "darwin", "win32"), reason="the lock is for these platforms")
def test_of_the_forks_of_a_pylock_the_one_whose_marker_is_true_here_counts() -> None:
    assessment = judge.assess(SAMPLES / "fork" / "pylock.toml", tuple(PATCHES.values()))
    mine, other = ("5.6.2", "5.23.0") if sys.platform == "win32" else ("5.23.0", "5.6.2")
    assert states(assessment)["transformers"] == mine
    (note,) = assessment.notes
    assert "packages.transformers is left out, its marker is false here" in note
    assert other not in str(assessment.distributions)


@pytest.mark.parametrize("name", ["uv.lock", "pylock.nightly.toml", "requirements-nightly.txt"])
def test_a_locked_checkout_has_no_release_and_what_a_lock_does_not_hold_is_not_installed(name: str) -> None:
    assessment = judge.assess(SAMPLES / "checkout" / name, tuple(PATCHES.values()))
    (note,) = assessment.notes
    assert note.startswith("cannot tell the release of transformers: ")
    assert "../transformers" in note
    assert states(assessment)["accelerate"] == "1.13.0"
    absent = "not named in" if name.endswith(".txt") else "not in"
    assert states(assessment)["peft"] == f"{absent} {name}"
    found = verdicts(assessment)
    assert found["transformers-map-boundaries"] == "depends"
    assert found["peft-keep-dispatch"] == ("depends" if name.endswith(".txt") else "not_needed")
    assert found["transformers-adapter-placement"] == ("depends" if name.endswith(".txt") else "not_needed")


def test_a_pylock_for_other_environments_is_said_to_be_one(ask: Ask) -> None:
    text = 'lock-version = "1.0"\nenvironments = ["sys_platform == \'never\'"]\n[[packages]]\nname = "peft"\n'
    (first, _) = ask(text + 'version = "0.19.1"\nmarker = "sys_platform == \'never\'"', name="pylock.gpu.toml").notes[
        1:
    ]
    assert first.endswith("was locked for other environments than this one: sys_platform == 'never'")


def test_in_a_pylock_all_extras_and_groups_count(ask: Ask) -> None:
    from packaging.markers import InvalidMarker, Marker

    text = 'lock-version = "1.1"\nextras = ["gpu"]\ndependency-groups = ["dev"]\n' + "".join(
        f'[[packages]]\nname = "{name}"\nversion = "{version}"\nmarker = "{marker}"\n'
        for name, version, marker in [
            ("peft", "0.19.1", "'gpu' in extras"),
            ("accelerate", "1.13.0", "'dev' in dependency_groups and python_version >= '3'"),
            ("bitsandbytes", "0.49.2", "'other' in extras"),
        ]
    )
    try:
        Marker("'gpu' in extras")
    except InvalidMarker:  # packaging before 25
        with pytest.raises(Gemma4CompatError, match=r"'gpu' in extras.* cannot be read; pip install -U packaging"):
            ask(text, name="pylock.toml")
        return
    found = states(ask(text, name="pylock.toml"))
    assert (found["peft"], found["accelerate"]) == ("0.19.1", "1.13.0")
    assert found["bitsandbytes"] == "not in pylock.toml"
