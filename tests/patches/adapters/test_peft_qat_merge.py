"""peft-qat-merge: a merge into packed integers is refused as a whole; DoRA reads what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters.peft_qat_merge import PATCH
from tests.patches.promise import Promise
from tests.patches.quantization import qat


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"The size of tensor a \(32\) must match|can't be cast to the desired output type Char"
    exact = False


@qat.needs_quantizer
@pytest.mark.parametrize("targets", [r".*language_model.*up_proj", r".*vision_tower.*q_proj.*", "lm_head"])
@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_refused_as_a_whole(workspace: Any, merge: str, targets: str) -> None:
    model = qat.adapted(qat.load(workspace.qat()), target_modules=targets)
    expected = workspace.outputs(model)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"model\.dequantize\(\)"):
        getattr(model, merge)()
    assert difference(expected, workspace.outputs(model)) == 0.0


@qat.needs_quantizer
def test_what_the_refusal_says_works(workspace: Any) -> None:
    """The merge is PEFT's into the plain layers: the model with the adapter beside it, within bf16."""
    model = qat.load(workspace.qat())
    model.dequantize()
    model = qat.adapted(model)
    expected = workspace.outputs(model)
    merged = workspace.outputs(model.merge_and_unload())
    assert 0 < difference(expected, merged) < 0.5


@qat.needs_quantizer
def test_layers_that_are_not_packed_are_merged(workspace: Any) -> None:
    import torch

    model = qat.adapted(qat.load(workspace.qat()), target_modules=r".*per_layer_model_projection")
    name = "model.language_model.per_layer_model_projection"
    layer = model.base_model.model.get_submodule(name)
    expected = layer.base_layer.weight + layer.get_delta_weight("default").to(layer.base_layer.weight.dtype)
    merged = model.merge_and_unload().get_submodule(name).weight
    assert torch.allclose(merged, expected, atol=2e-3)  # PEFT adds a float32 change to it


#: Layers of 2, 4 and 8 bits, with and without clipping around them.
DORA = r".*(q_proj|mlp.up_proj|per_layer_input_gate)(\.linear)?"


@qat.needs_quantizer
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dora_is_that_over_the_dequantized_weights(workspace: Any, tmp_path: Path, dropout: float) -> None:
    """Of layers that round no activations, that is the same bits. Dropout is another branch of PEFT's forward."""
    from peft import PeftModel

    checkpoint = workspace.qat(calibrated=False)
    plain, packed = qat.load(checkpoint), qat.load(checkpoint)
    plain.dequantize()
    made = qat.adapted(qat.load(checkpoint), use_dora=True, target_modules=DORA, lora_dropout=dropout)
    # magnitudes are norms: a row of packed integers has another one, by an order of magnitude
    layer = made.base_model.model.model.language_model.layers[0].per_layer_input_gate
    weight = plain.model.language_model.layers[0].per_layer_input_gate.weight + layer.get_delta_weight("default")
    assert layer.lora_magnitude_vector["default"].weight.allclose(weight.norm(dim=1), rtol=1e-2)
    made.save_pretrained(tmp_path)
    expected, found = (workspace.outputs(PeftModel.from_pretrained(base, tmp_path).eval()) for base in (plain, packed))
    assert difference(expected, found) == 0.0


@qat.needs_quantizer
def test_dora_offloaded_trained_and_loaded(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    from gemma4_compat._lab import tiny

    model = qat.adapted(qat.load(workspace.qat()), use_dora=True)
    batch = tiny.inputs(text_only=True)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    assert any("magnitude" in name for name in gradients)
    assert not [name for name, value in gradients.items() if value is None or not value.any()]
    expected = workspace.outputs(model)
    model.save_pretrained(tmp_path / "adapter")
    layout = qat.layout(qat.load(workspace.qat()), "layers")
    split = qat.load(workspace.qat(), device_map=layout, offload_folder=tmp_path / "1")
    split = PeftModel.from_pretrained(split, tmp_path / "adapter", offload_folder=str(tmp_path / "2")).eval()
    assert difference(expected, workspace.outputs(split)) == 0.0
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"model\.dequantize\(\)"):
        model.merge_and_unload()
