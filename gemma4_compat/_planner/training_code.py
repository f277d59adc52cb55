"""The code that trains an adapter on a planned model, as Python text."""

from __future__ import annotations

from typing import Any

from gemma4_compat._attention import windows
from gemma4_compat._planner import code
from gemma4_compat._planner.layout import Layout
from gemma4_compat._planner.result import Source
from gemma4_compat._planner.training_step import TARGETS, Step
from gemma4_compat._training import mlp
from gemma4_compat._training.captured import layers

_TRAINING = """\
model = get_peft_model(
    model,
    LoraConfig(r={r}, lora_alpha={r}, target_modules=r"{targets}"),
)
{fast}arguments = TrainingArguments(
    "adapter",
    bf16=True,
    per_device_train_batch_size={batch},
    gradient_checkpointing={checkpointing},
    gradient_checkpointing_kwargs={{"use_reentrant": False{offload}}},
    optim="{optim}",
)
# DATASET yields dicts with input_ids, attention_mask and labels, of at most {max_length} tokens.{lengths}
trainer = Trainer(model, arguments, train_dataset=DATASET)
trainer.train()
model.save_pretrained("adapter")"""


_LENGTHS = "\n# Only lengths that come back are replayed: pad to one or a few (pad_to_multiple_of), or pack."


def _fast(step: Step) -> str:
    """The call that turns on what was planned: what it would choose otherwise is named."""
    if not (step.chunked_loss or step.chunked_mlp or step.sliding_windows or step.train_fast):
        return ""
    tokens, named = step.max_length * step.batch, []
    if step.train_fast and tokens > layers.MAX_TOKENS:
        named.append(f"max_tokens={tokens}")
    named += [] if step.chunked_loss else ["loss=False"]
    named += [f"mlp={step.chunked_mlp}"] if tokens > mlp.TOKENS else []
    if step.max_length >= windows.LEAST_ON_GPU and not step.sliding_windows:
        named += ["windows=False", "products=False"]
    named += [] if step.train_fast else ["graphs=False"]
    return f"model = gemma4_compat.train_fast({', '.join(['model', *named])})\n"


def training_code(source: Source, placed: Layout[Any], step: Step) -> str:
    """Python that loads a model as a layout places it, and trains an adapter on it."""
    imports = ("from peft import LoraConfig, get_peft_model", ("Trainer", "TrainingArguments"))
    training = _TRAINING.format(
        r=step.r,
        fast=_fast(step),
        lengths=_LENGTHS if step.train_fast else "",
        targets=TARGETS,
        batch=step.batch,
        checkpointing=step.gradient_checkpointing,
        offload=', "offload": True' if step.activation_offloading else "",
        optim=step.optim,
        max_length=step.max_length,
    )
    return "\n".join([*code.loading_lines(source, placed, imports=imports), training])
