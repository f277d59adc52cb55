"""Transformers' Trainer with an interruption, and PEFT's Auto classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny
from tests.world.clients import models

STEPS = 4


def test_a_resumed_training_is_an_uninterrupted_one(whole: Any, split: Any, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    rows = torch.randint(3, 240, (STEPS * 2, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]

    def run(base: Any, folder: Path, *, resume: bool, until: int = STEPS) -> Any:
        torch.manual_seed(3)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=r".*language_model.*\.(q_proj|up_proj)"))
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            max_steps=STEPS,
            save_steps=2,
            logging_steps=1,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=base.device.type == "cpu",
        )
        trainer = Trainer(model, arguments, train_dataset=data)
        if until < STEPS:
            trainer.add_callback(stop_after(until))
        trainer.train(resume_from_checkpoint=resume or None)
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        return losses, {name: value for name, value in model.named_parameters() if value.requires_grad}

    expected = run(whole(), tmp_path / "whole", resume=False)
    first = run(split(), tmp_path / "split", resume=False, until=2)
    assert first[0] == expected[0][:2]
    found = run(split(), tmp_path / "split", resume=True)
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(found[1][name].equal(value) for name, value in expected[1].items())


def stop_after(step: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= step

    return Stop()


def test_auto_peft_model(workspace: Any, tmp_path: Path) -> None:
    import torch
    from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model

    checkpoint = workspace.larger(positions=64)
    torch.manual_seed(5)
    config = LoraConfig(
        r=2, target_modules=r".*language_model.*\.(q_proj|up_proj)", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = get_peft_model(models.whole(workspace), config)
    model.peft_config["default"].base_model_name_or_path = str(checkpoint)
    model.save_pretrained(tmp_path / "adapter")
    placement = tiny.device_map(models.whole(workspace), "both", main=workspace.main, offloaded="disk")
    found = []
    for options in (
        {"device_map": {"": workspace.main}},
        {"device_map": placement, "offload_folder": str(tmp_path / "offload")},
    ):
        loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.bfloat16, **options).eval()
        batch = {name: value.to(loaded.device) for name, value in workspace.inputs(text_only=True).items()}
        batch.pop("mm_token_type_ids", None)
        with torch.no_grad():
            found.append([loaded(**batch).logits, loaded.generate(**batch, max_new_tokens=4, do_sample=False)])
    assert all(ours.equal(theirs) for ours, theirs in zip(*found))
