"""The code that trains an adapter on a planned model, as Python text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemma4_compat._planner import code
from gemma4_compat._planner.training_step import TARGETS

if TYPE_CHECKING:
    from gemma4_compat._planner.result import TrainingPlan

_TRAINING = """\
model = get_peft_model(
    model,
    LoraConfig(r={rank}, lora_alpha={rank}, target_modules=r"{targets}"),
)
{chunked}arguments = TrainingArguments(
    "adapter",
    bf16=True,
    per_device_train_batch_size={batch},
    gradient_checkpointing={checkpointing},
    gradient_checkpointing_kwargs={{"use_reentrant": False}},
    optim="{optimizer}",
)
# DATASET yields dicts with input_ids, attention_mask and labels, of at most {sequence} tokens.
trainer = Trainer(model, arguments, train_dataset=DATASET)
trainer.train()
model.save_pretrained("adapter")"""


def training_code(plan: TrainingPlan, *, skip: Sequence[str], offloads: bool) -> str:
    """Python that loads the model of ``plan`` where it says, and trains.

    Args:
        plan: all of it but its ``code``.
        skip: ``llm_int8_skip_modules``.
        offloads: whether anything leaves the accelerator.
    """
    loading = code.loading_lines(
        plan.model,
        plan.model_class,
        plan.device_map,
        plan.quantization,
        skip=skip,
        quantize_offloaded=offloads and plan.quantization is not None,
        imports=("from peft import LoraConfig, get_peft_model", ("Trainer", "TrainingArguments")),
    )
    training = _TRAINING.format(
        rank=plan.rank,
        chunked="model = gemma4_compat.chunked_loss(model)\n" if plan.chunked_loss else "",
        targets=TARGETS,
        batch=plan.batch,
        checkpointing=plan.checkpointing,
        optimizer=plan.optimizer,
        sequence=plan.sequence,
    )
    return "\n".join([*loading, training])
