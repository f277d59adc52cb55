"""transformers-qat-loading: Google's QAT checkpoints load as they are, on one device and split, with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.quantization.transformers_qat_loading import PATCH
from tests.patches.promise import Promise
from tests.patches.quantization import qat


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"ignore_mismatched_sizes|expected a floating-point or complex dtype"


@qat.needs_quantizer
def test_the_scales_are_those_of_the_file(workspace: Any) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers.integrations import gemma_quant

    file = load_file(workspace.qat() / "model.safetensors")
    name = "model.language_model.embed_tokens_per_layer"
    embedding = qat.load(workspace.qat()).get_submodule(name)
    scales = file[f"{name}.embedding_scale"]
    assert scales.shape[1] > 1
    assert torch.equal(embedding.embedding_scale, scales.to(embedding.embedding_scale.dtype))
    values = gemma_quant._unpack_int4(file[f"{name}.embedding_quantized"], embedding.embedding_dim)
    wide = scales.repeat_interleave(embedding.embedding_dim // scales.shape[1], dim=1)
    assert torch.equal(embedding.weight, values.to(torch.bfloat16) * wide.to(torch.bfloat16))


@qat.needs_quantizer
@pytest.mark.parametrize("place", qat.PLACES)
@pytest.mark.parametrize("way", ["loaded to disk", "dispatched to disk", "dispatched to host memory"])
def test_split(workspace: Any, tmp_path: Path, way: str, place: str) -> None:
    reference = qat.load(workspace.qat())
    expected = workspace.outputs(reference)
    placement = qat.layout(reference, place)
    if way == "loaded to disk":
        model = qat.load(workspace.qat(), device_map=placement, offload_folder=tmp_path)
    elif way == "dispatched to disk":
        model = workspace.dispatch_map(reference, placement)
    else:
        model = qat.into_host_memory(reference, place)
    assert difference(expected, workspace.outputs(model)) == 0.0


@qat.needs_quantizer
@pytest.mark.parametrize("place", ["layers", "towers", "everything"])
def test_an_adapter_on_a_split_model(workspace: Any, tmp_path: Path, place: str) -> None:
    from peft import PeftModel

    reference = qat.adapted(qat.load(workspace.qat()), target_modules=r".*(q_proj|up_proj|lm_head)(\.linear)?")
    expected = workspace.outputs(reference)
    reference.save_pretrained(tmp_path / "adapter")
    base = qat.load(workspace.qat())
    assert difference(expected, workspace.outputs(base)) > 0
    placement = qat.layout(base, place)
    split = qat.load(workspace.qat(), device_map=placement, offload_folder=tmp_path / "1")
    model = PeftModel.from_pretrained(split, tmp_path / "adapter", offload_folder=str(tmp_path / "2")).eval()
    assert difference(expected, workspace.outputs(model)) == 0.0
    base.load_adapter(tmp_path / "adapter")
    assert difference(expected, workspace.outputs(base.eval())) == 0.0
