"""What runs in each process of a distributed test: ``python -m tests.patches.fsdp2 CHECKPOINT OUTPUT CASE...``.

A case is ``BASE,WRAPPING``. Of each, one training step of a tiny model with LoRA is saved as ``OUTPUT.CASE.RANK``:
without ``torch.distributed.run`` the plain model in one process, with it the same model sharded. Every rank has the
whole batch, so the mean of the gradients over 2 ranks is (g + g) / 2 = g to the last bit, and nothing but equality is
right.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gemma4_compat  # before the libraries, as a user has it  # noqa: F401
from gemma4_compat._lab import tiny, tiny_adapters


def build(checkpoint: Path, case: str) -> Any:
    """A bf16 or 4-bit base (stored as bf16, which is what FSDP can shard) with LoRA on the language model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Gemma4ForConditionalGeneration

    quantization = tiny.quantization_config(None if case == "bf16" else case)
    if quantization is not None:
        quantization.bnb_4bit_quant_storage = torch.bfloat16
    base = Gemma4ForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=quantization
    )
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=tiny_adapters.TARGETS["language"], init_lora_weights=False)
    return get_peft_model(base, config, autocast_adapter_dtype=False)


def shard(model: Any, wrapping: str) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True),
    }
    language = model.get_base_model().model.language_model
    for index, layer in enumerate(language.layers):
        if wrapping == "checkpoint-wrapper":  # what `accelerate launch` does for fsdp_activation_checkpointing
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

            layer = language.layers[index] = checkpoint_wrapper(layer)
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def step(model: Any) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    batch = tiny.inputs(text_only=True)
    output = model.train()(**batch, labels=batch["input_ids"], use_cache=False)
    output.loss.backward()
    found = {"logits": output.logits.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            found[name.replace("_checkpoint_wrapped_module.", "")] = gradient
    return found


def main(checkpoint: str, output: str, *cases: str) -> None:
    import torch

    rank, distributed = os.environ.get("RANK", "0"), "RANK" in os.environ
    if distributed:
        torch.distributed.init_process_group("gloo")
    for name in cases:
        case, wrapping = name.split(",")
        model = build(Path(checkpoint), case)
        if wrapping == "transformers-checkpointing":
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.save(step(shard(model, wrapping) if distributed else model), f"{output}.{name}.{rank}")
    if distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
