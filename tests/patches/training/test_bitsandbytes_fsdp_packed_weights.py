"""F72: FSDP2 gathers packed 4-bit weights bit for bit, and everything else as ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError, PatchState
from gemma4_compat._lab import sharding, tiny, tiny_models
from gemma4_compat.patches.training.bitsandbytes_fsdp_packed_weights import PATCH
from tests.patches.promise import Promise

pytest.importorskip("torch.distributed.fsdp", reason="needs torch with torch.distributed")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"[1-9]\d* of \d+ packed bytes are others after FSDP2 gathered them"
    exact = False


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Two ranks, and copies as on a GPU."""
    if (missing := sharding.missing()) is not None:
        pytest.skip(missing)
    with sharding.copies("cpu"), sharding.two_ranks("cpu") as found:
        yield found


def linear(storage: Any, kind: str = "nf4") -> Any:
    """A 4-bit layer with every pair of bytes among its packed ones: all NaNs of both dtypes in each rank's half."""
    import torch
    from bitsandbytes import nn

    layer = nn.Linear4bit(512, 1024, bias=False, compute_dtype=torch.float32, quant_type=kind, quant_storage=storage)
    layer = layer.to("cpu")
    pairs = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.uint8).repeat(2)
    layer.weight.data.view(torch.uint8).view(-1).copy_(pairs)
    return layer.requires_grad_(False)


def gathers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The dtypes in which groups are gathered from here on."""
    import torch

    seen: list[Any] = []
    gather = torch.ops.fsdp.all_gather_copy_in

    def copy_in(inputs: Any, output: Any, *arguments: Any) -> Any:
        assert {tensor.dtype for tensor in inputs} == {output.dtype}
        seen.append(output.dtype)
        return gather(inputs, output, *arguments)

    monkeypatch.setattr(torch.ops.fsdp, "all_gather_copy_in", copy_in)
    return seen


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32", None])
def test_every_pair_of_bytes_is_gathered_as_it_is(mesh: Any, storage: str, precision: str | None, kind: str) -> None:
    """In mixed precision of another dtype, too, where FSDP2 would cast them, and with none."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def changed(*, patched: bool) -> int:
        model = torch.nn.Sequential(linear(getattr(torch, storage), kind))
        before = sharding.own_bytes(model[0].weight)
        dtype = None if precision is None else getattr(torch, precision)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        for _ in range(2):  # the second time into the same tensor
            model.unshard()
            weight = model[0].weight
            assert weight.dtype == getattr(torch, storage) or not patched
            after = sharding.own_bytes(weight)
            model.reshard()
        return int((before != after).sum()) if before.shape == after.shape else len(before)

    assert changed(patched=True) == 0
    gemma4_compat.revert(PATCH.id)
    try:
        cast = precision not in (None, storage)
        assert (changed(patched=False) > 0) == (cast or storage != "float32")
    finally:
        gemma4_compat.install()
    assert changed(patched=True) == 0


def test_outputs_are_those_of_the_layer_before_it_was_sharded(mesh: Any) -> None:
    """Both halves of the weight are alike, so what the stand-in for a group gathers is all of it."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    inputs = torch.randn(4, 512, dtype=torch.bfloat16)

    def outputs() -> tuple[Any, Any]:
        model = torch.nn.Sequential(linear(torch.bfloat16))
        whole = model(inputs)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        return whole, model(inputs)

    assert torch.equal(*outputs())
    gemma4_compat.revert(PATCH.id)
    try:
        whole, wrong = outputs()
    finally:
        gemma4_compat.install()
    assert (wrong - whole).norm() > 0.01 * whole.norm()


def test_other_groups_are_gathered_as_ever(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    seen = gathers(monkeypatch)
    layers = {
        "plain": torch.nn.Linear(8, 8).to(torch.bfloat16),
        "narrow": torch.nn.Linear(1, 8, bias=False).to(torch.bfloat16).requires_grad_(False),
        "float32": torch.nn.Linear(8, 8),
        "packed": linear(torch.bfloat16),
        "packed in float32": linear(torch.float32),
    }
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    found = {}
    for name, layer in layers.items():
        seen.clear()
        layer.unshard()
        (found[name],) = seen
    assert found == {
        "plain": torch.bfloat16,
        "narrow": torch.bfloat16,
        "float32": torch.bfloat16,
        "packed": torch.uint8,
        "packed in float32": torch.float32,
    }


def test_what_is_trained_beside_it_is_cast_and_has_its_gradients(mesh: Any) -> None:
    """LoRA in float32 and in bfloat16, in the group of a packed weight, in mixed precision of bf16."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
        base = torch.nn.Sequential(linear(torch.bfloat16))
        model = get_peft_model(base, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.to(dtype)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        layer = model.base_model.model[0]
        model.unshard()
        assert layer.base_layer.weight.dtype == layer.lora_A.default.weight.dtype == torch.bfloat16
        model.reshard()
        model(torch.randn(4, 512, dtype=torch.bfloat16)).float().square().sum().backward()
        assert {weight.grad.dtype for weight in model.parameters() if weight.requires_grad} == {dtype}


def test_it_waits_for_fsdp2_and_is_applied() -> None:
    import torch.distributed.fsdp  # noqa: F401

    status = gemma4_compat.status()[PATCH.id]
    assert status.state is PatchState.APPLIED, status.reason


def test_experts_in_four_bits_are_refused_by_name_and_work_when_they_are_left_out(workspace: Any, mesh: Any) -> None:
    """FSDP2 puts plain tensors in place of their weights, so their scales are gone."""
    import torch
    from torch.distributed.fsdp import fully_shard

    checkpoint = workspace.cached(tiny_models.build_moe_checkpoint)
    ids = {"input_ids": workspace.inputs(text_only=True)["input_ids"]}

    def load() -> Any:
        with gemma4_compat.quantize(experts=True):
            return tiny.load(checkpoint, "4bit", device="cpu").requires_grad_(False)

    model = load()
    layer = model.get_decoder().layers[0]
    with torch.no_grad():
        fully_shard(layer.experts, mesh=mesh)
        with pytest.raises(Gemma4CompatError, match=r"experts\.gate_up_proj .* without their scales.* ignored_params"):
            model(**ids)

        model = load()
        expected = model(**ids).logits
        layer = model.get_decoder().layers[0]
        fully_shard(layer.experts, mesh=mesh, ignored_params=set(layer.experts.parameters()))
        assert torch.equal(model(**ids).logits, expected)
