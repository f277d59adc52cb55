"""What runs in each process of ``test_sharded_head``: this module, CHECKPOINT OUTPUT CASE...

Of each case, ``WAY/KIND/PRECISION``, ``OUTPUT.RANK`` has how far the gradients of a loss in chunks are from those of
the plain loss in float32, unsharded, averaged over the ranks' batches: of the norm of all of them, and of the head's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny, tiny_configs
from tests.patches.training.parts import only

#: How many tokens of the batch of each rank have a label; -1: all.
LABELS = {"as many": (-1, -1), "fewer": (-1, 4), "none": (-1, 0), "none of both": (0, 0)}


def build(checkpoint: Path, kind: str) -> Any:
    """In float32, with a head that is not tied to the embedding."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = tiny.load(checkpoint).float()
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.01)
    torch.manual_seed(5)
    layers = r".*language_model.*up_proj"
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=f"{layers}|lm_head"))
    elif kind == "saved":
        model = get_peft_model(
            model, LoraConfig(r=4, init_lora_weights=False, target_modules=layers, modules_to_save=["lm_head"])
        )
    return model.train()


def inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def weighted(head: Any) -> list[Any]:
    """The modules of a head that have weights."""
    return [module for module in head.modules() if list(module.parameters(recurse=False))]


def fsdp2(model: Any, dtype: Any, *, grouped: bool = False) -> Any:
    """The head is a unit of its own, or one with the last norm as accelerate's is from 1.15 on."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, output_dtype=dtype)}
    decoder = inner(model).get_decoder()
    for layer in decoder.layers:
        fully_shard(layer, **options)
    if grouped:
        fully_shard([decoder.norm, inner(model).lm_head], reshard_after_forward=False, **options)
    else:
        for module in weighted(inner(model).lm_head):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def fsdp1(model: Any, dtype: Any) -> Any:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    heads = weighted(inner(model).lm_head)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in heads,
        mixed_precision=MixedPrecision(param_dtype=dtype, cast_forward_inputs=True),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


WAYS: dict[str, Callable[..., Any]] = {
    "fsdp2": fsdp2,
    "fsdp2, grouped": functools.partial(fsdp2, grouped=True),
    "fsdp1": fsdp1,
}


def gradients(model: Any) -> dict[str, Any]:
    """The whole gradients of what is trained; zeros where a weight has none."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    parts = isinstance(model, FullyShardedDataParallel)
    found = {}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True) if parts else contextlib.nullcontext():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                found[name.replace("_fsdp_wrapped_module.", "")] = gradient.detach().float().clone()
    return found


def step(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    model.zero_grad()
    outputs = model(**given, use_cache=False)
    outputs.loss.backward()
    return {**gradients(model), "chunked": outputs.logits is None}


def batch(labelled: int) -> dict[str, Any]:
    given = tiny.inputs("cpu", text_only=True)
    labels = given["input_ids"].clone()
    if labelled >= 0:
        labels[:, labelled + 1 :] = -100
        labels[:, :1] = -100
    return {**given, "labels": labels}


def off(right: dict[str, Any], found: dict[str, Any], part: str = "") -> float:
    names = [name for name in right if part in name]
    norm = sum(float(right[name].norm()) ** 2 for name in names) ** 0.5
    away = sum(float((right[name] - found[name]).norm()) ** 2 for name in names) ** 0.5
    return away / norm if norm else away


def measured(checkpoint: Path, way: str, kind: str, precision: str, rank: int) -> dict[str, Any]:
    import torch

    plain = build(checkpoint, kind)
    sharded = WAYS[way](only(build(checkpoint, kind), loss=True), getattr(torch, precision))
    found = {}
    for name, labels in LABELS.items():
        parts = [step(plain, batch(count)) for count in labels]
        assert not any(part.pop("chunked") for part in parts)
        right = {weight: sum(part[weight] for part in parts) / len(parts) for weight in parts[0]}
        own = step(sharded, batch(labels[rank]))
        assert own.pop("chunked")
        assert own.keys() == right.keys()
        found[name] = {"all": off(right, own), "head": off(right, own, "lm_head")}
    return found


def main(checkpoint: str, output: str, *cases: str) -> None:
    import torch

    from gemma4_compat._training import chunks

    chunks.LOGITS_BYTES = tiny_configs.VOCABULARY * 4 * 5  # a few tokens
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    found = {}
    for case in cases:
        way, kind, precision = case.split("/")
        found[case] = measured(Path(checkpoint), way, kind, precision, rank)
    Path(f"{output}.{rank}").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main(*sys.argv[1:])
