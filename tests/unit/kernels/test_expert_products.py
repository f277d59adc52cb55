"""Products with the experts that tokens are sent to: the bits of a token alone, wherever the weights are."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
import torch
from bitsandbytes.nn import Params4bit

import gemma4_compat
from gemma4_compat._gemma4.quantization import expert_storage
from gemma4_compat._graphs import fused_steps
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.match import custom
from gemma4_compat._kernels.specs import expert_products, nf4_gemv
from gemma4_compat._lab import tiny_models
from tests.unit.generation import calls
from tests.unit.kernels.test_nf4_gemv import computed
from tests.unit.offload.test_expert_lookup import loaded, placed

CPU = torch.device("cpu")


def parameter_of(dtype: Any, *, nested: bool, quant_type: str = "nf4", width: int = 192) -> Any:
    values = torch.randn(5, 40, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    like = Params4bit(values, requires_grad=False, compress_statistics=nested, quant_type=quant_type, blocksize=64)
    return expert_storage.quantized(values, like)


def alone(on_host: kernels.Kernels, given: Any, parameter: Any, expert: int) -> Any:
    """The product of one row with one expert's weights, as of a linear layer."""
    state = parameter.quant_state
    _, height, width = state.shape
    scales = {"absmax": state.absmax[expert].contiguous()}
    if state.nested:
        scales = {"absmax": state.state2.absmax[expert].contiguous(), "absmax_8bit": scales["absmax"]}
        scales |= {"absmax_code": state.state2.code, "absmax_offset": state.offset[expert].reshape(())}
    packed = parameter.data.view(torch.uint8).view(len(state.absmax), -1)[expert].clone().view(-1, 1)
    wanted = nf4_gemv.match(
        given, packed, [height, width], blocksize=state.blocksize, quant_type=state.quant_type, **scales
    )
    assert wanted is not None
    return computed(on_host, [wanted])[0]


@pytest.mark.parametrize(
    ("dtype", "nested", "quant_type"),
    [(torch.bfloat16, True, "nf4"), (torch.float16, False, "fp4"), (torch.bfloat16, False, "nf4")],
)
def test_each_pair_has_the_bits_of_a_linear_layer(
    on_host: kernels.Kernels, dtype: Any, nested: bool, quant_type: str
) -> None:
    parameter = parameter_of(dtype, nested=nested, quant_type=quant_type)
    given = torch.randn(3, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    chosen = torch.tensor([[4, 0], [0, 2], [1, 4]])
    found = custom.expert_product(given, parameter, chosen.flatten())
    assert found is not None
    assert torch.equal(found, custom.expert_product(given, parameter, chosen.flatten(), from_host=True))
    for token, pair in enumerate(chosen.tolist()):
        for place, expert in enumerate(pair):
            expected = alone(on_host, given[token : token + 1], parameter, expert)
            assert torch.equal(found[token * 2 + place], expected[0])
    right = (
        given.double().repeat_interleave(2, 0)[:, None]
        @ expert_storage.dequantized(parameter).double().mT[chosen.flatten()]
    )
    assert (found.double() - right[:, 0]).abs().max() <= 0.02 * right.abs().max()


def test_what_does_not_suit_is_left() -> None:
    parameter = parameter_of(torch.bfloat16, nested=True)
    assert expert_products.weights_of(parameter, torch.bfloat16, CPU) is not None
    assert expert_products.weights_of(parameter, torch.float16, CPU) is None
    assert expert_products.weights_of(parameter, torch.bfloat16, torch.device("meta")) is None
    assert expert_products.weights_of(parameter_of(torch.bfloat16, nested=True, width=96), torch.bfloat16, CPU) is None
    assert expert_products.weights_of(torch.zeros(5, 40, 192), torch.bfloat16, CPU) is None


def test_texts_are_the_same_wherever_experts_are(
    kernels_on_host: None, workspace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = workspace.cached(tiny_models.build_moe_checkpoint)
    calls_of: list[tuple[int, bool, bool]] = []
    product = custom.expert_product

    def noted(given: Any, parameter: Any, chosen: Any, *, from_host: bool = False) -> Any:
        result = product(given, parameter, chosen, from_host=from_host)
        calls_of.append((len(given), from_host, result is None))
        return result

    monkeypatch.setattr(custom, "expert_product", noted)
    monkeypatch.setattr(fused_steps.Progress, "after", 2)
    found = []
    for where in ("", "nested"):
        model = loaded(workspace, checkpoint, "4bit-double", experts_implementation="batched_mm")
        model = gemma4_compat.decode_fast(placed(workspace, model, where, "memory") if where else model)
        given = calls.text(model, 5)
        found.append(calls.generate(model, given, new=5))
        assert calls.steps(model).fused
    calls.assert_equal(*found)
    assert set(calls_of) == {(count, where, False) for count in (1, 2) for where in (False, True)}
    before = calls.steps(model).captured
    many = calls.generate(model, {name: tensor.repeat(6, 1) for name, tensor in given.items()}, new=4)
    assert calls.steps(model).captured == before + 1
    assert all(torch.equal(row, logits[0]) for logits in many.logits for row in logits)
