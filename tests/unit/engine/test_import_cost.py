"""What ``import gemma4_compat`` loads: little, and nothing that it is there to repair."""

from __future__ import annotations

import functools

import pytest

import gemma4_compat
from tests.helpers import child

UPSTREAM = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "numpy", "safetensors", "huggingface_hub")


LIST_AT_EXIT = "import atexit, sys; atexit.register(lambda: print(*sys.modules, sep='\\n', file=sys.stderr)); "


@functools.cache
def imported_by(statement: str) -> frozenset[str]:
    """Every module that a fresh interpreter loads for ``statement``, kept or not."""
    done = child("-X", "importtime", "-c", LIST_AT_EXIT + statement)
    assert done.code == 0, done.stderr
    return frozenset(line.rpartition("|")[2].strip() for line in done.stderr.splitlines())


def within(package: str, loaded: frozenset[str]) -> list[str]:
    return [name for name in loaded if name == package or name.startswith(f"{package}.")]


def test_the_listing_works() -> None:
    assert {"gemma4_compat", "gemma4_compat._engine", "packaging.specifiers"} <= imported_by("import gemma4_compat")
    assert within("json", imported_by("import json"))


@pytest.mark.parametrize(
    "package", [*UPSTREAM, "typer", "click", "rich", "packaging.requirements", "msgspec", "gemma4_compat.cli"]
)
def test_it_does_not_import(package: str) -> None:
    assert within(package, imported_by("import gemma4_compat")) == []


@pytest.mark.parametrize("package", ["asyncio", "difflib", "wrapt"])
def test_it_does_not_import_what_importlib_metadata_does_not(package: str) -> None:
    """It needs that module at once; what else that imports depends on Python's release."""
    assert within(package, imported_by("import gemma4_compat") - imported_by("import importlib.metadata")) == []


def test_a_patch_file_is_imported_when_its_library_is() -> None:
    names = {f"gemma4_compat.patches.{patch.area}.{patch.id.replace('-', '_')}" for patch in gemma4_compat.patches()}
    assert not names & imported_by("import gemma4_compat")
    assert names <= imported_by("import gemma4_compat; gemma4_compat.status()")


def test_asking_for_the_status_imports_no_library_either() -> None:
    loaded = imported_by("import gemma4_compat; gemma4_compat.status(); gemma4_compat.revert()")
    assert not {name.partition(".")[0] for name in loaded} & set(UPSTREAM)


def test_the_public_names_are_those_that_are_documented() -> None:
    assert sorted(gemma4_compat.__all__) == [
        "ActsOn",
        "Assessment",
        "Attached",
        "Attachment",
        "DecodingStatistics",
        "Diagnosis",
        "Explanation",
        "ExportReport",
        "Finding",
        "Gemma4CompatError",
        "Gemma4CompatWarning",
        "Kind",
        "MergeParityError",
        "MergeReport",
        "MetaTensor",
        "Need",
        "Parity",
        "Patch",
        "PatchState",
        "PatchStatus",
        "Plan",
        "Problem",
        "Reason",
        "Recapture",
        "RepairReport",
        "Scan",
        "Severity",
        "SkipModule",
        "Statistics",
        "Statuses",
        "TrainingPlan",
        "TrainingStatistics",
        "Verdict",
        "__version__",
        "decode_fast",
        "doctor",
        "explain",
        "export_adapter",
        "find_meta_tensors",
        "input_device",
        "install",
        "merge_adapter",
        "needed",
        "patches",
        "plan_device_map",
        "plan_training",
        "quantization_skip_modules",
        "quantize",
        "repair_checkpoint",
        "revert",
        "scan_adapter",
        "statistics",
        "status",
        "train_fast",
    ]
    assert all(hasattr(gemma4_compat, name) for name in gemma4_compat.__all__)
