"""benchmarks/training/float16.py finds the limit of float16, and docs/FLOAT16.md says what it found."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from benchmarks.training import float16 as benchmark
from benchmarks.training import float16_rows as rows
from gemma4_compat._lab import tiny, tiny_models
from tools.pages import float16 as page


def test_the_limit_of_a_rescaling(tmp_path: Path) -> None:
    plain = tiny.load(tiny_models.build_checkpoint(tmp_path / "model", variant="31B")).float()
    row = benchmark._limit(plain, tiny.inputs(text_only=True), "MLP: product", "float16")
    assert row["power"] == row["finite_to"] + 1
    assert row["first"].endswith(".mlp: mul")
    assert row["there"] > benchmark.LARGEST
    assert row["first_module"].endswith(".mlp.down_proj")
    assert row["error_there"] < benchmark.LOSS * row["error"]
    assert math.isnan(row["worse"])
    assert row["gradients"]["error"] < 1
    (line,) = page._sweep([{"variant": "31B", "scaled": "MLP: product", **row}]).split("\n")[2:]
    assert line.startswith("| MLP: product | float16 | 31B | `layers.N.mlp: mul` |")


def test_what_is_not_finite_is_null() -> None:
    found = {"one": [math.nan, 1.5], "other": {"there": math.inf, "first": None}}
    assert json.loads(benchmark._text(found)) == {"one": [None, 1.5], "other": {"there": None, "first": None}}


def test_the_page_has_what_was_measured() -> None:
    _, run = page.run()
    text = page.PAGE.read_text(encoding="utf-8")
    assert all(part in text for part in page.parts().values())
    assert {row["variant"] for row in run["sweep"]} == {"E2B", "12B", "26B-A4B", "31B"}
    # what the page says of F63
    assert all(row["largest_output"] < 2080 for row in run["widths"])
    assert all(row["first_module"].endswith("mlp.down_proj") for row in run["widths"])
    assert max(row["largest_output"] for row in run["widths"]) < 2080 / 4  # "a quarter"
    assert all(row["same"] and row["finite"] for row in run["rows"]["bits"])
    assert any(row["loss_scale_power"] is None for row in run["rows"]["limits"])
    assert all(row["finite_to"] > row["upstream_finite_to"] for row in run["rows"]["limits"])


def test_rows_keep_bits_where_nothing_overflows_and_are_right_beyond(tmp_path: Path) -> None:
    """The repair of F63 that was tried."""
    checkpoint = tiny_models.build_checkpoint(tmp_path / "model", variant="31B")
    found = rows._bits(checkpoint, "lora", tiny.inputs(variant="31B", text_only=True))
    assert found["same"]
    assert found["finite"]
    assert found["compared"] > 6
    mlp, x = rows._mlp(64, 128)
    with torch.no_grad():
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight[7] = x[0, 3] / x[0, 3].norm() ** 2 * (4 * benchmark.LARGEST) ** 0.5
    assert not rows._error(mlp, x, type(mlp).forward)["finite"]
    assert rows._error(mlp, x, rows.forward)["error"] < 4 * 2.0**-11  # gate, up, product, output
    assert rows.cost()["rows"]["operations"] > rows.cost()["upstream"]["operations"] > 0
