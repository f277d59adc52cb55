"""``acts_on``: a Llama and a Gemma 3 run with the patches for Gemma 4 and without, and nothing differs."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import ActsOn
from tests.helpers import ROOT, child
from tools.matrix import stacks

PATCHES = {patch.id: patch for patch in gemma4_compat.patches()}
OURS = [patch.id for patch in PATCHES.values() if patch.acts_on is not ActsOn.EVERY_MODEL]
#: What tests/unit/gemma4/models/others_child.py wrote.
MEASURED = json.loads((ROOT / "docs" / "other_models.json").read_text(encoding="utf-8"))


def test_measured_are_functions_that_patches_for_every_model_replace() -> None:
    targets = {patch.id: {*map(str, patch.targets)} for patch in PATCHES.values() if patch.id not in OURS}
    wrong = {
        name: functions
        for name, functions in MEASURED["acted"].items()
        if not {*functions} <= targets.get(name, set())
    }
    assert wrong == {}, (
        "declare them for every model, or measure again: python -m tests.unit.gemma4.models.others_child"
    )


def test_they_were_measured_with_the_newest_stack() -> None:
    newest = stacks.read()["newest"].pins
    assert newest.items() <= MEASURED["versions"].items(), "run python -m tests.unit.gemma4.models.others_child"


@functools.cache
def found(folder: Path, disabled: str, *models: str) -> Any:
    place = folder / f"{len(disabled)}-{len(models)}"
    place.mkdir(exist_ok=True)  # there already where an earlier test saw the same error
    out = place / "found.json"
    arguments = [str(place), "--trace", "--out", str(out), *(["--models", *models] if models else [])]
    environment = {"GEMMA4_COMPAT_DISABLE": disabled, "PYTHONHASHSEED": "0"}
    done = child("-m", "tests.unit.gemma4.models.others_child", *arguments, environment=environment, timeout=900)
    assert done.code == 0, done.stderr[-2000:]
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    return tmp_path_factory.mktemp("others")


@pytest.mark.full
def test_other_models_are_the_same_with_the_patches_for_gemma_4_and_without(folder: Path) -> None:
    """Outputs, weights, gradients, hooks, attributes, configurations, warnings, log lines and errors."""
    on, off = found(folder, ""), found(folder, ",".join(OURS))
    assert on["trace"] == off["trace"]
    assert len(on["trace"]) > 1000
    assert not {*off["calls"]} & {*OURS}, "they were off"


@pytest.mark.full
def test_what_a_patch_for_every_model_does_is_in_the_trace(folder: Path) -> None:
    """Else the comparison says nothing."""
    off = found(folder, "peft-quantized-tuners", "llama")["trace"]
    assert found(folder, "")["trace"][: len(off)] != off


@pytest.mark.full
def test_a_patch_for_gemma_4_calls_the_original_once_and_returns_its_result(folder: Path) -> None:
    acted = found(folder, "")["acted"]
    assert {*acted} & {*OURS} == set(), "give them the gate, or declare them for every model"
    assert {*acted} >= {"accelerate-nested-map", "transformers-model-device", "peft-quantized-tuners"}


@pytest.mark.full
def test_the_patches_for_gemma_4_were_called_unless_they_replace_its_own_code(folder: Path) -> None:
    """Else the other tests say nothing about them."""
    called = {*found(folder, "")["calls"]}
    pins = stacks.read()["newest"].pins
    shared = {
        name
        for name in OURS
        if stacks.claimed(PATCHES[name], pins)
        and not all(target.module.startswith("transformers.models.gemma4") for target in PATCHES[name].targets)
    }
    assert shared - called == NOT_CALLED


#: No other model has Google's quantizer, or an assistant that reads its keys; windows sleep until a Gemma 4 has a long
#: text; continuous batching, which runs in threads, is left out, and so are models of compressed-tensors, which is not
#: installed.
NOT_CALLED = {
    *("transformers-assistant-keys", "transformers-sliding-windows", "transformers-packed-layers"),
    *("transformers-qat-dequantize", "transformers-qat-gradients", "transformers-qat-loading"),
    *("transformers-qat-padding-row", "transformers-qat-saving", "transformers-paged-cache"),
}
