"""Products with the packed weights of experts: the bits of a product with each expert's weight by itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch

import gemma4_compat
from gemma4_compat._gemma4.quantization import expert_storage, packed_linear
from gemma4_compat._kernels.match import custom
from gemma4_compat._kernels.specs import expert_products
from gemma4_compat._lab import tiny_models
from tests.unit.generation import calls
from tests.unit.offload.test_expert_lookup import loaded, placed

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("kernels_on_host")


def experts(
    number: int, height: int, width: int, dtype: Any, quant_type: str, nested: bool, blocksize: int = 64
) -> Any:
    values = torch.randn((number, height, width), generator=torch.Generator().manual_seed(0)).to(dtype)
    like = {"blocksize": blocksize, "compress_statistics": nested, "quant_type": quant_type}
    return expert_storage.quantized(values, SimpleNamespace(**like, quant_storage=torch.uint8))


FORMATS = {
    "nested": (torch.bfloat16, "nf4", True, 64),
    "float16": (torch.float16, "nf4", False, 64),
    "fp4": (torch.bfloat16, "fp4", True, 128),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("tokens", "each"), [(1, 2), (3, 2), (9, 1)])
def test_each_product_has_the_bits_of_its_expert_alone(name: str, tokens: int, each: int) -> None:
    dtype, quant_type, nested, blocksize = FORMATS[name]
    weights = experts(5, 48, 320 if blocksize == 64 else 384, dtype, quant_type, nested, blocksize)
    generator = torch.Generator().manual_seed(1)
    given = torch.randn((tokens, weights.quant_state.shape[2]), generator=generator).to(dtype)
    chosen = torch.randint(0, 5, (tokens * each,), generator=generator)
    with torch.no_grad(), custom.CustomKernels(CPU):
        assert packed_linear.multiplies_experts(given, chosen, [weights])
        found = packed_linear.expert_product(given, chosen, weights)
        alone = [
            packed_linear.expert_product(given[place // each][None], one[None], weights)[0]
            for place, one in enumerate(chosen)
        ]
    assert torch.equal(found, torch.stack(alone))
    values = expert_storage.dequantized(weights, chosen).double()
    right = torch.einsum("poi,pi->po", values, given.double().repeat_interleave(each, 0))
    bound = torch.finfo(dtype).eps * right.abs().max()
    assert (found.double() - right).abs().max() <= bound


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.update(given=one["given"].float()),
        lambda one: one.update(chosen=one["chosen"].int()),
        lambda one: one.update(given=one["given"][:, :64]),
        lambda one: one.update(chosen=torch.zeros(expert_products.MOST + 2, dtype=torch.long)),
        lambda one: one.update(chosen=torch.zeros(3, dtype=torch.long)),
        lambda one: setattr(one["weights"].quant_state, "quant_type", "int4"),
        lambda one: setattr(
            one["weights"].quant_state.state2, "absmax", one["weights"].quant_state.state2.absmax[:, :0]
        ),
        lambda one: setattr(one["weights"].quant_state, "offset", one["weights"].quant_state.offset.bfloat16()),
        lambda one: setattr(one["weights"].quant_state, "offset", one["weights"].quant_state.offset[:2]),
    ],
    ids=[
        *("float32", "int32", "fewer inputs", "too many", "not equally many", "another type", "other nested scales"),
        *("offsets in another dtype", "offsets of fewer experts"),
    ],
)
def test_what_does_not_suit_is_not_multiplied(change: Any) -> None:
    one = {"given": torch.ones(2, 128, dtype=torch.bfloat16), "chosen": torch.zeros(4, dtype=torch.long)}
    weights = one["weights"] = experts(3, 16, 128, torch.bfloat16, "nf4", True)
    assert expert_products.kernel_of(one["given"], one["chosen"], *expert_products.arguments(weights))
    change(one)
    assert expert_products.kernel_of(one["given"], one["chosen"], *expert_products.arguments(one["weights"])) is None


@pytest.fixture(scope="module")
def checkpoint(workspace: Any) -> Path:
    return workspace.cached(tiny_models.build_moe_checkpoint)


@pytest.mark.parametrize("where", ["nested", pytest.param("layers", marks=pytest.mark.full)])
def test_the_same_tokens_and_logits_wherever_the_experts_are(
    workspace: Any, checkpoint: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied: list[int] = []
    kernel_of = expert_products.kernel_of
    monkeypatch.setattr(
        expert_products, "kernel_of", lambda given, *rest: multiplied.append(len(given)) or kernel_of(given, *rest)
    )

    def answer(model: Any, batch: int) -> Any:
        gemma4_compat.decode_fast(model)
        for _ in range(2):
            found = calls.generate(model, calls.text(model, batch=batch), {}, new=4)
        assert calls.steps(model).reasons == ()
        return found

    card = loaded(workspace, checkpoint, "4bit-double")
    host = placed(workspace, loaded(workspace, checkpoint, "4bit-double"), where, "memory")
    for batch in (1, 3):
        found = answer(card, batch)
        assert multiplied
        multiplied.clear()
        calls.assert_equal(answer(host, batch), found)
        assert multiplied
