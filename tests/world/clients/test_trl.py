"""TRL's trainers on a split base: the same losses and the same adapter, as bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.world.clients import models

pytest.importorskip("trl", reason="needs trl: nox -s clients")

COMMON = {
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "report_to": [],
    "seed": 3,
}


def trained(trainer: Any) -> tuple[Any, dict[str, Any]]:
    trainer.train()
    losses = [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == COMMON["max_steps"]
    return losses, {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=r".*language_model.*\.(q_proj|up_proj)", task_type="CAUSAL_LM")


def supervised(model: Any, tokenizer: Any, folder: Path) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"text": f"{number} and one is {number + 1}"} for number in range(6)])
    arguments = SFTConfig(output_dir=str(folder), max_length=32, use_cpu=model.device.type == "cpu", **COMMON)
    return SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer, peft_config=lora())


def preferences(model: Any, tokenizer: Any, folder: Path) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = Dataset.from_list(
        [{"prompt": f"{number} and one?", "chosen": f" {number + 1}", "rejected": " none"} for number in range(6)]
    )
    arguments = DPOConfig(output_dir=str(folder), max_length=48, use_cpu=model.device.type == "cpu", **COMMON)
    return DPOTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer, peft_config=lora())


@pytest.mark.parametrize("quantization", [None, "4bit"])
@pytest.mark.parametrize("trainer", [supervised, preferences])
@pytest.mark.parametrize("placement", models.PLACEMENTS[:2])
def test_it_trains_as_on_one_device(
    workspace: Any,
    processor: Any,
    tmp_path: Path,
    placement: str,
    trainer: Callable[..., Any],
    quantization: str | None,
) -> None:
    import torch

    found = []
    for model in (models.whole(workspace, quantization), models.split(workspace, placement, quantization)):
        torch.manual_seed(3)
        found.append(trained(trainer(model, processor.tokenizer, tmp_path)))
    (losses, weights), (split_losses, split_weights) = found
    assert split_losses == losses
    assert weights
    assert split_weights.keys() == weights.keys()
    assert all(split_weights[name].equal(value) for name, value in weights.items())


@pytest.mark.parametrize("trainer", [supervised, preferences])
def test_an_offloaded_head_is_an_error_of_trl(
    workspace: Any, processor: Any, tmp_path: Path, trainer: Callable[..., Any]
) -> None:
    """TRL multiplies by ``lm_head.weight`` itself, outside the head's forward: no hook brings it in."""
    model = models.split(workspace, models.PLACEMENTS[2])
    made = trainer(model, processor.tokenizer, tmp_path)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"autocast|meta"):
        trained(made)
    assert made.state.global_step == 0
