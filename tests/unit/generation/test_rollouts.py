"""Rollouts of a trainer: a model in training mode, whose adapter changes in place between calls of ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._graphs import unsupported
from gemma4_compat.patches.training.transformers_generate_checkpointing import PATCH as CHECKPOINTING
from tests.conftest import is_affected
from tests.helpers import without
from tests.unit.generation.calls import Models, base, compared, generate, layers, steps, text

pytestmark = pytest.mark.usefixtures("tapes")
ROLLOUTS = 3


def trained(models: Models, quantization: str | None = "4bit", *, own: bool = False, dropout: float = 0.0) -> Any:
    """A model with a new adapter, in training mode, as a trainer has it."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = models.workspace.load(quantization)
    gemma4_compat.decode_fast(model, exact=not own)
    config = LoraConfig(
        r=4,
        lora_dropout=dropout,
        init_lora_weights=False,
        target_modules=r".*language_model\..*\.(q_proj|v_proj|o_proj|up_proj|down_proj)",
    )
    torch.manual_seed(5)
    return get_peft_model(model, config).train()


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def step(model: Any, optimizer: Any, seed: int, *, stays: bool = False) -> None:
    """One step of the optimizer, with checkpointing, which TRL turns off for rollouts; or it ``stays`` on."""
    checkpointed(model)
    ids = text(model, seed=seed)["input_ids"]
    model(input_ids=ids, mm_token_type_ids=0 * ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if not stays:
        model.gradient_checkpointing_disable()


def optimizer_of(model: Any) -> Any:
    import torch

    return torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.05)


def rollout(model: Any, way: dict[str, Any]) -> list[Any]:
    return [generate(model, text(model, batch=4), way, do_sample=True)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_rollouts_replay_with_the_bits_of_each_step(models: Models, quantization: str | None, dtype: str) -> None:
    """No graph is captured after the first step, whose checkpointing put a hook on the embeddings."""
    import torch

    model = trained(models, quantization)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(getattr(torch, dtype))
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    found = [compared(model, lambda way: rollout(model, way))]
    captured = steps(model).captured
    for seed in range(1, ROLLOUTS + 1):
        step(model, optimizer, seed)
        found.append(compared(model, lambda way: rollout(model, way)))
        assert not torch.equal(found[-1][0].logits[-1], found[-2][0].logits[-1])
    counted = steps(model)
    assert counted.captured == captured == 1
    assert not counted.recaptures
    assert model.training


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_rollouts_replay_with_checkpointing_on(models: Models, quantization: str | None, prepared: bool) -> None:
    """Their tokens and logits are those of eager ones, and of the same model without checkpointing."""
    import peft
    import torch

    model = trained(models, quantization)
    if prepared:
        peft.prepare_model_for_kbit_training(base(model), gradient_checkpointing_kwargs={"use_reentrant": False})
        for name, weight in model.named_parameters():
            weight.requires_grad_("lora_" in name)
    optimizer = optimizer_of(model)
    for seed in range(ROLLOUTS):
        step(model, optimizer, seed, stays=True)
        assert base(model).is_gradient_checkpointing
        found = compared(model, lambda way: rollout(model, way))
    counted = steps(model)
    assert counted.captured == 1
    assert not counted.recaptures
    model.gradient_checkpointing_disable()
    (expected,) = compared(model, lambda way: rollout(model, way))
    assert torch.equal(found[0].sequences, expected.sequences)
    assert all(map(torch.equal, found[0].logits, expected.logits))


@pytest.mark.skipif(not is_affected(CHECKPOINTING), reason="since 5.24 transformers keeps the cache itself")
def test_without_the_patch_checkpointing_is_a_reason_against_replays(models: Models) -> None:
    model = trained(models)
    checkpointed(model)
    modules = unsupported.modules_of_a_step(model)
    with without(CHECKPOINTING.id):
        assert "with gradient checkpointing, which drops the cache" in next(
            unsupported.training_reasons(model, modules)
        )
    assert not list(unsupported.training_reasons(model, modules))


@pytest.mark.usefixtures("kernels_on_host")
def test_kernels_remember_nothing_of_the_adapter_before(models: Models) -> None:
    """With custom kernels, the graph of the first rollout gives what one captured after the step gives."""
    import torch

    model = trained(models, own=True)
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    before = rollout(model, {})[0]
    step(model, optimizer, 1)
    found = rollout(model, {})[0]
    assert steps(model).captured == 1
    gemma4_compat.decode_fast(base(model), enabled=False)
    gemma4_compat.decode_fast(base(model))
    anew = rollout(model, {})[0]
    assert steps(model).captured == 2
    assert all(torch.equal(*pair) for pair in zip(found.logits, anew.logits, strict=True))
    assert not torch.equal(before.logits[-1], found.logits[-1])


def test_dropout_is_drawn_as_before(models: Models) -> None:
    """Its masks are other ones for every token, so nothing is replayed, and one line says so."""
    model = trained(models, dropout=0.3)
    compared(model, lambda way: rollout(model, way), replays=False)
    reason = steps(model).reasons[0]
    assert "lora_dropout.default is in training mode (model.eval() ends it), and p is 0.3" in reason
    model.eval()
    compared(model, lambda way: rollout(model, way))


def test_a_trainers_configuration_that_forbids_replays_says_so(models: Models) -> None:
    model = trained(models)
    rollout(model, {"disable_compile": True})
    assert not steps(model).replayed
    (reason,) = steps(model).reasons
    assert "trainer.generation_config.disable_compile = False" in reason


def _drops_attention(model: Any) -> None:
    layers(model)[1].self_attn.attention_dropout = 0.1


def _has_a_module_of_its_own(model: Any) -> None:
    import torch

    class Own(torch.nn.Module):  # type: ignore[misc]
        pass

    layers(model)[1].own = Own()


def _normalizes_batches(model: Any) -> None:
    import torch

    layers(model)[1].own = torch.nn.BatchNorm1d(4)


CHANGES: dict[Callable[[Any], None], str] = {
    _drops_attention: "attention_dropout is 0.1",
    _has_a_module_of_its_own: "Own may heed",
    _normalizes_batches: "BatchNorm1d computes otherwise",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_computes_otherwise_in_training_mode_is_not_replayed(
    models: Models, change: Callable[[Any], None]
) -> None:
    model = models.fresh().train()
    modules = unsupported.modules_of_a_step(model)
    assert not list(unsupported.training_reasons(model, modules))
    change(model)
    (reason,) = unsupported.training_reasons(model, unsupported.modules_of_a_step(model))
    assert CHANGES[change] in reason
    model.eval()
    assert not list(unsupported.training_reasons(model, unsupported.modules_of_a_step(model)))


@pytest.mark.parametrize("tuner, replays", [("lora", True), ("loha", False)])
def test_adapters_other_than_lora_are_left_alone_in_training_mode(models: Models, tuner: str, replays: bool) -> None:
    import peft

    config = {"lora": peft.LoraConfig, "loha": peft.LoHaConfig}[tuner](
        r=2, target_modules=r".*language_model\..*\.up_proj"
    )
    model = peft.get_peft_model(models.fresh("4bit" if tuner == "lora" else None), config).train()
    compared(model, lambda way: rollout(model, way), replays=replays)
