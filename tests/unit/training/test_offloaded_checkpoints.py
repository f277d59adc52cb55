"""transformers' own ``offload`` of what checkpointing keeps, on a Gemma 4: documented and planned, not built here."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._plan import training_step
from tests.unit.generation.calls import text


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_gradients_have_the_bits_of_checkpoints_on_the_device(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    if not training_step.can_offload():
        pytest.skip("this transformers does not offload checkpointed activations")
    if not torch.cuda.is_available():  # and nothing to pin memory for
        made = torch.autograd.graph.save_on_cpu.__init__
        monkeypatch.setattr(
            torch.autograd.graph.save_on_cpu,
            "__init__",
            lambda self, pin_memory=False, device_type="cuda": made(self, False, device_type),
        )

    def step(offload: bool) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(0)
        config = LoraConfig(r=4, init_lora_weights=False, target_modules=training_step.TARGETS)
        model = get_peft_model(workspace.load(quantization), config).train()
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable(offload=offload)
        batch = text(model, batch=2)
        loss = model(
            **batch, mm_token_type_ids=0 * batch["input_ids"], labels=batch["input_ids"], use_cache=False
        ).loss
        loss.backward()
        return loss, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    (loss, gradients), (found, found_gradients) = step(False), step(True)
    assert found.equal(loss)
    assert gradients
    assert all(found_gradients[name].equal(gradient) for name, gradient in gradients.items())
