"""What runs in the child processes of the tests on two GPUs; each leaves ``OUTPUT.RANK`` for ``torch.load``:

    python -m tests.gpu.two_gpus split FOLDER OUTPUT    a model on two devices and the host, against one device
    python -m tests.gpu.two_gpus one FOLDER OUTPUT      the trainings, on one device
    accelerate launch ... --module tests.gpu.two_gpus ddp FOLDER OUTPUT      the same in two processes; or fsdp2
    accelerate launch --num_processes 1 ... fsdp2 FOLDER OUTPUT      one device, in FSDP2's mixed precision

FOLDER is a workspace. Without a GPU (``ACCELERATE_USE_CPU=true``) trainings run on the CPU, and two devices are the
CPU and the disk. Every case is on its own: an error is a result, kept as is.
"""

from __future__ import annotations

import gemma4_compat  # isort: skip  (first, as a user would; GEMMA4_COMPAT_DISABLE=all gives the unpatched stack)

import functools
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma4_compat._reproduction import tiny, tiny_configs
from gemma4_compat._reproduction.workspace import Outputs, Workspace, difference

QUANTIZATIONS = (None, "4bit", "4bit-double")
TOWERS = ("model.vision_tower", "model.audio_tower")
#: Two layers that read the keys and values of others, and one whose input and output cross.
ON_SECOND = (1, 4, 5)

#: How a base model comes to two devices, and what is loaded onto it.
SPLITS = {
    "base": "from_pretrained with the map",
    "dispatched": "dispatch_model with the map and nothing else",
    "adapter": "the map, and PeftModel.from_pretrained",
    "adapter device_map": "the map, and given to PeftModel.from_pretrained, too",
    "adapter GPUs only": "the map with the towers on the first GPU, and PeftModel.from_pretrained",
    "adapter auto": 'device_map="auto", and PeftModel.from_pretrained',
}

STEPS, BATCH, RATE = 2, 4, 1e-3
#: For each launch: its cases, each the mixed precision and whether layers are checkpointed.
TRAININGS: dict[str, dict[str, tuple[str, bool]]] = {
    "ddp": {"no": ("no", False), "no, checkpointing": ("no", True)},
    "fsdp2": {"no": ("no", False), "bf16": ("bf16", False), "bf16, checkpointing": ("bf16", True)},
}
#: How one device computes a batch: all of it; two halves, one after the other; the same again; the same, and their
#: gradients added up in bf16, as ranks do in that precision; all of it in float32. And what a rank computes that never
#: hears of the other.
WAYS = {
    "no": ("whole", "halves", "again", "alone"),
    "bf16": ("whole", "halves", "again", "rounded", "float32", "alone"),
}
#: In bf16 the gradients of the tiny checkpoint are noise, farther from those in float32 than those of half of a batch.
#: With flat attention and small residual branches they are near; the test asks for a tenth of that distance or less.
CALM = 0.1


def attempt(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        found = {"error": None, **function(*args)}
    except Exception as error:  # noqa: BLE001  (the user's crash is the result)
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    found["seconds"] = round(time.perf_counter() - started, 2)
    gc.collect()
    return found


# ------------------------------------------------------------------------------------------------------ on two devices


def devices() -> tuple[Any, Any, Any]:
    """The first and the second device, and the host."""
    import torch

    return (0, 1, "cpu") if torch.cuda.device_count() > 1 else ("cpu", "disk", "disk")


def load(workspace: Workspace, quantization: str | None, **kwargs: Any) -> Any:
    """The towers stay in bf16 everywhere, as entries on the host do."""
    return tiny.load(workspace.checkpoint, quantization, skip_modules=list(TOWERS), **kwargs)


@functools.cache
def whole(workspace: Workspace, quantization: str | None, adapted: bool) -> Outputs:
    from peft import PeftModel

    model = load(workspace, quantization, device=devices()[0])
    if adapted:
        model = PeftModel.from_pretrained(model, workspace.adapter("all"))
    return workspace.outputs(model)


@functools.cache
def placement(workspace: Workspace, towers: str) -> dict[str, Any]:
    first, second, host = devices()
    model = load(workspace, None, device=first)
    found = tiny.device_map(model, "towers", main=first, offloaded=host if towers == "host" else first)
    return found | {f"model.language_model.layers.{index}": second for index in ON_SECOND}


def places(model: Any) -> dict[str, Any]:
    """On what the weights of each layer and tower are (meta: on the host), and those of their adapters."""
    base = (model.get_base_model() if hasattr(model, "get_base_model") else model).model
    found = {}
    for name, modules in (
        ("layers", base.language_model.layers),
        ("towers", (base.vision_tower, base.audio_tower)),
    ):
        for kind, adapters in ((name, False), (f"{name}' adapters", True)):
            found[kind] = [
                "+".join(
                    sorted({str(w.device) for key, w in module.named_parameters() if ("lora_" in key) == adapters})
                )
                for module in modules
            ]
    return found


def base_places(model: Any) -> dict[str, str]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {
        name.replace(".base_layer", ""): str(weight.device)
        for name, weight in base.named_parameters()
        if "lora_" not in name
    }


def split_case(workspace: Workspace, quantization: str | None, case: str) -> dict[str, Any]:
    from accelerate import dispatch_model
    from peft import PeftModel

    disk = tempfile.mkdtemp(prefix="offload-", dir=workspace.folder) if devices()[2] == "disk" else None
    asked: Any = placement(workspace, "first" if case == "adapter GPUs only" else "host")
    if case == "dispatched":
        model = load(workspace, quantization, device=devices()[0])
        model = dispatch_model(model, asked, offload_dir=disk)
    elif case == "adapter auto":
        model = load(workspace, quantization, device_map="auto")
    else:
        model = load(workspace, quantization, device_map=asked, **({"offload_folder": disk} if disk else {}))
    given, before = dict(getattr(model, "hf_device_map", {})), base_places(model)
    if case not in ("base", "dispatched"):
        own = {f"base_model.model.{name}": device for name, device in asked.items()}
        extra = {"device_map": own} if case == "adapter device_map" else {}
        model = PeftModel.from_pretrained(model, workspace.adapter("all"), **extra)
    found: dict[str, Any] = {
        "map_entries": len(given),
        "on": places(model),
        "map_kept": dict(getattr(model, "hf_device_map", {})) == given,
        "moved": sum(before[name] != device for name, device in base_places(model).items()),
    }
    if case != "adapter auto":
        found["as_asked"] = given == asked
    return found | attempt(lambda: {"parity": parity(workspace, quantization, case, model)})


def parity(workspace: Workspace, quantization: str | None, case: str, model: Any) -> float:
    adapted = case not in ("base", "dispatched")
    return difference(whole(workspace, quantization, adapted), workspace.outputs(model))


def split(workspace: Workspace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for quantization in QUANTIZATIONS:
        name = quantization or "bf16"
        for adapted in (False, True):
            found[f"one device, {name}, {'adapter' if adapted else 'base'}"] = whole(workspace, quantization, adapted)
        for case in SPLITS:
            found[f"{name}, {case}"] = attempt(split_case, workspace, quantization, case)
    return found


# ------------------------------------------------------------------------------------------------------------ training


def examples() -> list[dict[str, Any]]:
    """Prompts of one length, each with an image and a sound, so that the mean of the ranks' losses is the batch's."""
    import torch

    generator = torch.Generator().manual_seed(3)
    first = {name: value[0] for name, value in tiny.inputs().items()}
    found = []
    for _ in range(STEPS * BATCH):
        ids = torch.randint(3, 240, first["input_ids"].shape, generator=generator)
        for token in (tiny_configs.IMAGE_TOKEN, tiny_configs.AUDIO_TOKEN):
            ids = torch.where(first["input_ids"] == token, token, ids)
        other = {
            "input_ids": ids,
            "labels": ids,
            "pixel_values": torch.rand(first["pixel_values"].shape, generator=generator),
            "input_features": torch.randn(first["input_features"].shape, generator=generator),
        }
        found.append(first | other)
    return found


def calm(workspace: Workspace) -> Path:
    """The checkpoint with :data:`CALM` times its norms of queries, keys and residual branches."""

    def build_calm(folder: Path) -> None:
        import torch
        from transformers import Gemma4ForConditionalGeneration

        model = Gemma4ForConditionalGeneration.from_pretrained(workspace.checkpoint, dtype=torch.bfloat16)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "q_norm" in name or "k_norm" in name or ("post_" in name and "norm" in name):
                    weight.mul_(CALM)
        model.save_pretrained(folder)

    return workspace.cached(build_calm)


def build(workspace: Workspace, launch: str, precision: str, device: Any, checkpointing: bool) -> Any:
    """A 4-bit base with double quantization, and a float32 adapter on everything, to be trained.

    For FSDP2 the base is stored in bf16, which is what it can shard.
    """
    import torch
    from peft import PeftModel, prepare_model_for_kbit_training
    from transformers import Gemma4ForConditionalGeneration

    quantization = tiny.quantization_config("4bit-double")
    if launch == "fsdp2":
        quantization.bnb_4bit_quant_storage = torch.bfloat16
    model = Gemma4ForConditionalGeneration.from_pretrained(
        calm(workspace) if precision == "bf16" else workspace.checkpoint,
        dtype=torch.bfloat16,
        device_map={"": device},
        quantization_config=quantization,
    )
    reentrant = {"use_reentrant": False}
    if launch == "ddp":
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=checkpointing, gradient_checkpointing_kwargs=reentrant
        )
    elif checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)
    return PeftModel.from_pretrained(model, workspace.adapter("all"), is_trainable=True).train()


def accelerator_for(precision: str) -> Any:
    """The second one in a process, too, for another precision; ranks that lost each other give up after a minute."""
    from datetime import timedelta

    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(
        mixed_precision=precision, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=60))]
    )


def train(workspace: Workspace, launch: str, case: str, way: str, save: Path | None = None) -> dict[str, Any]:
    """Losses and gradients of each step; an adapter that ``save`` got as a user saves it."""
    import torch
    from torch.utils.data import DataLoader

    precision, checkpointing = TRAININGS[launch][case]
    accelerator = accelerator_for("no" if way == "float32" else precision)
    device = "cpu" if accelerator.device.type == "cpu" else accelerator.local_process_index
    model = build(workspace, launch, precision, device, checkpointing)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=RATE)
    loader = DataLoader(examples(), batch_size=BATCH // accelerator.num_processes)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, gradients = [], []
    for batch in loader:
        shares = parts(batch, way)
        rounded: dict[Any, Any] = {}
        total = torch.zeros((), device=accelerator.device)
        for share in shares:
            loss = model(**share).loss / len(shares)
            accelerator.backward(loss)
            total += loss.detach()
            if way == "rounded":
                for weight in (weight for weight in model.parameters() if weight.grad is not None):
                    own = weight.grad.to(torch.bfloat16)
                    rounded[weight] = rounded[weight] + own if weight in rounded else own
                    weight.grad = None
        for weight, gradient in rounded.items():
            weight.grad = gradient.to(weight.dtype)
        losses.append(accelerator.gather(total).mean().item())
        gradients.append(gathered(model, "grad"))
        optimizer.step()
        optimizer.zero_grad()
    found = {
        "type": type(model).__name__,
        "processes": accelerator.num_processes,
        "buffers": [name for name, _ in accelerator.unwrap_model(model).named_buffers() if "inv_freq" in name],
        "device": str(accelerator.device),
        "trainable": sum(weight.requires_grad for weight in model.parameters()),
        "losses": losses,
        "gradients": gradients,
        "adapter": gathered(model),
    }
    if save is not None:
        found["saved"] = attempt(lambda: {"to": saved(accelerator, model, save)})
    accelerator.free_memory()
    return found


def parts(batch: dict[str, Any], way: str) -> list[dict[str, Any]]:
    if way in ("whole", "float32"):
        return [batch]
    half = BATCH // 2
    both = [{name: value[start : start + half] for name, value in batch.items()} for start in (0, half)]
    return both[:1] if way == "alone" else both


def gathered(model: Any, what: str | None = None) -> dict[str, Any]:
    """The adapter's weights, or their ``what``, whole, in float32 on the CPU."""
    found = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        value = getattr(weight, what) if what else weight.detach()
        if value is None:
            raise RuntimeError(f"{name} has no {what}")
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name.removeprefix("module.")] = value.float().cpu().clone()
    return found


def saved(accelerator: Any, model: Any, folder: Path) -> str:
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state)
    accelerator.wait_for_everyone()
    return str(folder)


def in_every_way(workspace: Workspace, launch: str, precision: str) -> dict[str, Any]:
    """A training in one process, in every way."""
    return {
        f"{launch}, {precision}, {way}": attempt(train, workspace, launch, precision, way) for way in WAYS[precision]
    }


def one(workspace: Workspace) -> dict[str, Any]:
    """The trainings in float32 adapters, on a plain model."""
    return {name: found for launch in TRAININGS for name, found in in_every_way(workspace, launch, "no").items()}


def launched(workspace: Workspace, launch: str, output: Path) -> dict[str, Any]:
    """One of two ranks; or the only one: FSDP2's mixed precision is not autocast's, so its oracle is FSDP2 itself."""
    if os.environ["WORLD_SIZE"] == "1":
        return in_every_way(workspace, launch, "bf16")
    return {
        case: attempt(train, workspace, launch, case, "whole", output.with_name(f"{output.name}-{case}"))
        for case in TRAININGS[launch]
    }


def main(argv: list[str]) -> int:
    import torch

    name, folder, output = argv[0], Path(argv[1]), Path(argv[2])
    workspace = Workspace(folder)
    found = launched(workspace, name, output) if name in TRAININGS else {"split": split, "one": one}[name](workspace)
    found["patches"] = {patch_id: str(status.state) for patch_id, status in gemma4_compat.status().items()}
    torch.save(found, output.with_name(f"{output.name}.{os.environ.get('RANK', '0')}"))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
