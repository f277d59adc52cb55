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


def rewarded(model: Any, tokenizer: Any, folder: Path, seen: list[Any], *, adapted: bool) -> Any:
    """A trainer that draws four completions of a prompt and notes them in ``seen``."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.append(completion_ids)
        return [len(set(ids)) + ids[0] / 50 for ids in completion_ids]

    rows = Dataset.from_list([{"prompt": f"{'one and ' * number} is"} for number in range(6)])
    options = {**COMMON, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6}
    arguments = GRPOConfig(
        output_dir=str(folder),
        use_cpu=model.device.type == "cpu",
        bf16=model.device.type != "cpu",
        cache_implementation="static",
        gradient_checkpointing=True,
        **options,
    )
    peft_config = lora() if adapted else None
    return GRPOTrainer(model, reward, arguments, rows, processing_class=tokenizer, peft_config=peft_config)


@pytest.mark.parametrize("quantization, adapted", [("4bit", True), (None, True), (None, False)])
def test_rollouts_replay_with_the_completions_and_losses_of_eager_ones(
    workspace: Any, processor: Any, tmp_path: Path, quantization: str | None, adapted: bool
) -> None:
    """Without a GPU a stand-in captures. Steps of the optimizer, and checkpointing between, need no new graph."""
    import torch
    import transformers.generation.utils  # noqa: F401  # before the stand-in replaces torch.Event

    import gemma4_compat
    from gemma4_compat._graphs.recording import RECORDERS
    from gemma4_compat._lab.stand_ins import tape

    outcomes, counted = [], None
    for replays in (False, True):
        with tape.standing_in(RECORDERS):
            torch.manual_seed(3)
            model = models.whole(workspace, quantization)
            seen: list[Any] = []
            if replays:
                gemma4_compat.decode_fast(model, exact=True)
            trainer = rewarded(model, processor.tokenizer, tmp_path, seen, adapted=adapted)
            trainer.generation_config.disable_compile = not replays  # TRL sets it
            losses, weights = trained(trainer)
            outcomes.append((seen, losses, weights))
            counted = gemma4_compat.statistics(trainer.model).decoding
    (seen, losses, weights), (found, found_losses, found_weights) = outcomes
    assert found == seen
    assert found_losses == losses
    assert all(found_weights[name].equal(value) for name, value in weights.items())
    assert counted is not None
    assert counted.replayed > counted.captured
    assert set(counted.recaptures) <= {"the sliding windows are full or no longer full"}


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
