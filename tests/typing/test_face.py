"""The face at run time: signatures are those of the implementations, and classes are imported on first use."""

from __future__ import annotations

import importlib
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._export import job as export_job
from gemma4_compat._merge import job
from gemma4_compat._planner import plan
from gemma4_compat._quantization import skip_modules
from gemma4_compat._scan import job as scan_job
from tests.helpers import child

LAZY = gemma4_compat._LAZY


@pytest.mark.parametrize(
    "face, implementation",
    [
        (gemma4_compat.plan_device_map, plan.plan_device_map),
        (gemma4_compat.export_adapter, export_job.export_adapter),
        (gemma4_compat.merge_adapter, job.merge_adapter),
        (gemma4_compat.quantization_skip_modules, skip_modules.quantization_skip_modules),
    ],
)
def test_parameters_defaults_and_types_are_those_of_the_implementation(
    face: Callable[..., Any], implementation: Callable[..., Any]
) -> None:
    assert inspect.signature(face) == inspect.signature(implementation)


def test_only_a_scan_is_told_what_the_shim_renames() -> None:
    inside = dict(inspect.signature(scan_job.scan_adapter).parameters)
    assert inside.pop("renames").default is True
    assert dict(inspect.signature(gemma4_compat.scan_adapter).parameters) == inside


@pytest.mark.parametrize(
    "name", ["export_adapter", "merge_adapter", "plan_device_map", "quantization_skip_modules", "scan_adapter"]
)
def test_every_argument_is_documented(name: str) -> None:
    function = getattr(gemma4_compat, name)
    documented = inspect.getdoc(function).partition("\nArgs:\n")[2].partition("\n\n")[0]
    names = [line.partition(":")[0].strip() for line in documented.splitlines() if not line.startswith(" " * 5)]
    assert names == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", LAZY)
def test_a_class_is_the_one_that_is_implemented(name: str) -> None:
    found = getattr(gemma4_compat, name)
    assert found is getattr(importlib.import_module(LAZY[name]), name)
    assert found.__module__ == LAZY[name], "where it is defined, not where it is imported"
    assert pickle.loads(pickle.dumps(found)) is found


def test_an_error_is_caught_by_its_public_name() -> None:
    report = gemma4_compat.MergeReport.__new__(gemma4_compat.MergeReport)
    with pytest.raises(gemma4_compat.MergeParityError) as caught:
        raise job.MergeParityError("out of bounds", report)
    assert caught.value.report is report


def test_classes_are_imported_on_first_use_and_importing_them_needs_no_library() -> None:
    modules = sorted(set(LAZY.values()))
    code = f"""
        import sys, gemma4_compat
        assert set({sorted(LAZY)}) <= set(dir(gemma4_compat))
        assert not set({modules}) & set(sys.modules)
        from gemma4_compat import *
        assert MergeParityError is gemma4_compat.MergeParityError
        assert set({modules}) <= set(sys.modules)
        assert not {{"torch", "transformers", "accelerate", "peft", "bitsandbytes"}} & set(sys.modules)
    """
    done = child("-c", inspect.cleandoc(code))
    assert done.code == 0, done.stderr


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gemma4_compat' has no attribute 'merge_adapters'"):
        print(gemma4_compat.merge_adapters)
    with pytest.raises(ImportError, match="cannot import name 'Plans'"):
        from gemma4_compat import Plans  # noqa: F401
