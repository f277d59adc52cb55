"""benchmarks/small_card/contexts.py end to end on the tiny shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ROOT, Finished

pytestmark = pytest.mark.full


def test_the_benchmark_reads_a_text_in_each_way(tmp_path: Path, warm_child: Callable[..., Finished]) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    out = tmp_path / "results" / "contexts-tiny.json"
    script = str(ROOT / "benchmarks" / "small_card" / "contexts.py")
    options = ["--shape", "tiny", "--tokens", "100", "--new", "6", "--ways", "chosen,32"]
    done = warm_child(script, *options, "--out", str(out), "--work", str(tmp_path), timeout=400)
    assert done.code == 0, done.stdout + done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))["ways"]
    assert list(found) == ["chosen", "32"]
    for way in found.values():
        assert len(way["runs"]) == 3
        assert all(run["tokens_s"] > 0 and run["in_chunks"] == 0 for run in way["runs"])
        assert way["planned"]["prompt_gib"] > way["planned"]["decoding_gib"] > 0
    assert found["32"]["runs"][1]["replayed_forwards"] >= 3
