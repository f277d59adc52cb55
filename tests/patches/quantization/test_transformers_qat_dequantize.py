"""transformers-qat-dequantize: the values of a QAT checkpoint as a plain model, which adapters are merged into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny_adapters
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.quantization.transformers_qat_dequantize import PATCH
from tests.patches.promise import Promise
from tests.patches.quantization import qat


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "has no implementation of `dequantize`"


@qat.needs_quantizer
def test_what_it_computes_is_the_model_without_rounded_activations(workspace: Any, tmp_path: Path) -> None:
    expected = workspace.outputs(qat.load(workspace.qat(calibrated=False)))
    model = qat.load(workspace.qat())
    assert difference(expected, workspace.outputs(model)) > 0
    model.dequantize()
    assert not getattr(model, "is_quantized", False)
    assert difference(expected, workspace.outputs(model)) == 0.0
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    assert difference(expected, workspace.outputs(qat.load(tmp_path))) == 0.0


@qat.needs_quantizer
def test_a_scale_that_bfloat16_rounds_differs_by_that_rounding(workspace: Any) -> None:
    """Of the tiny model it is 8, which is exact; that of the E2B is the root of 1,536."""
    import torch

    model = qat.load(workspace.qat(calibrated=False))
    embedding = model.get_input_embeddings()
    embedding.scalar_embed_scale = 1536**0.5
    ids = torch.arange(embedding.num_embeddings)
    before = embedding(ids).float()
    model.dequantize()
    after = model.get_input_embeddings()(ids).float()
    assert (after - before).abs().max() > 0
    assert ((after - before).abs() <= 2**-7 * before.abs()).all()


@qat.needs_quantizer
def test_merged_on_disk_after_it(workspace: Any, tmp_path: Path) -> None:
    model = qat.load(workspace.qat())
    tiny_adapters.write_adapter(qat.load(workspace.qat()), ["q_proj", "up_proj"], tmp_path / "adapter")
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"model\.dequantize\(\)"):
        gemma4_compat.merge_adapter(workspace.qat(), tmp_path / "adapter", tmp_path / "refused")
    model.dequantize()
    model.save_pretrained(tmp_path / "plain")
    report = gemma4_compat.merge_adapter(tmp_path / "plain", tmp_path / "adapter", tmp_path / "merged")
    assert report.parity is not None
    assert report.parity.ok


@qat.needs_quantizer
def test_an_offloaded_model_is_refused_as_a_whole(workspace: Any) -> None:
    model = qat.load(workspace.qat())
    expected = workspace.outputs(model)
    model = workspace.dispatch_map(model, qat.layout(model, "layers"))
    with pytest.raises(gemma4_compat.Gemma4CompatError, match="Nothing was changed"):
        model.dequantize()
    assert difference(expected, workspace.outputs(model)) == 0.0
