"""What a patch says about itself: complete, consistent, and in the vocabulary of the project."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._engine.patch import Patch, Severity
from gemma4_compat._needed import ranges
from tests.collecting import collect_failures
from tests.contract.conftest import PATCHES
from tests.helpers import ROOT


def file_of(patch: Patch) -> Path:
    return Path(inspect.getfile(patch.reproduce))


@dataclass(frozen=True)
class FailurePoint:
    """A section of docs/FAILURE_POINTS.md: the area it is in, and the ids of the patches it lists."""

    area: str
    patches: list[str]


def failure_points() -> dict[str, FailurePoint]:
    found = {}
    for area in re.split(r"^## ", FAILURE_POINTS.read_text(encoding="utf-8"), flags=re.M)[1:]:
        for section in re.split(r"^### ", area, flags=re.M)[1:]:
            listed = section.partition("**Repaired by:**")[2].partition("\n\n")[0]
            ids = re.findall(r"\[`([a-z0-9-]+)`\]\(patches/[a-z-]+\.md#\1\)", listed)
            found[section.partition(":")[0]] = FailurePoint(area.partition("\n")[0].lower(), ids)
    return found


FAILURE_POINTS = ROOT / "docs" / "FAILURE_POINTS.md"
MAP = failure_points()


def test_there_are_patches_and_no_two_with_one_id() -> None:
    ids = [patch.id for patch in gemma4_compat.patches()]
    assert ids
    assert len(set(ids)) == len(ids)


@collect_failures(patch=PATCHES)
def test_the_id_is_the_distribution_a_slug_and_the_name_of_the_file(patch: Patch) -> None:
    assert re.fullmatch(rf"{re.escape(patch.distribution)}-[a-z0-9]+(-[a-z0-9]+)*", patch.id)
    assert file_of(patch).parent.parent == Path(gemma4_compat.__file__).parent / "patches"
    assert file_of(patch).stem == patch.id.replace("-", "_")


@collect_failures(patch=PATCHES)
def test_severity_summary_and_failure_points_are_in_the_agreed_form(patch: Patch) -> None:
    assert isinstance(patch.severity, Severity)
    assert patch.summary
    assert "\n" not in patch.summary + patch.symptom + patch.retire_when
    assert patch.failure_points
    assert all(re.fullmatch(r"F\d+", point) for point in patch.failure_points)
    assert patch.symptom.startswith("silent: ") is (patch.severity is not Severity.CRASH)
    assert all(address.startswith("https://") for address in (*patch.bug, patch.applied_upstream or "https://"))


@collect_failures(patch=PATCHES)
def test_affected_is_bounded_below_and_holds_measured(patch: Patch) -> None:
    affected = SpecifierSet(patch.affected)
    assert affected.contains(patch.measured, prereleases=True)
    assert not affected.contains("0.0.1", prereleases=True)


@collect_failures(patch=PATCHES)
def test_no_release_below_the_oldest_supported_one_is_claimed(patch: Patch) -> None:
    oldest = Version(versions.OLDEST[patch.distribution])
    assert max(Version(item.version) for item in SpecifierSet(patch.affected) if item.operator == ">=") >= oldest
    first = [releases.partition(" - ")[0] for target in patch.targets for releases in target.known.values()]
    assert min(map(Version, first)) >= oldest


@collect_failures(patch=PATCHES)
def test_a_fixed_patch_is_closed_by_the_release_that_fixed_it(patch: Patch) -> None:
    operators = {item.operator: item.version for item in SpecifierSet(patch.affected)}
    if patch.fixed is None:
        assert not {"<", "<="} & set(operators), "closed, but no release is said to fix it"
    else:
        assert operators["<"] == patch.fixed
        assert Version(patch.measured) < Version(patch.fixed)
        assert patch.applied_upstream


@collect_failures(patch=PATCHES)
def test_it_is_not_to_be_retired_yet(patch: Patch) -> None:
    assert patch.fixed is None or Version(patch.fixed) > Version(versions.OLDEST[patch.distribution]), (
        "every release has the fix"
    )
    for condition in [Requirement(f"{patch.distribution}{patch.affected}"), *map(Requirement, patch.requires)]:
        supported = f">={versions.OLDEST[condition.name]}"
        assert ranges.admitted((f"{condition.specifier},{supported}".strip(","),)), f"no {supported} is {condition}"


@collect_failures(patch=PATCHES)
def test_requirements_are_on_other_distributions(patch: Patch) -> None:
    names = [Requirement(text).name for text in patch.requires]
    assert patch.distribution not in names
    assert len(set(names)) == len(names)


@collect_failures(patch=PATCHES)
def test_every_target_is_code_of_the_distribution_that_was_seen(patch: Patch) -> None:
    assert patch.targets
    assert len({str(target) for target in patch.targets}) == len(patch.targets)
    assert patch.modules, "with optional targets only it would be decided before anything is imported"
    for target in patch.targets:
        libraries = ("torch", "accelerate") if target.codes else (patch.distribution.replace("-", "_"),)
        assert target.module.partition(".")[0] in libraries
        assert target.known
        assert all(re.fullmatch("[0-9a-f]{12}", fingerprint) for fingerprint in target.known)
        newest = max(Version(releases.rpartition(" - ")[2]) for releases in target.known.values())
        # An optional one may be gone from later releases; where it is there, its code must be known.
        assert newest == Version(patch.measured) or (target.optional and newest < Version(patch.measured)), target


@collect_failures(patch=PATCHES)
def test_every_replacement_takes_the_original_first_and_lives_in_the_file_or_in_a_shared_module(patch: Patch) -> None:
    for target in patch.targets:
        assert next(iter(inspect.signature(target.replacement).parameters)) == "original"
        home = target.replacement.__module__
        assert home == patch.reproduce.__module__ or re.fullmatch(r"gemma4_compat(\._[a-z0-9_]+)(\.[a-z_]+)+", home)
    assert any(target.replacement.__module__ == patch.reproduce.__module__ for target in patch.targets)


@collect_failures(patch=PATCHES)
def test_the_documentation_is_the_docstring_of_the_file_and_the_summary_its_first_paragraph(patch: Patch) -> None:
    docstring = inspect.cleandoc(sys.modules[patch.reproduce.__module__].__doc__ or "")
    assert patch.documentation == docstring
    assert patch.summary == " ".join(docstring.partition("\n\n")[0].split())
    assert patch.summary.endswith("."), "one sentence"


@collect_failures(patch=PATCHES)
def test_the_documentation_has_four_sections_in_order_and_nothing_in_them_is_empty(patch: Patch) -> None:
    parts = re.split(r"\n\n(Symptom|Cause|Fix|Remove when): ", patch.documentation)
    assert parts[1::2] == ["Symptom", "Cause", "Fix", "Remove when"]
    assert all(part.strip() for part in parts)


@collect_failures(patch=PATCHES)
def test_the_symptom_of_a_crash_quotes_the_class_of_the_exception(patch: Patch) -> None:
    if patch.severity is Severity.CRASH:
        assert re.match(r"``\w+Error\b", patch.symptom)


@collect_failures(patch=PATCHES)
def test_the_patches_it_needs_exist_and_are_others(patch: Patch) -> None:
    assert set(patch.needs) <= {other.id for other in gemma4_compat.patches()} - {patch.id}
    assert len(set(patch.needs)) == len(patch.needs)


@collect_failures(patch=PATCHES)
def test_the_patches_it_comes_after_do_not_follow_it(patch: Patch) -> None:
    """The registry's order says which of two patches of one function is on top, whichever is applied first."""
    order = [other.id for other in gemma4_compat.patches()]
    assert set(patch.after) <= set(order[: order.index(patch.id)])


@collect_failures(patch=PATCHES)
def test_docs_failure_points_md_lists_it_under_each_failure_point_it_names_and_no_other(patch: Patch) -> None:
    assert {name for name, point in MAP.items() if patch.id in point.patches} == set(patch.failure_points)


@collect_failures(name=MAP)
def test_a_failure_point_lists_patches_that_exist_under_an_area_of_one_of_them(name: str) -> None:
    areas = {patch.id: patch.area for patch in gemma4_compat.patches()}
    point = MAP[name]
    assert len(set(point.patches)) == len(point.patches)
    assert set(point.patches) <= set(areas)
    assert point.area in {areas[patch_id] for patch_id in point.patches} or not point.patches
    assert point.area in set(areas.values())


def test_every_number_has_one_entry_or_is_named_as_having_none_and_helpers_exist() -> None:
    page = FAILURE_POINTS.read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^### F(\d+): \S", page, re.M)]
    assert len(numbers) == len(set(numbers)) == len(MAP)
    said = page.partition("\nThese numbers have no entry:\n\n")[2].partition("\n\n")[0]
    gaps = {
        number
        for first, last in re.findall(r"\bF(\d+)(?: to F(\d+))?", said)
        for number in range(int(first), int(last or first) + 1)
    }
    assert gaps | set(numbers) == set(range(1, max(gaps | set(numbers)) + 1))
    assert not gaps & set(numbers)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    fixed = re.findall(r"\bF\d+", said.partition(" were defects of this package")[0])
    assert fixed
    assert set(fixed) <= set(re.findall(r"\bF\d+", changelog))
    assert set(re.findall(r"gemma4_compat\.(\w+)", page)) <= set(gemma4_compat.__all__)


@collect_failures(patch=PATCHES)
def test_it_says_when_it_is_deleted(patch: Patch) -> None:
    assert len(patch.retire_when) > len(patch.distribution)


@collect_failures(patch=PATCHES)
def test_it_imports_no_library_at_module_level(patch: Patch) -> None:
    source = file_of(patch).read_text(encoding="utf-8")
    assert not re.findall(r"^(?:import|from) (?:torch|transformers|accelerate|peft|bitsandbytes)\b", source, re.M)


@collect_failures(patch=PATCHES)
def test_it_has_a_test_of_its_own(patch: Patch) -> None:
    assert (ROOT / "tests" / "patches" / file_of(patch).parent.name / f"test_{file_of(patch).name}").is_file()
