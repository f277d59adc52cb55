"""The tables of docs/ADAPTERS.md about exports: each cell is tried."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._adapter_tools.export.job import TARGETS
from gemma4_compat._lab import tiny, tiny_adapters
from tests.helpers import ROOT
from tests.unit.adapter_tools.merge import adapters as made
from tools.pages.dialects import DIALECTS, Dialect

#: Row -> adapter of tests/unit/adapter_tools/export/conftest.py; of the others there is a function below.
ROWS = {
    "linears of decoder layers": "language",
    "several ranks and scales": "patterns",
    "rsLoRA": "stabilized",
    "keys that are values (26B-A4B, 31B)": "keys",
    "router": "router",
    "experts": "experts",
    "vision and audio towers": "towers",
    "multimodal embedders": "embedders",
}


def lora(targets: Any, **options: Any) -> Callable[[Path, Path], Path]:
    return lambda base, folder: tiny_adapters.write_adapter(tiny.load(base), targets, folder, **options)


def loha(base: Path, folder: Path) -> Path:
    import peft

    return made.make(base, folder, peft.LoHaConfig(r=2, target_modules=made.LANGUAGE))


MADE: dict[str, Callable[[Path, Path], Path]] = {
    "per-layer inputs, their gate and projection": lora(["per_layer_input_gate", "per_layer_projection"]),
    "the projection of all per-layer inputs": lora(["per_layer_model_projection"]),
    "DoRA": lora(made.LANGUAGE, use_dora=True),
    "head and embedding, trained copies": lora(made.LANGUAGE, modules_to_save=["embed_tokens"]),
    "another tuner": loha,
}


#: What mlx-vlm 0.7.10 stops at, where the base has an audio tower.
FAIL = {("mlx", "vision and audio towers"), ("mlx", "multimodal embedders")}


def cells() -> list[tuple[str, str, str]]:
    text = (ROOT / "docs" / "ADAPTERS.md").read_text(encoding="utf-8")
    lines = text.partition("<!-- readers: start")[2].partition("<!-- readers: end -->")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert [name.strip("`") for name in rows[0][1:]] == list(TARGETS)
    return [(row[0], target, cell) for row in rows[1:] for target, cell in zip(TARGETS, row[1:], strict=True)]


def test_the_page_has_every_row() -> None:
    assert {row for row, _, _ in cells()} == {*ROWS, *MADE}


@pytest.mark.full
@pytest.mark.parametrize("row", [*ROWS, *MADE])
def test_a_row(adapters: Any, workspace: Any, tmp_path: Path, row: str) -> None:
    if row in ROWS:
        adapter, base = adapters(ROWS[row])
    else:
        base = workspace.checkpoint
        adapter = MADE[row](base, tmp_path / "adapter")
    found = {}
    for target in TARGETS:
        with contextlib.ExitStack() as stack:
            if said(row, target) == "yes" and (target == "sglang" or (target, row) in FAIL):
                stack.enter_context(pytest.warns(gemma4_compat.Gemma4CompatWarning, match="until then, merge"))
            try:
                gemma4_compat.export_adapter(adapter, tmp_path / target, target, base=base)
                found[target] = "yes"
            except Gemma4CompatError:
                found[target] = "refused"
    assert found == {target: said(row, target) for target in TARGETS}


def said(row: str, target: str) -> str:
    return next(cell for name, where, cell in cells() if (name, where) == (row, target))


@pytest.mark.full
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: re.sub(r"\W+", "-", dialect.name))
def test_a_dialect(workspace: Any, tmp_path: Path, dialect: Dialect) -> None:
    """Whatever the keys are called in the file, the export has the same."""
    from safetensors.torch import load_file

    adapter, base = workspace.adapter(dialect.source), workspace.checkpoint
    given = dialect.write(adapter, tmp_path / "given")
    if dialect.export == "refused":
        with pytest.raises(Gemma4CompatError):
            gemma4_compat.export_adapter(given, tmp_path / "out", "vllm", base=base)
        return
    gemma4_compat.export_adapter(given, tmp_path / "out", "vllm", base=base)
    gemma4_compat.export_adapter(adapter, tmp_path / "wanted", "vllm", base=base)
    found, wanted = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "wanted"))
    assert set(found) == set(wanted)
    assert all((found[key] == wanted[key]).all() for key in wanted)
