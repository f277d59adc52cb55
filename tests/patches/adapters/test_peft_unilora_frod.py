"""peft-unilora-frod: UniLora on offloaded and on quantized layers, FRoD on offloaded ones."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters import peft_unilora_frod
from gemma4_compat.patches.adapters.peft_unilora_frod import PATCH
from tests.conftest import is_affected
from tests.helpers import without
from tests.patches.promise import Promise

TARGETS = r".*language_model\.layers\.\d+\.(self_attn\.q_proj|mlp\.up_proj)"
affected = pytest.mark.skipif(not is_affected(PATCH), reason="this PEFT has neither tuner")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = (
        r"UniLora merged into a split model: other answers than on one device"
        r"|UniLora on a 4-bit base changes nothing"
    )


def tuned(model: Any, kind: str = "UniLoraConfig") -> Any:
    """``model`` with such an adapter, whose weights are far from those it begins with."""
    import peft
    import torch

    torch.manual_seed(0)
    found = peft.get_peft_model(model, getattr(peft, kind)(target_modules=TARGETS)).eval()
    with torch.no_grad():
        for value in found.parameters():
            if value.requires_grad:
                value.add_(torch.linspace(0.5, 1.5, value.numel()).reshape(value.shape))
    return found


def gradients(model: Any, workspace: Any) -> list[Any]:
    batch = tiny.inputs(workspace.main, text_only=True)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    return [value.grad for value in model.parameters() if value.requires_grad]


CASES = [("UniLoraConfig", None), ("UniLoraConfig", "4bit"), ("UniLoraConfig", "8bit"), ("FrodConfig", None)]


@affected
@pytest.mark.parametrize("kind, quantization", CASES)
@pytest.mark.parametrize("offload", ["layers", "both"])
def test_a_split_model_has_the_answers_and_gradients_of_one_device(
    workspace: Any, kind: str, quantization: str | None, offload: str
) -> None:
    import torch

    whole, split = tuned(workspace.load(quantization), kind), tuned(workspace.split(quantization, offload), kind)
    outputs = workspace.outputs(whole)
    assert difference(outputs, workspace.outputs(split)) == 0.0
    assert difference(outputs, workspace.reference(quantization)) > 0.01, "the adapter changes nothing"
    expected, found = gradients(whole, workspace), gradients(split, workspace)
    assert any(gradient.any() for gradient in expected)
    assert all(map(torch.equal, found, expected))


@affected
@pytest.mark.parametrize("kind, quantization", CASES)
def test_it_loads_onto_a_split_model_as_it_was_saved(
    workspace: Any, tmp_path: Path, kind: str, quantization: str | None
) -> None:
    from peft import PeftModel

    whole = tuned(workspace.load(quantization), kind)
    whole.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(workspace.split(quantization), tmp_path).eval()
    assert difference(workspace.outputs(whole), workspace.outputs(loaded)) == 0.0


@affected
@pytest.mark.parametrize("kind", ["UniLoraConfig", "FrodConfig"])
def test_it_merges_into_a_split_model_as_on_one_device(workspace: Any, kind: str) -> None:
    merged = [tuned(model, kind).merge_and_unload() for model in (workspace.load(), workspace.split())]
    assert difference(*map(workspace.outputs, merged)) == 0.0


@affected
@pytest.mark.parametrize("kind", ["UniLoraConfig", "FrodConfig"])
def test_a_model_that_was_cast_after_it_was_split(workspace: Any, kind: str) -> None:
    """What is stored is bfloat16 still; what it computes with is not."""
    whole, split = (tuned(model.float(), kind) for model in (workspace.load(), workspace.split()))
    assert difference(workspace.outputs(whole), workspace.outputs(split)) == 0.0


@affected
@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_scales_beside_packed_weights_are_those_of_float32(workspace: Any, quantization: str) -> None:
    """Without the patch they are whole numbers, all 0."""
    import torch

    def scales() -> list[Any]:
        model = tuned(workspace.load(quantization))
        return [layer.unilora_scales_A["default"] for layer in model.modules() if hasattr(layer, "unilora_scales_A")]

    found = scales()
    assert {value.dtype for value in found} == {torch.float32}
    assert all((value > 0).all() for value in found)
    with without(PATCH.id):
        lost = scales()
    assert not any(value.any() for value in lost)
    assert {value.dtype.is_floating_point for value in lost} == {False}


@affected
def test_one_device_is_left_to_upstream(workspace: Any) -> None:
    """The same objects: nothing is copied, and no weight is another one afterwards."""
    import torch

    for kind in ("UniLoraConfig", "FrodConfig"):
        found = tuned(workspace.load(), kind).state_dict()
        with without(PATCH.id):
            expected = tuned(workspace.load(), kind).state_dict()
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_offloaded_weights_are_placeholders_again_after_an_error(workspace: Any) -> None:
    model = workspace.split()
    modules = list(model.modules())
    before = {name: id(value) for name, value in model.named_parameters()}
    with contextlib.suppress(ZeroDivisionError), peft_unilora_frod._stored_weights(modules):
        assert all(value.device.type != "meta" for name, value in model.named_parameters() if "up_proj" in name)
        raise ZeroDivisionError
    assert {name: id(value) for name, value in model.named_parameters()} == before
