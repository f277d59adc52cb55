"""Training with embeddings that are looked up where they are stored."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_adapters
from gemma4_compat.patches.offload.accelerate_embedding_lookup import largest_tensor
from tests.patches.offload.looked_up_embeddings import (
    PER_LAYER,
    WEIGHTS,
    assert_equal_gradients,
    embedding_of,
    lookups,
    split,
)


def test_a_copy_of_an_embedding_is_trained(workspace: Any, way: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    found = []
    for base in (workspace.load(), split(workspace, PER_LAYER)):
        workspace.outputs(base)
        torch.manual_seed(3)
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens_per_layer"])
        model = get_peft_model(base, config).train()
        batch = tiny.inputs(workspace.main, text_only=True)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        found.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    assert_equal_gradients(*found)
    assert any("embed_tokens_per_layer" in name for name in found[0])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_training_beside_frozen_embeddings(
    workspace: Any, way: str, quantization: str | None, checkpointing: bool
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    steps = []
    for base in (workspace.load(quantization), split(workspace, *WEIGHTS["all"], quantization=quantization)):
        torch.manual_seed(3)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["all"])).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        batch = tiny.inputs(workspace.main)
        for _ in range(2):
            model(**batch, labels=batch["input_ids"]).loss.backward()
        steps.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_equal_gradients(*steps)
    assert len(lookups(model)) == 2


def test_training_an_embedding_that_is_not_frozen_is_left_to_upstream(workspace: Any) -> None:
    found = []
    for base in (workspace.load(), split(workspace, PER_LAYER)):
        model = base.train()
        assert embedding_of(model).weight.requires_grad
        batch = tiny.inputs(workspace.main, text_only=True)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        found.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None and PER_LAYER not in name}
        )
    assert_equal_gradients(*found)
    assert lookups(model) == []


def test_after_a_forward_in_eval_mode_the_training_of_the_embedding_is_left_to_upstream(workspace: Any) -> None:
    model = split(workspace, PER_LAYER)
    workspace.outputs(model, text_only=True)
    assert lookups(model) == [PER_LAYER]
    embedding = embedding_of(model).train()
    ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
    assert largest_tensor(lambda: embedding(ids)) >= embedding.weight.numel()
    assert embedding(ids).requires_grad
