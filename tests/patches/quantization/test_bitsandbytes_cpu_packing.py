"""F18: what bitsandbytes repacks for an AVX512-BF16 CPU comes back exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.quantization import quant_states
from gemma4_compat._lab import tiny
from gemma4_compat.patches.quantization.bitsandbytes_cpu_packing import PATCH
from tests.conftest import is_affected
from tests.patches.promise import Promise


def _host_packs() -> bool:
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    return is_affected(PATCH) and bool(functional.has_avx512bf16())


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"weights change by"
    exact = False

    def expects_defect(self) -> bool:
        return _host_packs()


@pytest.fixture(params=["4bit", "4bit-double"])
def packed(request: pytest.FixtureRequest, workspace: Any) -> Any:
    """A model on the CPU after an eval forward, with the values of one of its weights from before it."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    if not _host_packs():
        pytest.skip("this CPU has no AVX512-BF16 (or this bitsandbytes does not use it): nothing is repacked")
    model = tiny.load(workspace.checkpoint, request.param)
    layer = model.model.language_model.layers[0].mlp.up_proj
    values = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model(**tiny.inputs(text_only=True))
    assert quant_states.is_packed(layer.weight.quant_state)
    return model, layer, values, state


def test_dequantize(packed: Any) -> None:
    import torch
    from bitsandbytes.functional import dequantize_4bit

    _, layer, values, _ = packed
    assert torch.equal(dequantize_4bit(layer.weight.data, layer.weight.quant_state), values)
    assert quant_states.is_packed(layer.weight.quant_state), "reading must not unpack"


def test_state_dict(packed: Any) -> None:
    import torch

    model, _, _, state = packed
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert not [name for name in state if not torch.equal(after[name], state[name])]


def test_save_and_reload(packed: Any, tmp_path: Path) -> None:
    import torch

    model, _, _, state = packed
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path, device_map={"": "cpu"}).state_dict()
    assert not [name for name in state if not torch.equal(reloaded[name], state[name])]


def test_moves_and_deep_copies(packed: Any) -> None:
    import torch
    from bitsandbytes.functional import dequantize_4bit

    _, layer, values, _ = packed
    for weight in (copy.deepcopy(layer.weight), layer.weight.to("cpu")):
        assert torch.equal(dequantize_4bit(weight.data, weight.quant_state), values)


def test_a_move_to_where_it_is_leaves_a_weight_packed(packed: Any) -> None:
    """PEFT's DoRA makes such a move in every forward on a CPU."""
    _, layer, _, _ = packed
    moved = layer.weight.to("cpu")
    assert quant_states.is_packed(moved.quant_state)
    assert moved.data_ptr() == layer.weight.data_ptr()


@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_an_offloaded_weight_has_its_shape_and_dtype_after_a_forward(storage: str) -> None:
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit

    if not _host_packs():
        pytest.skip("this CPU has no AVX512-BF16 (or this bitsandbytes does not use it): nothing is repacked")
    layer = Linear4bit(64, 32, bias=False, compute_dtype=torch.bfloat16, quant_storage=getattr(torch, storage))
    layer = layer.to("cpu").eval()
    data, offloaded = layer.weight.data, layer.weight.to("meta")
    layer.weight = Params4bit(data, requires_grad=False, **vars(offloaded)).to("cpu")  # as accelerate does it
    with torch.no_grad():
        layer(torch.ones(1, 64, dtype=torch.bfloat16))
    assert quant_states.is_packed(layer.weight.quant_state)
    again = layer.weight.to("meta")
    assert (again.shape, again.dtype) == (offloaded.shape, offloaded.dtype)
    assert again.quant_state is offloaded.quant_state


def test_the_state_of_a_split_model_is_as_before_a_forward(workspace: Any) -> None:
    """Weights of the vision tower's input and of the projections go back to meta by accelerate's own hooks."""
    import torch

    if not _host_packs():
        pytest.skip("this CPU has no AVX512-BF16 (or this bitsandbytes does not use it): nothing is repacked")
    model = workspace.split("4bit", "both")
    before = {name: (value.shape, value.dtype, value.device) for name, value in model.state_dict().items()}
    with torch.no_grad():
        model(**tiny.inputs(workspace.main))
    after = {name: (value.shape, value.dtype, value.device) for name, value in model.state_dict().items()}
    assert after == before


def test_a_training_step_after_an_eval_forward_has_the_gradients_of_a_fresh_model(packed: Any, workspace: Any) -> None:
    import torch
    from peft import PeftModel

    model = packed[0]
    quantization = "4bit-double" if model.config.quantization_config.bnb_4bit_use_double_quant else "4bit"
    gradients = []
    for base in (tiny.load(workspace.checkpoint, quantization), model):
        trained = PeftModel.from_pretrained(base, workspace.adapter("language"), is_trainable=True).train()
        batch = tiny.inputs(text_only=True)
        trained(**batch, labels=batch["input_ids"]).loss.backward()
        gradients.append({name: p.grad for name, p in trained.named_parameters() if p.grad is not None})
    fresh, after_eval = gradients
    assert fresh.keys() == after_eval.keys()
    assert not [name for name in fresh if not torch.equal(fresh[name], after_eval[name])]


def test_a_merge_after_an_eval_forward_is_the_merge_of_a_fresh_model(packed: Any, workspace: Any) -> None:
    from peft import PeftModel

    from gemma4_compat._lab.workspace import difference

    model = packed[0]
    quantization = "4bit-double" if model.config.quantization_config.bnb_4bit_use_double_quant else "4bit"
    merged = []
    for base in (tiny.load(workspace.checkpoint, quantization), model):
        adapted = PeftModel.from_pretrained(base, workspace.adapter("language"))
        adapted.merge_adapter()
        merged.append(workspace.outputs(adapted))
        adapted.unmerge_adapter()
        merged.append(workspace.outputs(adapted))
        merged.append(workspace.outputs(adapted.merge_and_unload()))
    assert [difference(a, b) for a, b in zip(merged[:3], merged[3:])] == [0.0] * 3
