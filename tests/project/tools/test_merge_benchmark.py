"""benchmarks/adapters/merge.py end to end on the tiny shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ROOT, Finished

pytestmark = pytest.mark.full


def test_the_benchmark_measures_both_ways(tmp_path: Path, warm_child: Callable[..., Finished]) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    pytest.importorskip("resource", reason="peak memory is read with the module resource, which Windows has not")
    out = tmp_path / "results" / "merge.json"
    script = str(ROOT / "benchmarks" / "adapters" / "merge.py")
    done = warm_child(script, "--shape", "tiny", "--work", str(tmp_path), "--json", str(out), timeout=300)
    assert done.code == 0, done.stdout + done.stderr
    run = json.loads(out.read_text(encoding="utf-8"))
    assert set(run["ways"]) == {"merge_adapter", "merge_and_unload"}
    assert run["shards"] > 1
    assert run["values"] > run["values_that_differ"]
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
