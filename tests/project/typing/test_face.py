"""The face at run time: signatures are those of the implementations, and classes are imported on first use."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle

import pytest

import gemma4_compat
from gemma4_compat._adapter_tools.merge import job
from gemma4_compat._adapter_tools.scan import job as scan_job
from tests.helpers import child

LAZY = gemma4_compat._LAZY


def test_the_face_defines_no_function_and_no_class() -> None:
    (tree,) = [ast.parse(inspect.getsource(gemma4_compat))]
    defined = [node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert sorted(defined) == ["__dir__", "__getattr__"]


def test_only_a_scan_is_told_what_the_shim_renames() -> None:
    inside = dict(inspect.signature(scan_job.scan_adapter).parameters)
    assert inside.pop("renames").default is True
    assert dict(inspect.signature(gemma4_compat.scan_adapter).parameters) == inside


@pytest.mark.parametrize(
    "name",
    [
        *("export_adapter", "merge_adapter", "plan_device_map", "quantization_skip_modules", "repair_checkpoint"),
        *("scan_adapter", "status"),
    ],
)
def test_every_argument_is_documented(name: str) -> None:
    function = getattr(gemma4_compat, name)
    documented = inspect.getdoc(function).partition("\nArgs:\n")[2].partition("\n\n")[0]
    names = [line.partition(":")[0].strip() for line in documented.splitlines() if not line.startswith(" " * 5)]
    assert names == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", LAZY)
def test_a_name_is_the_one_that_is_implemented(name: str) -> None:
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
        print(gemma4_compat.merge_adapters)  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Plans'"):
        from gemma4_compat import Plans  # type: ignore[attr-defined]  # noqa: F401
