"""benchmarks/adapters/checkpoints.py end to end on the tiny shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ROOT, Finished

pytestmark = pytest.mark.full


def test_the_benchmark_measures_every_way(tmp_path: Path, warm_child: Callable[..., Finished]) -> None:
    pytest.importorskip("accelerate", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    pytest.importorskip("resource", reason="peak memory is read with the module resource, which Windows has not")
    out = tmp_path / "results" / "checkpoints.json"
    script = str(ROOT / "benchmarks" / "adapters" / "checkpoints.py")
    options = ("--shape", "tiny", "--rounds", "1", "--work", str(tmp_path), "--json", str(out))
    done = warm_child(script, *options, timeout=300)
    assert done.code == 0, done.stdout + done.stderr
    run = json.loads(out.read_text(encoding="utf-8"))
    assert set(run["ways"]) == {"copy", "repair", "merge", "dequantized", "quantized", "export"}
    assert run["ways"]["copy"]["of_copy"] == 1.0
    assert all(way["written"] > 0 for way in run["ways"].values())
    assert run["lost_tensors"] == 15
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
