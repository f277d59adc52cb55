"""``gemma4-compat needed``: what a file says about releases, and what follows for each patch."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Gemma4CompatError, Patch, cli
from gemma4_compat._engine import versions as _versions
from gemma4_compat._needed import judge
from tests.engine.test_import_cost import UPSTREAM, imported_by
from tests.helpers import ROOT, Library

SAMPLES = Path(__file__).parent / "samples"
PATCHES = {patch.id: patch for patch in gemma4_compat.patches()}
OLDEST = _versions.OLDEST
PINS = "transformers==5.6.2\naccelerate==1.13.0\npeft==0.19.1\nbitsandbytes==0.49.2\n"


def patch_on(affected: str, *requires: str, **fields: Any) -> Patch:
    """A patch on accelerate whose metadata are these; nothing else of it is looked at."""
    fields = {"distribution": "accelerate", "measured": "1.13.0", "fixed": None, **fields}
    return replace(
        PATCHES["accelerate-hf-initialized"], id="the-patch", affected=affected, requires=requires, **fields
    )


Ask = Callable[..., judge.Answer]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """``ask(text, *patches)``: the answer about a file of that text (default: all patches of the package)."""

    def asked(text: str, *patches: Patch, name: str = "requirements.txt", **others: str) -> judge.Answer:
        for other, content in {name: text, **{f"{key}.txt": value for key, value in others.items()}}.items():
            (tmp_path / other).write_text(content, encoding="utf-8")
        return judge.answer(tmp_path / name, patches or tuple(PATCHES.values()))

    return asked


def stands(answer: judge.Answer) -> dict[str, str]:
    """Each library's line, without its name."""
    return {stand.distribution: str(stand).removeprefix(f"{stand.distribution} ") for stand in answer.stands}


def verdicts(answer: judge.Answer) -> dict[str, str]:
    return {need.patch.id: str(need.verdict) for need in answer.needs}


def only(answer: judge.Answer) -> judge.Need:
    (need,) = answer.needs
    return need


# ------------------------------------------------------------------------------------------------- releases and ranges


def expected(patch: Patch, versions: dict[str, str | None]) -> str:
    """What the metadata ask for with these releases, as tests/contract reads them; but old ones are not judged."""
    conditions = [Requirement(f"{patch.distribution}{patch.affected}"), *map(Requirement, patch.requires)]
    old, outside = False, False
    for condition in conditions:
        version = versions[condition.name]
        if version is None:
            return "not_needed"
        if Version(version) < Version(OLDEST[condition.name]):
            old = True
        elif not condition.specifier.contains(version, prereleases=True):
            outside = True
    return "not_needed" if outside else "unsupported" if old else "needed"


def around_the_gates(patch: Patch, distribution: str) -> list[str | None]:
    """Releases at, before and after every bound that a patch puts on a distribution, very old and new ones, none."""
    texts = [f"{patch.distribution}{patch.affected}", *patch.requires]
    conditions = [item for item in map(Requirement, texts) if item.name == distribution]
    gates = {Version(clause.version) for item in conditions for clause in item.specifier} | {
        Version(OLDEST[distribution])
    }
    found = []
    for gate in gates:
        major, minor, micro = (*gate.release, 0, 0)[:3]
        found += [f"{major}.{minor}.{micro}", f"{major}.{minor}.{micro}rc1", f"{major}.{minor}.{micro}.post1"]
        found += [f"{major}.{minor}.{micro + 1}", f"{major}.{minor}.{micro}+cpu", f"{major}.{minor + 1}.0.dev0"]
        found += [f"{major}.{minor}.{micro - 1}"] if micro else [f"{major}.{minor - 1}.9"] if minor else []
    return [*dict.fromkeys(found), "0.0.1", "99.0", None]


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_for_pins_around_every_gate_it_says_what_the_metadata_ask_for(
    patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [patch.distribution, *(Requirement(text).name for text in patch.requires)]
    seen = set()
    for releases in itertools.product(*(around_the_gates(patch, name) for name in names)):
        versions = dict.fromkeys(OLDEST) | dict(zip(names, releases))
        monkeypatch.setattr(_versions, "installed", versions.__getitem__)
        found = str(only(judge.answer(None, (patch,))).verdict)
        assert found == expected(patch, versions), versions
        seen.add(found)
    assert seen == {"needed", "unsupported", "not_needed"}


NUMBERS = [
    f"1.{minor}.{micro}{suffix}"
    for minor in range(12, 17)
    for micro in range(4)
    for suffix in ("", ".0.1", ".1", ".99", ".post1")
] + ["1.11.9", "2.0"]
RANGES = [
    f"{first}{low},{second}{high}".strip(",")
    for first, low in itertools.product((">=", ">", "!=", "~="), ("1.12", "1.13.0", "1.14"))
    for second, high in [*itertools.product(("<", "<=", "!="), ("1.13.1", "1.14.0", "1.15.1")), ("", "")]
] + ["==1.13.*", "==1.14.0", "!=1.14.*", "<1.13", "<=1.13.2", "~=1.13.1", ">=1.13,!=1.14.0,<1.15,!=1.13.1"]


@pytest.mark.parametrize("affected", [">=1.12", ">=1.12,<1.14.0", ">=1.13,<1.15", ">=1.13.1,<1.14", ">=1.14.0"])
def test_a_range_is_judged_as_every_release_in_it_would_be(ask: Ask, affected: str) -> None:
    for text in RANGES:
        admitted = [number for number in NUMBERS if number in SpecifierSet(f"{text},>=1.12.0")]
        inside = [number for number in admitted if number in SpecifierSet(affected)]
        if not admitted:
            continue  # nothing of it is supported, or it contradicts itself
        verdict = only(ask(f"accelerate{text}", patch_on(affected))).verdict
        wanted = "needed" if len(inside) == len(admitted) else "needed_by_some" if inside else "not_needed"
        assert verdict == wanted, f"{text} with {affected}"


@pytest.mark.parametrize(
    "line, verdict, because",
    [
        ("accelerate==1.13.0", "needed", "accelerate 1.13.0"),
        ("accelerate ~= 1.13.0", "needed", "accelerate ~=1.13.0"),
        ("accelerate<1.14,>=1.13", "needed", "accelerate >=1.13,<1.14"),
        ("accelerate>=1.13", "needed_by_some", "accelerate <1.14.0"),
        ("accelerate", "needed_by_some", "accelerate <1.14.0"),
        ("accelerate>=1.10", "needed_by_some", "accelerate <1.14.0"),
        ("accelerate==1.13.*", "needed", "accelerate ==1.13.*"),
        ("accelerate===1.13.0", "needed", "accelerate 1.13.0"),
        ("accelerate==1.14.0rc1", "not_needed", "accelerate 1.14.0rc1 is outside >=1.12,<1.14.0"),
        ("accelerate>=1.14", "not_needed", "accelerate >=1.14 is outside >=1.12,<1.14.0"),
        ("accelerate==1.11.0", "unsupported", "accelerate 1.11.0 is below 1.12.0"),
        ("accelerate<1.12", "unsupported", "accelerate <1.12 is below 1.12.0"),
        ("torch", "depends", "accelerate not named in requirements.txt"),
    ],
)
def test_the_verdict_comes_with_what_decided_it(ask: Ask, line: str, verdict: str, because: str) -> None:
    need = only(ask(line, patch_on(">=1.12,<1.14.0")))
    assert (need.verdict, need.because) == (verdict, because)


def test_a_patch_is_needed_only_where_every_library_it_is_about_is_there_and_affected(ask: Ask) -> None:
    patch = patch_on(">=1.12,<1.14.0", "bitsandbytes", "transformers>=5.5.3,<5.23")
    assert only(ask(PINS, patch)).because == "accelerate 1.13.0; bitsandbytes 0.49.2; transformers 5.6.2"
    some = only(ask("accelerate==1.13.0\nbitsandbytes\ntransformers>=5.20", patch))
    assert (some.verdict, some.because) == (
        "needed_by_some",
        "accelerate 1.13.0; bitsandbytes any release; transformers <5.23",
    )
    depends = only(ask("accelerate==1.13.0\ntransformers>=5.20", patch))
    assert (depends.verdict, depends.because) == ("depends", "bitsandbytes not named in requirements.txt")
    outside = only(ask("accelerate>=1.14", patch))
    assert (outside.verdict, outside.because) == ("not_needed", "accelerate >=1.14 is outside >=1.12,<1.14.0")


@pytest.mark.parametrize(
    "affected, requires, ways",
    [
        (">=1.12", (), ()),
        (">=1.12,<1.14.0", (), ("accelerate>=1.14.0",)),
        (">=1.12,<=1.13.2", (), ("accelerate>1.13.2",)),
        (">=1.12,<1.14.0rc1", (), ("accelerate>=1.14.0rc1",)),
        (">=1.12", ("transformers>=5.5.3,<5.23",), ("transformers>=5.23",)),
        (">=1.12,<1.14", ("transformers~=5.6",), ("accelerate>=1.14", "transformers>=6")),
        (">=1.12", ("transformers==5.6.2", "bitsandbytes"), ("transformers>5.6.2",)),
    ],
)
def test_it_says_which_newer_releases_make_a_patch_unnecessary(
    ask: Ask, affected: str, requires: tuple[str, ...], ways: tuple[str, ...]
) -> None:
    patch = patch_on(affected, *requires)
    assert only(ask(PINS, patch)).unnecessary_with == ways
    for way in ways:
        name = Requirement(way).name
        others = re.sub(rf"^{name}.*$", "", PINS, flags=re.MULTILINE)
        assert only(ask(others + way, patch)).verdict == "not_needed"


@pytest.mark.parametrize(
    "line, fixed, unmeasured",
    [
        ("accelerate==1.13.0", None, False),
        ("accelerate==1.13.1", None, True),
        ("accelerate==1.13.0+cpu", None, False),
        ("accelerate==1.13.0.post1", None, True),
        ("accelerate<=1.13.0", None, False),
        ("accelerate>=1.12,<2", None, True),
        ("accelerate>=1.13", None, True),
        ("accelerate<1.13", None, False),
        ("accelerate>=1.13", "1.14.0", False),
        ("accelerate==1.13.1", "1.14.0", True),
        ("accelerate==1.14.0", "1.14.0", False),
    ],
)
def test_a_release_newer_than_the_measured_one_is_marked(
    ask: Ask, line: str, fixed: str | None, unmeasured: bool
) -> None:
    patch = patch_on(">=1.12" + (f",<{fixed}" if fixed else ""), fixed=fixed)
    assert only(ask(line, patch)).unmeasured is unmeasured


def test_releases_below_the_supported_ones_are_reported_once_with_what_to_ask_for(ask: Ask) -> None:
    answer = ask("transformers==4.57.1\naccelerate>=1.10\npeft\nbitsandbytes==0.48.2")
    assert answer.notes == (
        "transformers 4.57.1 is below 5.5.0, the oldest supported: ask for transformers>=5.5.0",
        "accelerate >=1.10 admits releases below 1.12.0, the oldest supported: ask for accelerate>=1.12.0",
    )
    assert verdicts(answer)["transformers-map-boundaries"] == "unsupported"
    assert verdicts(answer)["accelerate-nested-map"] == "needed"
    assert not answer.droppable


def test_every_patch_can_become_unnecessary_or_says_that_no_release_does_it_so_far(ask: Ask) -> None:
    for need in ask(PINS).needs:
        assert bool(need.unnecessary_with) is any("<" in text for text in (need.patch.affected, *need.patch.requires))


# ---------------------------------------------------------------------------------------------------- requirements.txt


def test_requirements_that_uv_exported_with_hashes() -> None:
    answer = judge.answer(SAMPLES / "pins" / "requirements.txt", tuple(PATCHES.values()))
    assert stands(answer) == {
        "transformers": "5.6.2",
        "accelerate": "1.13.0",
        "peft": "0.19.1",
        "bitsandbytes": "0.49.2",
    }
    assert answer.notes == ()
    assert verdicts(answer)["accelerate-hf-initialized"] == "needed"
    assert verdicts(answer)["transformers-shared-kv-unified"] == "not_needed"


def test_a_requirements_file_as_people_write_it(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEFT_RELEASE", "0.19.1")
    answer = ask(
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
    assert stands(answer) == {
        "transformers": ">=5.5,<5.23,!=5.9.0",
        "accelerate": ">=1.13,<1.15",
        "peft": "0.19.1",
        "bitsandbytes": "0.49.2",
    }
    assert answer.notes == ()


def test_a_line_whose_marker_is_false_here_is_left_out_and_that_is_said(ask: Ask) -> None:
    old, new = "python_version < '3'", "python_version >= '3'"
    answer = ask(f"transformers==5.6.2; {new}\ntransformers==5.5.0; {old}\npeft; {old}\ntorch; {old}")
    assert stands(answer)["transformers"] == "5.6.2"
    assert stands(answer)["peft"] == "not named in requirements.txt"
    left_out = [note.partition(": ")[2] for note in answer.notes]
    assert left_out == [
        f'{name} is left out, its marker is false here: python_version < "3"' for name in ("transformers", "peft")
    ]
    assert "requirements.txt line 2: " in answer.notes[0]


def test_a_constraint_alone_says_what_it_would_be_not_that_it_is_there(ask: Ask) -> None:
    answer = ask("transformers==5.6.2\n-c top.txt", top="accelerate>=1.14\npeft<0.19\n")
    assert stands(answer)["accelerate"] == "not named in requirements.txt (there, it would be >=1.14)"
    assert verdicts(answer)["accelerate-hf-initialized"] == "not_needed"
    assert verdicts(answer)["accelerate-nested-map"] == "depends"
    assert verdicts(answer)["peft-keep-dispatch"] == "depends"


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
    answer = ask(f"accelerate==1.13.0\n{line}")
    (note,) = answer.notes
    assert note.startswith("cannot tell the release of transformers: ")
    assert "requirements.txt line 2" in note
    assert "transformers==RELEASE" in note
    found = verdicts(answer)
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
    ],
)
def test_the_name_of_an_archive_tells_its_release(ask: Ask, line: str) -> None:
    answer = ask(line)
    assert stands(answer)["transformers"] == "5.6.2"
    assert answer.notes == ()


def test_a_project_installed_from_its_folder_and_an_unknown_option_are_said(ask: Ask) -> None:
    answer = ask("transformers\n-e .[train]\n--weather=fine\n-r https://example.org/more.txt\ngit+https://a.b/c")
    said = [re.sub(r"^.*requirements.txt", "", note) for note in answer.notes]
    assert said == [
        " line 2: what .[train] requires is not looked into; ask about its own file, too",
        " line 3: the option --weather is not understood and ignored",
        " line 4: https://example.org/more.txt is not read; ask about a copy of it",
    ]


def test_a_file_that_powershell_wrote(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_bytes(PINS.replace("\n", "\r\n").encode("utf-16"))
    assert stands(judge.answer(path, tuple(PATCHES.values())))["transformers"] == "5.6.2"


@pytest.mark.parametrize("name", ["newest", "thread"])
def test_the_constraints_of_this_repository(name: str) -> None:
    path = ROOT / "constraints" / f"{name}.txt"
    answer = judge.answer(path, tuple(PATCHES.values()))
    pins = dict(line.split("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)
    assert stands(answer) == {library: pins[library] for library in OLDEST}
    assert {str(need.verdict) for need in answer.needs} == {"needed", "not_needed"}


# ------------------------------------------------------------------------------------------------------ pyproject.toml


def test_a_pyproject_with_ranges_extras_groups_and_constraints() -> None:
    answer = judge.answer(SAMPLES / "ranges" / "pyproject.toml", tuple(PATCHES.values()))
    assert stands(answer) == {
        "transformers": ">=5.22.2,<6",
        "accelerate": ">=1.13,<1.15",
        "peft": ">=0.18,<0.22 (group adapters, group Dev)",
        "bitsandbytes": ">=0.48.2,<0.49 (extra gpu)",
    }
    (note,) = answer.notes
    assert note.endswith('extra windows: peft is left out, its marker is false here: sys_platform == "never"')
    needs = {need.patch.id: need for need in answer.needs}
    assert needs["accelerate-hf-initialized"].because == (
        "accelerate <1.14.0; bitsandbytes >=0.48.2,<0.49 (extra gpu); transformers >=5.22.2,<6"
    )
    assert needs["bitsandbytes-cpu-packing"].because == ("bitsandbytes >=0.48.2,<0.49 is outside >=0.49.0")
    assert needs["transformers-shared-kv"].because == "transformers <5.23.0"


def test_what_a_project_always_asks_for_holds_what_its_extras_ask_for(ask: Ask) -> None:
    answer = ask(
        '[project]\nname = "x"\ndependencies = ["accelerate>=1.13"]\n'
        '[project.optional-dependencies]\nold = ["accelerate<1.14", "peft==0.18.0"]\nNew_One = ["peft==0.19.1"]\n',
        name="pyproject.toml",
    )
    assert stands(answer)["accelerate"] == ">=1.13"
    assert stands(answer)["peft"] == "0.18.0 or 0.19.1 (extra old, extra New_One)"


def test_overrides_replace_what_was_asked_for_and_constraints_do_not_apply_to_them(ask: Ask) -> None:
    answer = ask(
        '[project]\nname = "x"\ndependencies = ["accelerate==1.13.0"]\n'
        '[tool.uv]\noverride-dependencies = ["accelerate>=1.14", "peft==0.20.0"]\n'
        'constraint-dependencies = ["accelerate<1.14"]\ndev-dependencies = ["bitsandbytes"]\n',
        name="pyproject.toml",
    )
    assert stands(answer)["accelerate"] == ">=1.14"
    assert stands(answer)["peft"] == "not named in pyproject.toml (there, it would be 0.20.0)"
    assert stands(answer)["bitsandbytes"] == "any release (group dev)"


def test_a_group_that_includes_another_asks_for_both(ask: Ask) -> None:
    answer = ask(
        '[dependency-groups]\nbase = ["peft>=0.19"]\n"Dev.Group" = [{include-group = "BASE"}, "peft<0.20"]\n'
        'all = [{include-group = "dev-group"}]\n',
        name="pyproject.toml",
    )
    assert stands(answer)["peft"] == ">=0.19 or >=0.19,<0.20 (group base, group Dev.Group, group all)"


def test_a_uv_source_does_not_tell_the_release_and_an_index_does_not_matter(ask: Ask) -> None:
    answer = ask(
        '[project]\nname = "x"\ndependencies = ["transformers>=5.5", "accelerate==1.13.0"]\n[tool.uv.sources]\n'
        'transformers = [{git = "https://github.com/huggingface/transformers", marker = "sys_platform != \'x\'"}]\n'
        'accelerate = {index = "mirror"}\npeft = {git = "https://github.com/huggingface/peft"}\n',
        name="pyproject.toml",
    )
    assert stands(answer)["transformers"].startswith("from git https://github.com/huggingface/transformers")
    assert stands(answer)["accelerate"] == "1.13.0"
    assert stands(answer)["peft"] == "not named in pyproject.toml"


def test_dynamic_dependencies_are_said_not_to_be_read(ask: Ask) -> None:
    (first, second) = ask('[project]\nname = "x"\ndynamic = ["dependencies"]', name="pyproject.toml").notes
    assert "has none of transformers, accelerate, peft, bitsandbytes" in first
    assert "dependencies are dynamic and not read" in second


def test_the_stack_extra_asks_for_the_oldest_supported_releases() -> None:
    answer = judge.answer(ROOT / "pyproject.toml", tuple(PATCHES.values()))
    for stand in answer.stands:
        (text,) = stand.ranges
        assert text.startswith(">=")
        assert Version(text[2:]) == Version(OLDEST[stand.distribution])
        assert stand.origin == "extra stack"
    assert answer.notes == ()


# ---------------------------------------------------------------------------------------------------------- lock files


@pytest.mark.parametrize("name", ["uv.lock", "pylock.toml", "pyproject.toml"])
def test_locks_that_uv_wrote_say_what_the_requirements_do(name: str) -> None:
    exported = judge.answer(SAMPLES / "pins" / "requirements.txt", tuple(PATCHES.values()))
    answer = judge.answer(SAMPLES / "pins" / name, tuple(PATCHES.values()))
    assert (answer.stands, answer.notes, answer.needs) == (exported.stands, (), exported.needs)


def test_all_forks_of_a_uv_lock_count() -> None:
    answer = judge.answer(SAMPLES / "fork" / "uv.lock", tuple(PATCHES.values()))
    assert stands(answer)["transformers"] == "5.6.2 or 5.23.0"
    need = next(need for need in answer.needs if need.patch.id == "transformers-shared-kv")
    assert (need.verdict, need.because) == ("needed_by_some", "transformers 5.6.2")


@pytest.mark.skipif(sys.platform not in ("linux", "darwin", "win32"), reason="the lock is for these platforms")
def test_of_the_forks_of_a_pylock_the_one_whose_marker_is_true_here_counts() -> None:
    answer = judge.answer(SAMPLES / "fork" / "pylock.toml", tuple(PATCHES.values()))
    mine, other = ("5.6.2", "5.23.0") if sys.platform == "win32" else ("5.23.0", "5.6.2")
    assert stands(answer)["transformers"] == mine
    (note,) = answer.notes
    assert "packages.transformers is left out, its marker is false here" in note
    assert other not in str(answer.stands)


@pytest.mark.parametrize("name", ["uv.lock", "pylock.nightly.toml", "requirements-nightly.txt"])
def test_a_locked_checkout_has_no_release_and_what_a_lock_does_not_hold_is_not_installed(name: str) -> None:
    answer = judge.answer(SAMPLES / "checkout" / name, tuple(PATCHES.values()))
    (note,) = answer.notes
    assert note.startswith("cannot tell the release of transformers: ")
    assert "../transformers" in note
    assert stands(answer)["accelerate"] == "1.13.0"
    absent = "not named in" if name.endswith(".txt") else "not in"
    assert stands(answer)["peft"] == f"{absent} {name}"
    found = verdicts(answer)
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
    found = stands(ask(text, name="pylock.toml"))
    assert (found["peft"], found["accelerate"]) == ("0.19.1", "1.13.0")
    assert found["bitsandbytes"] == "not in pylock.toml"


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "name, text, message",
    [
        (
            "requirements.txt",
            "peft\ntransformers=>5",
            r"requirements.txt line 2: 'transformers=>5' is not a requirement",
        ),
        ("requirements.txt", "a \\\n==1\npeft 0.19", r"line 3: 'peft 0.19' is not a requirement; write it as"),
        ("requirements.txt", "-r gone.txt", r"line 1: .*gone.txt cannot be read \(No such file .*; name an existing"),
        ("requirements.txt", "-r requirements.txt", r"line 1: .*requirements.txt includes itself; remove"),
        (
            "requirements.txt",
            "peft\npeft==0.19\npeft>=0.20",
            r"no release of peft can be ==0.19,>=0.20 \(.*line 1.* 3\)",
        ),
        ("requirements.txt", "./peft ; python < 3", r"line 1: the marker 'python < 3' cannot be read; correct it"),
        ("requirements.txt", "peft ; os_name ~= 'a'", r"line 1: the marker .* has no answer: .*; correct it"),
        (
            "environment.yml",
            "",
            r"environment.yml: what this is must be told by its name: requirements.txt .* uv.lock",
        ),
        ("pylock.a.b.toml", "", r"pylock.a.b.toml: what this is must be told by its name"),
        ("pyproject.toml", "[project\n", r"pyproject.toml is not valid TOML: .*line 1.*; correct it there"),
        ("pyproject.toml", "[tool.poetry]", r"has neither \[project\] nor \[dependency-groups\]; export"),
        ("pyproject.toml", "project = 1", r"project is 1; it must be a table"),
        ("pyproject.toml", "[project]\ndependencies = 'peft'", r"dependencies is 'peft'; it must be a list"),
        ("pyproject.toml", "[project]\ndependencies = [1]", r"1 in dependencies is not text; put it in quotes"),
        (
            "pyproject.toml",
            "[project]\ndependencies = ['peft 1']",
            r"project.dependencies: 'peft 1' is not a requirem",
        ),
        (
            "pyproject.toml",
            "[dependency-groups]\na = [{x = 1}]",
            r"\{'x': 1\} is neither a requirement nor an include",
        ),
        ("pyproject.toml", "[dependency-groups]\na = [{include-group = 'b'}]", r"group 'b' is not defined; correct"),
        ("pyproject.toml", "[dependency-groups]\na = [{include-group = 'A'}]", r"group 'A' includes itself; correct"),
        ("pylock.toml", "", r"pylock.toml has no lock-version; this reads version 1: lock again, or upgrade"),
        ("pylock.toml", "lock-version = '2.0'", r"pylock.toml has lock-version '2.0'; this reads version 1"),
        ("pylock.toml", "lock-version = '1.0'\npackages = [{}]", r"a package without a name in \[\[packages\]\]"),
        ("uv.lock", "version = 2", r"uv.lock has version 2; this reads version 1: lock again, or upgrade"),
        ("uv.lock", "version = 1\npackage = [{name = 'peft', version = 1}]", r"the version 1 is not text; lock again"),
        ("uv.lock", "version = 1\npackage = 3", r"package is 3; it must be a list"),
    ],
)
def test_what_cannot_be_understood_is_one_clear_error(ask: Ask, name: str, text: str, message: str) -> None:
    with pytest.raises(Gemma4CompatError, match=message) as caught:
        ask(text, name=name)
    assert "\n" not in str(caught.value).replace(str(caught.value.__cause__), "")


def test_a_file_that_is_not_there_or_not_text_exits_2_and_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"peft\xff\n")
    for name, said in (("gone.txt", "cannot be read (No such file"), ("binary.txt", "is not UTF-8 text")):
        result = CliRunner().invoke(cli.app, ["needed", str(tmp_path / name), "--json"])
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith(f"gemma4-compat: {tmp_path / name} {said}")


# -------------------------------------------------------------------------------------------------- the command itself


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, ["needed", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout


def test_without_a_file_it_is_about_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    releases = {"transformers": "5.6.2", "accelerate": "1.14.0+x", "peft": "hand-made"}
    monkeypatch.setattr(_versions, "installed", releases.get)
    lines = run().splitlines()
    assert lines[0] == (
        "this environment: transformers 5.6.2, accelerate 1.14.0+x, peft from hand-made, bitsandbytes not installed"
    )
    assert lines[1].startswith("note: cannot tell the release of peft: hand-made")
    found = {item["id"]: item for item in json.loads(run("--json"))["patches"]}
    assert found["accelerate-hf-initialized"]["verdict"] == "not_needed"
    assert found["accelerate-nested-map"]["verdict"] == "needed"
    assert found["peft-keep-dispatch"]["verdict"] == "depends"
    assert found["bitsandbytes-cpu-packing"]["because"] == "bitsandbytes not installed"


def test_the_table_has_a_line_for_each_patch_the_needed_ones_first_and_ends_with_the_sum() -> None:
    path = SAMPLES / "ranges" / "pyproject.toml"
    text, answer = run(str(path)), judge.answer(path, tuple(PATCHES.values()))
    head, table, end = text.strip().split("\n\n")
    assert head.splitlines()[0].startswith(f"{path}: transformers >=5.22.2,<6, accelerate ")
    assert head.splitlines()[1:] == [f"note: {note}" for note in answer.notes]
    lines = table.splitlines()[2:]
    assert sorted(line.split()[0] for line in lines) == sorted(PATCHES)
    order = ["needed", "needed by some", "depends", "unsupported", "not needed"]
    shown = [next(name for name in reversed(order) if re.search(rf"  {name}\*? ", line)) for line in lines]
    assert shown == sorted(shown, key=order.index)
    for need in answer.needs:
        (line,) = [line for line in lines if line.split()[0] == need.patch.id]
        assert line.endswith(need.because)
        assert need.verdict == "not_needed" or (" or ".join(need.unnecessary_with) or "no release so far") in line
        assert ("*" in line) is need.unmeasured
    counts = {name: shown.count(name) for name in order}
    assert end.splitlines()[-1] == (
        f"{len(PATCHES)} patches: {counts['needed']} needed, {counts['needed by some']} needed by some of these "
        f"releases, {counts['not needed']} not needed."
    )
    assert end.startswith("* newer than ")
    assert "unmeasured release" in end


def test_what_a_verdict_depends_on_is_explained(ask: Ask, tmp_path: Path) -> None:
    ask("transformers==5.6.2")
    explanation, total = run(str(tmp_path / "requirements.txt")).splitlines()[-2:]
    assert explanation.startswith("depends: what is not named may be any release, or absent; a lock file tells")
    assert "depend on what is not said" in total


def test_as_json_everything_is_on_stdout_and_in_the_registrys_order() -> None:
    data = json.loads(run(str(SAMPLES / "fork" / "uv.lock"), "--json"))
    assert [item["id"] for item in data["patches"]] == list(PATCHES)
    assert data["gemma4_compat"] == gemma4_compat.__version__
    assert data["distributions"]["transformers"] == {
        "text": "transformers 5.6.2 or 5.23.0",
        "specifiers": ["==5.6.2", "==5.23.0"],
        "certain": True,
        "origin": None,
    }
    assert data["droppable"] is False
    for item, need in zip(data["patches"], judge.answer(SAMPLES / "fork" / "uv.lock", tuple(PATCHES.values())).needs):
        assert item == {
            "id": need.patch.id,
            "verdict": need.verdict,
            "because": need.because,
            "unnecessary_with": list(need.unnecessary_with),
            "fixed": need.patch.fixed,
            "measured": need.patch.measured,
            "unmeasured": need.unmeasured,
            "opt_in": need.patch.opt_in,
        }


@pytest.mark.parametrize(
    "text, patch, droppable",
    [
        ("accelerate==1.14.0", patch_on(">=1.12,<1.14.0"), True),
        ("accelerate>=1.14", patch_on(">=1.12,<1.14.0"), True),
        ("accelerate>=1.13", patch_on(">=1.12,<1.14.0"), False),
        ("accelerate==1.13.0", patch_on(">=1.12,<1.14.0"), False),
        ("accelerate==1.11.0", patch_on(">=1.12,<1.14.0"), False),
        ("accelerate==1.13.0", patch_on(">=1.12", opt_in=True), True),
        ("peft", patch_on(">=1.12,<1.14.0"), False),
        ("torch", patch_on(">=1.12,<1.14.0"), False),
    ],
)
def test_ci_can_be_told_when_the_package_can_be_dropped(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, patch: Patch, droppable: bool
) -> None:
    assert ask(text, patch).droppable is droppable
    monkeypatch.setattr(gemma4_compat, "patches", lambda: (patch,))
    file = str(tmp_path / "requirements.txt")
    last = run(file).splitlines()[-1]
    assert ("gemma4_compat can be dropped" in last) is droppable
    assert ("unless you enable the-patch" in last) is patch.opt_in
    assert ("(opt-in)" in run(file)) is patch.opt_in
    assert json.loads(run(file, "--json"))["droppable"] is droppable
    run(file, "--fail-if-droppable", code=1 if droppable else 0)


@pytest.mark.parametrize(
    "name, text",
    [("requirements.txt", "torch\nnumpy==2"), ("uv.lock", "version = 1"), ("pyproject.toml", "[project]")],
)
def test_a_file_that_names_none_of_the_libraries_is_probably_not_the_right_one(ask: Ask, name: str, text: str) -> None:
    if name == "pyproject.toml":
        text += '\nname = "x"'
    answer = ask(text, name=name)
    assert answer.notes[0].endswith(
        f"{name} has none of transformers, accelerate, peft, bitsandbytes: is it the right one?"
    )
    assert not answer.droppable


def test_a_patch_on_a_library_of_another_name_is_judged_as_well(create: Callable[..., Library]) -> None:
    library = create(version="1.0")
    patch = patch_on(">=1,<2", distribution=library.name, measured="1.0")
    need = only(judge.answer(None, (patch,)))
    assert (need.verdict, need.because) == ("needed", f"{library.name} 1.0")
    assert need.unnecessary_with == (f"{library.name}>=2",)


def test_it_imports_no_library_and_importing_the_package_does_not_import_it() -> None:
    assert not {"gemma4_compat._needed", "tomllib", "tomli"} & imported_by("import gemma4_compat")
    path = SAMPLES / "pins" / "uv.lock"
    loaded = imported_by(
        f"import sys; sys.argv[1:] = ['needed', {str(path)!r}]; from gemma4_compat.cli import main; main()"
    )
    assert "gemma4_compat._needed" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(UPSTREAM)


def test_the_help_names_the_command_and_the_files_it_reads() -> None:
    assert "needed" in CliRunner().invoke(cli.app, ["--help"]).stdout
    text = re.sub(r"[\s│]+", " ", CliRunner().invoke(cli.app, ["needed", "--help"], env={"COLUMNS": "200"}).stdout)
    for name in ("requirements.txt", "pyproject.toml", "pylock.toml", "uv.lock", "--fail-if-droppable"):
        assert name in text
