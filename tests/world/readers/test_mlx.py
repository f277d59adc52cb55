"""mlx-lm and mlx-vlm with an exported adapter give transformers' logits with the adapter by PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_adapters
from tests.world.readers import models
from tests.world.readers.conftest import CASES

#: Differences of logits in float32; without an adapter up to 4e-5, with one 5e-5, of logits up to 5 (2026-11-23).
BOUND = 2e-4


@pytest.fixture(scope="module", autouse=True)
def _mlx() -> None:
    pytest.importorskip("mlx_lm", reason="needs mlx-lm: nox -s readers")


def check(base: Path, adapter: Path, out: Path, read: Callable[[Path, Path | None], Any]) -> None:
    report = gemma4_compat.export_adapter(adapter, out, "mlx", base=base)
    assert {"adapters.safetensors", "adapter_config.json"} == set(report.files)
    without, with_it = models.by_peft(base, None), models.by_peft(base, adapter)
    assert abs(without - read(base, None)).max() < BOUND
    assert abs(with_it - read(base, out)).max() < BOUND
    assert abs(with_it - without).max() > 1000 * BOUND


@pytest.mark.parametrize("variant, kind", CASES)
def test_mlx_lm(checkpoint: Any, adapter: Any, tmp_path: Path, variant: str, kind: str) -> None:
    check(checkpoint(variant), adapter(variant, kind), tmp_path / "out", models.by_mlx_lm)


@pytest.mark.parametrize("variant", ["31B", "26B-A4B"])
def test_mlx_lm_with_dora(checkpoint: Any, adapter: Any, tmp_path: Path, variant: str) -> None:
    check(checkpoint(variant), adapter(variant, "linears", use_dora=True), tmp_path / "out", models.by_mlx_lm)


@pytest.mark.parametrize("variant, kind", [case for case in CASES if case[0] != "E2B" and case[1] != "experts"])
def test_mlx_vlm(checkpoint: Any, adapter: Any, tmp_path: Path, variant: str, kind: str) -> None:
    pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: nox -s readers")
    check(checkpoint(variant), adapter(variant, kind), tmp_path / "out", models.by_mlx_vlm)


@pytest.mark.parametrize(
    "variant, targets",
    [
        ("31B", r".*(vision_tower\..*\.(q_proj|down_proj)\.linear|embed_vision\.embedding_projection)"),
        ("12B", ["patch_dense", "embedding_projection"]),
    ],
)
def test_mlx_vlm_and_images(checkpoint: Any, tmp_path: Path, variant: str, targets: Any) -> None:
    """The names of what embeds images are those of mlx-vlm: it has each of them, of these shapes."""
    pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: nox -s readers")
    from mlx.utils import tree_flatten
    from mlx_vlm import utils
    from mlx_vlm.trainer.peft import load_adapters
    from safetensors.torch import load_file

    base = checkpoint(variant)
    folder = tiny_adapters.write_adapter(tiny.load(base), targets, tmp_path / "adapter")
    report = gemma4_compat.export_adapter(folder, tmp_path / "out", "mlx", base=base)
    assert report.notes == ("mlx-lm has no vision and audio and refuses the adapter; mlx-vlm reads it",)
    model = load_adapters(utils.load_model(base), tmp_path / "out")
    there = {name: value.shape for name, value in tree_flatten(model.parameters()) if ".lora_" in name}
    written = load_file(tmp_path / "out" / "adapters.safetensors")
    assert there == {name: tuple(value.shape) for name, value in written.items()}


def test_an_audio_tower_is_what_mlx_vlm_stops_at(checkpoint: Any, adapter: Any, tmp_path: Path) -> None:
    """The warning is true as long as this fails there."""
    pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: nox -s readers")
    base = checkpoint("E2B")
    gemma4_compat.export_adapter(adapter("E2B", "linears"), tmp_path / "out", "mlx", base=base)
    with pytest.raises(AttributeError, match="AudioRelativePositionEmbedding"):
        models.by_mlx_vlm(base, tmp_path / "out")
