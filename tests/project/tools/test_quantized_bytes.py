"""The committed arithmetic of quantized bytes is that of this code, and agrees with loaded towers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, Finished

pytestmark = pytest.mark.full

RESULTS = ROOT / "benchmarks" / "results"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "quantization" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_figures_are_those_of_this_code() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the upstream libraries")
    committed = json.loads((RESULTS / "quantized_bytes.json").read_text(encoding="utf-8"))
    if transformers.__version__ != committed["transformers"]:
        pytest.skip(f"they are those of transformers {committed['transformers']}")
    assert script("quantized_bytes").measured() == committed


@pytest.mark.parametrize("file", sorted((RESULTS / "towers").glob("*.json")), ids=lambda file: file.stem)
def test_loaded_towers_take_the_bytes_that_were_computed(file: Path) -> None:
    run = json.loads(file.read_text(encoding="utf-8"))
    computed = json.loads((RESULTS / "quantized_bytes.json").read_text(encoding="utf-8"))["variants"][run["variant"]]
    for quantization, modalities in run["with"].items():
        for modality, entry in modalities.items():
            assert entry["bytes"] == computed["towers"][f"model.{modality}_tower"][quantization], (
                quantization,
                modality,
            )


def test_the_towers_benchmark_runs_on_the_tiny_shape(tmp_path: Path, warm_child: Callable[..., Finished]) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    out = tmp_path / "towers.json"
    done = warm_child(
        str(ROOT / "benchmarks" / "quantization" / "towers.py"), "--variant", "tiny", "--json", str(out), timeout=300
    )
    assert done.code == 0, done.stdout + done.stderr
    run = json.loads(out.read_text(encoding="utf-8"))
    for shim in ("with", "without"):
        assert set(run[shim]) == {"bf16", "4bit", "4bit-double", "8bit"}
    for modality, entry in run["with"]["4bit"].items():
        assert entry["against_dequantized"] < entry["dequantized_against_bf16"]
        sizes = {quantization: run["with"][quantization][modality]["bytes"] for quantization in run["with"]}
        assert sizes["4bit"] < sizes["8bit"] < sizes["bf16"]
        assert sizes["4bit-double"] != sizes["4bit"], "as it was loaded: repacked for a CPU they are the same"
