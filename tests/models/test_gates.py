"""The column "acts on" of docs/PATCHES.md: what a patch does to models that are not Gemma 4."""

from __future__ import annotations

import json
from typing import Any

import pytest

import gemma4_compat
from tests.helpers import child
from tools.matrix import stacks
from tools.pages import gates, patches

PATCHES = {patch.id: patch for patch in gemma4_compat.patches()}


def test_the_column_tells_both_kinds_apart() -> None:
    said = {patch_id: patches.acts_on(patch) for patch_id, patch in PATCHES.items()}
    assert said["accelerate-paged-layers"] == "Gemma 4"  # asks in its replacement
    assert said["peft-clippable-linear"] == "Gemma 4"  # asks in a function that it calls
    assert said["transformers-audio-mask"] == "Gemma 4"  # replaces code of Gemma 4
    assert said["transformers-quantize-offloaded"] == "Gemma 4"  # finds what one that asks has left
    assert said["peft-adapter-load"] == "Gemma 4"  # finds it in a context variable
    assert said["transformers-flash-attention"] == "Gemma 4"  # compares with names in a constant of its module
    assert said["transformers-deferred-stop"] == "Gemma 4"  # says so: another patch asks
    assert said["transformers-qat-saving"] == "QAT checkpoints"
    assert said["accelerate-nested-map"] == "every model"
    assert said["transformers-cudnn-padding"] == "every model"  # was measured
    assert said["accelerate-disk-buffers"] == "every model"  # asks about a detail; it was measured


def test_measured_are_patches_that_exist() -> None:
    measured = json.loads(gates.MEASURED.read_text(encoding="utf-8"))["acted"]
    targets = {patch_id: {str(target) for target in patch.targets} for patch_id, patch in PATCHES.items()}
    assert {patch_id: set(names) - targets.get(patch_id, set()) for patch_id, names in measured.items()} == {
        patch_id: set() for patch_id in measured
    }


def test_they_were_measured_with_the_newest_stack() -> None:
    versions = json.loads(gates.MEASURED.read_text(encoding="utf-8"))["versions"]
    newest = stacks.read()["newest"].pins
    assert newest.items() <= versions.items(), "run python -m tests.models.others_child"


def test_no_patch_is_printed_for_fewer_models_than_it_was_seen_to_act_on() -> None:
    acted = json.loads(gates.MEASURED.read_text(encoding="utf-8"))["acted"]
    assert [patch_id for patch_id in acted if patches.acts_on(PATCHES[patch_id]) != "every model"] == []


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    folder = tmp_path_factory.mktemp("others")
    out = folder / "found.json"
    done = child("-m", "tests.models.others_child", str(folder), "--out", str(out), timeout=300)
    assert done.code == 0, done.stderr[-2000:]
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.full
def test_a_patch_for_gemma_4_does_nothing_to_another_model(found: Any) -> None:
    """Its replacements call the original once, with the same arguments, and return what it returns."""
    said = {patch_id: set(gates.for_every_model(PATCHES[patch_id])) for patch_id in found["acted"]}
    more = {patch_id: sorted(set(names) - said[patch_id]) for patch_id, names in found["acted"].items()}
    assert not any(more.values()), f"give them the gate, or measure again (tests/models/others_child.py): {more}"


@pytest.mark.full
def test_most_patches_of_shared_code_were_called(found: Any) -> None:
    """Else the other test says nothing."""
    gated = [patch_id for patch_id in found["calls"] if not gates.for_every_model(PATCHES[patch_id])]
    assert {"accelerate-paged-layers", "accelerate-map-check", "peft-quantized-merge", "peft-adapter-keys"} <= {*gated}
    assert {"transformers-graph-decoding", "transformers-auto-map", "transformers-quantize-offloaded"} <= {*gated}
    assert not found["acted"].keys() & {"accelerate-paged-layers", "transformers-graph-decoding"}
    assert {"peft-adapter-load", "transformers-deferred-stop", "peft-qat-merge"} <= {*gated}
