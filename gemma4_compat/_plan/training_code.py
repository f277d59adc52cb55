"""The code that trains an adapter on a planned model, as Python text."""

from __future__ import annotations

from typing import Any

from gemma4_compat._attention import windows
from gemma4_compat._engine import settings
from gemma4_compat._fast_training import layers
from gemma4_compat._memory.layout import Layout
from gemma4_compat._plan import code
from gemma4_compat._plan.result import Source
from gemma4_compat._plan.training_step import TARGETS, Step

_TRAINING = """\
model = get_peft_model(
    model,
    LoraConfig(r={r}, lora_alpha={r}, target_modules=r"{targets}"),
)
{chunked}{pieces}{replays}arguments = TrainingArguments(
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


def _replays(step: Step) -> str:
    tokens = step.max_length * step.batch
    most = "" if tokens <= layers.MAX_TOKENS else f", max_tokens={tokens}"
    return f"model = gemma4_compat.train_fast(model{most})\n"


def training_code(source: Source, placed: Layout[Any], step: Step) -> str:
    """Python that loads a model as a layout places it, and trains an adapter on it."""
    imports = ("from peft import LoraConfig, get_peft_model", ("Trainer", "TrainingArguments"))
    training = _TRAINING.format(
        r=step.r,
        chunked="model = gemma4_compat.chunked_loss(model)\n" if step.chunked_loss else "",
        pieces="model = gemma4_compat.chunked_mlp(model)\n" if step.chunked_mlp else "",
        replays=_replays(step) if step.train_fast else "",
        lengths=_LENGTHS if step.train_fast else "",
        targets=TARGETS,
        batch=step.batch,
        checkpointing=step.gradient_checkpointing,
        offload=', "offload": True' if step.activation_offloading else "",
        optim=step.optim,
        max_length=step.max_length,
    )
    lines = []
    if step.sliding_windows:
        enabled = ",".join(dict.fromkeys([*settings.enabled()[0], windows.ID]))
        lines = ["import os", "", f'os.environ["GEMMA4_COMPAT_ENABLE"] = "{enabled}"', ""]
    return "\n".join([*lines, *code.loading_lines(source, placed, imports=imports), training])
