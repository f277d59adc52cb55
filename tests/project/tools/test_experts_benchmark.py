"""benchmarks/experts/experts.py runs on the tiny shape, and says what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ROOT, Finished

pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.full


@pytest.mark.parametrize("shape", ["tiny", "tiny-bf16"])
def test_the_tiny_shape(tmp_path: Path, warm_child: Callable[..., Finished], shape: str) -> None:
    out = tmp_path / "result.json"
    cases = ["card", "experts", "layers", "whole"]
    options = ["--shape", shape, "--out", str(out), "--cases", ",".join(cases)]
    ran = warm_child(str(ROOT / "benchmarks" / "experts" / "experts.py"), *options, timeout=300)
    assert ran.code == 0, ran.stderr[-2000:]
    result = json.loads(out.read_text(encoding="utf-8"))
    assert (result["problems"], result["not_run"]) == ([], [])
    assert list(result["cases"]) == cases
    for name in ("experts", "layers"):
        found = dict(result["cases"][name]["bits"])
        assert found.pop("finite")
        assert set(found.values()) == {0.0}, name
    brought = {name: case["speed"]["bytes_a_token"] for name, case in result["cases"].items()}
    assert brought["card"] == {"layers": 0, "experts": 0}
    assert brought["experts"]["layers"] == 0 < brought["experts"]["experts"]
    assert brought["layers"]["experts"] == brought["experts"]["experts"]
    assert sum(brought["layers"].values()) < brought["whole"]["layers"] / 2
