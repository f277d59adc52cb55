"""The measured data is what the installed libraries say, and is written as it is read."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat.patches import registry
from tests.helpers import ROOT, Finished, Library


def tool() -> Any:
    return importlib.import_module("tools.fingerprints")


def test_the_data_is_what_the_installed_libraries_say(warm_child: Callable[..., Finished]) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    for library, releases in registry.RELEASES.items():
        if versions.installed(library) not in releases:
            pytest.skip(f"{library} {versions.installed(library)} was not measured: nox -s upgrade")
    settings = {"GEMMA4_COMPAT_DISABLE": "all"}  # as the tool sets it before it imports the package
    done = warm_child(str(ROOT / "tools" / "fingerprints.py"), "--check", environment=settings, timeout=300)
    assert done.code == 0, done.stdout + done.stderr


def test_the_data_file_is_what_the_tool_writes() -> None:
    fingerprints = tool()
    assert fingerprints.DATA.read_text(encoding="utf-8") == fingerprints.text(
        fingerprints.known(), gemma4_compat.patches()
    ), "run: python tools/fingerprints.py --write"


def test_the_data_has_every_patch_and_its_modules() -> None:
    patches = gemma4_compat.patches()
    modules = [list(dict.fromkeys(target.module for target in patch.targets)) for patch in patches]
    assert modules == [registry.MODULES[name] for name in registry.PATCHES]
    assert [patch.id for patch in patches] == list(registry.AREA_OF)


def test_every_target_is_known_in_every_affected_release_that_has_it() -> None:
    """A release that is missing between two others would be one that nobody looked at."""
    for patch in gemma4_compat.patches():
        ordered = registry.RELEASES[patch.distribution]
        for target in patch.targets:
            inside = [release for release in ordered if versions.admits(patch.affected, release)]
            seen = [release for spans in target.known.values() for release in versions.in_spans(spans, ordered)]
            assert len(set(seen)) == len(seen) or target.codes, target
            needed = [one for one in inside if not target.affected or versions.admits(target.affected, one)]
            if not target.optional and not target.group:
                assert set(needed) <= set(seen) <= set(inside), target
            else:
                assert seen, target


def test_a_module_that_only_a_gpu_can_import_is_read(create: Callable[..., Library]) -> None:
    code = "def one(x):\n    return x + 1\n\n\ndef two(x):\n    return x + 2\n"
    library = create(core=code, gpu=f"import torch\ntorch._C._of_no_build\n\n\n{code}")
    expected = tool().of(library.target("two"))
    assert tool().of(library.target("two", module="gpu", source=code)) == expected
    with pytest.raises(AttributeError, match="has no function three"):
        tool().of(library.target("three", module="gpu", source=code.replace("two", "three")))


def test_a_release_that_was_measured_again_replaces_what_was_known_of_it() -> None:
    merged = tool().merged({"peft 1": {"a": "0", "b": "1"}}, [{"peft 1": {"a": "2"}}, {"peft 2": {"a": "3"}}])
    assert merged == {"peft 1": {"a": "2"}, "peft 2": {"a": "3"}}


def test_what_differs_is_named() -> None:
    fingerprints = tool()
    newest = registry.RELEASES["peft"][-1]
    found = {f"peft {newest}": {"peft.x.y": "0"}, "peft 9999.0": {}}
    assert fingerprints.differences(found, {f"peft {newest}": {"peft.x.y": "1", "peft.x.z": "2"}}) == [
        f"peft {newest}: peft.x.y is 0, in the data 1",
        f"peft {newest}: peft.x.z is None, in the data 2",
        "peft 9999.0 is not among the measured releases",
    ]


def test_a_new_release_and_its_code_are_written_in_order() -> None:
    fingerprints = tool()
    data = fingerprints.merged(
        fingerprints.known(), [{"peft 9999.0": {"peft.peft_model.PeftModel.load_adapter": "0"}}]
    )
    written = json.loads(fingerprints.text(data, gemma4_compat.patches()))
    assert written["releases"]["peft"] == [*registry.RELEASES["peft"], "9999.0"]
    assert written["known"]["peft.peft_model.PeftModel.load_adapter"]["0"] == "9999.0"
    assert written["modules"] == registry.MODULES


@pytest.mark.parametrize(
    "releases, text",
    [(["1"], "1"), (["1", "2", "3"], "1 - 3"), (["1", "3", "4"], "1, 3 - 4"), (["4", "1"], "1, 4")],
)
def test_spans_of_releases_are_read_as_they_are_written(releases: list[str], text: str) -> None:
    ordered = ["1", "2", "3", "4"]
    assert versions.span_text(releases, ordered) == text
    assert versions.in_spans(text, ordered) == sorted(releases)
