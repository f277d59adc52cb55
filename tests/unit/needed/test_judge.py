"""The verdict on a patch, from what is stated about releases."""

from __future__ import annotations

import itertools
import re

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from gemma4_compat import Patch
from gemma4_compat._engine import versions
from gemma4_compat._needed import judge
from tests.collecting import collect_failures
from tests.unit.needed.helpers import OLDEST, PATCHES, PINS, Ask, only, patch_on, verdicts


def expected(patch: Patch, installed: dict[str, str | None]) -> str:
    """What the metadata ask for with these releases, as tests/contract reads them; but old ones are not judged."""
    conditions = [Requirement(f"{patch.distribution}{patch.affected}"), *map(Requirement, patch.requires)]
    old, outside = False, False
    for condition in conditions:
        version = installed[condition.name]
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


@collect_failures(patch=PATCHES.values())
def test_for_pins_around_every_gate_it_says_what_the_metadata_ask_for(
    patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [patch.distribution, *(Requirement(text).name for text in patch.requires)]
    seen = set()
    for releases in itertools.product(*(around_the_gates(patch, name) for name in names)):
        installed = dict.fromkeys(OLDEST) | dict(zip(names, releases))
        monkeypatch.setattr(versions, "installed", installed.__getitem__)
        found = str(only(judge.assess(None, (patch,))).verdict)
        assert found == expected(patch, installed), installed
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
    assessment = ask("transformers==4.57.1\naccelerate>=1.10\npeft\nbitsandbytes==0.48.2")
    assert assessment.notes == (
        "transformers 4.57.1 is below 5.5.0, the oldest supported: ask for transformers>=5.5.0",
        "accelerate >=1.10 admits releases below 1.12.0, the oldest supported: ask for accelerate>=1.12.0",
    )
    assert verdicts(assessment)["transformers-map-boundaries"] == "unsupported"
    assert verdicts(assessment)["accelerate-nested-map"] == "needed"
    assert not assessment.droppable


def test_every_patch_can_become_unnecessary_or_says_that_no_release_does_it_so_far(ask: Ask) -> None:
    for need in ask(PINS).needs:
        assert bool(need.unnecessary_with) is any("<" in text for text in (need.patch.affected, *need.patch.requires))
