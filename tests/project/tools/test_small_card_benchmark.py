"""benchmarks/small_card/small_card.py end to end on the tiny shape: cases in processes of their own, results kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ROOT, Finished, child

pytestmark = pytest.mark.full


def test_the_benchmark_measures_a_placement_and_compares_its_answers(
    tmp_path: Path, warm_child: Callable[..., Finished]
) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    out = tmp_path / "results" / "small_card-tiny.json"
    script = str(ROOT / "benchmarks" / "small_card" / "small_card.py")
    options = ["--shape", "tiny", "--quick", "--cases", "everything", "--out", str(out), "--work", str(tmp_path)]
    done = warm_child(script, *options, timeout=400)
    assert done.code == 0, done.stdout + done.stderr
    run = json.loads(out.read_text(encoding="utf-8"))
    assert list(run["cases"]) == ["all-gpu", "everything", "all-gpu-again"]
    assert len(run["reference"]["decode_tok_s"]) == 2
    everything = run["cases"]["everything"]
    assert everything["parity"] == 0.0
    assert everything["quantized_modules"] == run["cases"]["all-gpu"]["quantized_modules"] > 0
    assert everything["streamed_bytes"] > 0
    assert everything["decode_share"] > 0
    assert sum(".layers." in name for names in everything["offloaded"].values() for name in names) == 6
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    assert not list(tmp_path.glob("small-card-*")), "the checkpoint is removed"


@pytest.mark.parametrize(
    "options, message",
    [([], "--shape is required"), (["--shape", "tiny", "--cases", "no-such"], "unknown cases: no-such")],
)
def test_bad_arguments_are_one_clear_error(options: list[str], message: str) -> None:
    done = child(str(ROOT / "benchmarks" / "small_card" / "small_card.py"), *options)
    assert done.code == 2
    assert message in done.stderr
