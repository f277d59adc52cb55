"""The trainings of the tests on two GPUs, in several processes and in every way that one process has."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny, tiny_configs
from gemma4_compat._lab.workspace import Workspace

STEPS, BATCH, RATE = 2, 4, 1e-3
#: For each launch: its cases, each the mixed precision and whether layers are checkpointed.
TRAININGS: dict[str, dict[str, tuple[str, bool]]] = {
    "ddp": {"no": ("no", False), "no, checkpointing": ("no", True)},
    "fsdp2": {"no": ("no", False), "bf16": ("bf16", False), "bf16, checkpointing": ("bf16", True)},
}
#: A wrong training, for the test of the test: the loss of one of two ranks counts for nothing.
SILENT = "bf16, one rank silent"
#: How one device computes a batch: all of it; two halves, one after the other; the same again; the same, and their
#: gradients added up in bf16, as ranks do in that precision; all of it by other kernels, as it were (:class:`Shaken`);
#: with eager attention; all of it, and everything in float32, the base included. And what a rank computes that never
#: hears of the other.
WAYS = {
    "no": ("whole", "halves", "again", "alone"),
    "bf16": ("whole", "halves", "rounded", "shaken 1", "shaken 2", "shaken 3", "eager", "truth", "alone"),
}
#: In bf16 the gradients of the tiny checkpoint are noise: 144 % from those in float32, while those of half of a batch
#: are 95 % from them, and eager attention changes them by 100 %. With flat attention and small residual branches it is
#: 3.3 % against 87 %, and 1.6 % for eager attention (on a CPU).
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


def examples() -> list[dict[str, Any]]:
    """Prompts of one length, each with an image and a sound, so that the mean of the ranks' losses is the batch's.

    Of the seeds from 3 to 22 this one has the least noise in bf16: 3.2 and 3.5 % of the gradients of its two batches.
    Others have batches with 14 %: one prompt in eight has gradients that rounding moves by 20 %.
    """
    import torch

    generator = torch.Generator().manual_seed(6)
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


def shard_on_the_cpu() -> None:
    """Have accelerate shard on the CPU, where it is told to use that and FSDP, as it does on GPUs.

    By itself it takes DDP there and says nothing.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, parse_flag_from_env

    if parse_flag_from_env("ACCELERATE_USE_CPU") and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        state = PartialState(cpu=True)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU


def accelerator_for(precision: str) -> Any:
    """The second one in a process, too, for another precision; ranks that lost each other give up after a minute."""
    from datetime import timedelta

    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    shard_on_the_cpu()
    return Accelerator(
        mixed_precision=precision, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=60))]
    )


class Calls:
    """What each innermost module got and gave in the forwards of a model, for ``nearness.first_difference``."""

    def __init__(self, model: Any) -> None:
        self.model = model
        #: A list for each forward of the whole model.
        self.forwards: list[list[dict[str, Any]]] = []
        self.hooks: list[Any] = []

    def __enter__(self) -> Calls:
        self.hooks.append(self.model.register_forward_pre_hook(lambda *_: self.forwards.append([])))
        for name, module in self.model.named_modules():
            if not list(module.children()):
                self.hooks.append(module.register_forward_hook(functools.partial(self._note, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _note(self, name: str, module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        import torch

        tensor = output[0] if isinstance(output, tuple) else output
        if not torch.is_tensor(tensor):
            return
        weights = [getattr(weight, "_local_tensor", weight) for weight in module.parameters(recurse=False)]
        given = [argument for argument in arguments if torch.is_tensor(argument)]
        call = {
            "module": name,
            "type": type(module).__name__,
            "input": [digest(argument) for argument in given],
            "weights": [digest(weight) for weight in weights],
            "addresses": [value.data_ptr() % 256 for value in (*given, *weights)],
            "output": tensor.detach().cpu().clone(),
        }
        self.forwards[-1].append(call)


class Shaken:
    """What each innermost module gives is half a unit in bf16's last place more or less, or as it is, at random."""

    def __init__(self, model: Any, seed: int) -> None:
        import torch

        self.generator = torch.Generator().manual_seed(seed)
        inner = [module for module in model.modules() if not list(module.children())]
        self.hooks = [module.register_forward_hook(self._shake) for module in inner]

    def __enter__(self) -> Shaken:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _shake(self, _module: Any, _arguments: Any, output: Any) -> Any:
        import torch

        if not torch.is_tensor(output) or not output.is_floating_point():
            return None
        sign = torch.randint(-1, 2, output.shape, generator=self.generator).to(output.device)
        return (output.float() * (1 + sign * 2.0**-8)).to(output.dtype)


def watcher(model: Any, case: str, way: str, step: int) -> Any:
    """What is to go on in a forward, beside it; it has ``forwards`` if it is :class:`Calls`."""
    if way.startswith("shaken"):
        return Shaken(model, 100 * int(way.split()[1]) + step)
    if case == "bf16" and way in ("halves", "whole") and not step:
        return Calls(model)
    return contextlib.nullcontext()


def digest(value: Any) -> str:
    """Type, shape and bits of a tensor."""
    import torch

    flat = value.detach().cpu().clone().reshape(-1)  # a storage that numpy saw cannot be resized, as FSDP2 does
    bits = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(bits).hexdigest()}"


def in_float32(model: Any) -> Any:
    """The model with everything in float32, a 4-bit weight as the bf16 values that it stands for."""
    import torch
    from bitsandbytes import functional, nn

    torch.backends.cudnn.allow_tf32 = False
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear4bit:
                continue
            values = functional.dequantize_4bit(child.weight.data, child.weight.quant_state)
            plain = torch.nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
            plain.weight = torch.nn.Parameter(values.to(torch.bfloat16), requires_grad=False)
            plain.bias = child.bias
            setattr(parent, name, plain)
    return model.float()


class Plain:
    """What :func:`train` needs of an accelerator, for a model that nobody wraps."""

    num_processes, process_index = 1, 0

    def __init__(self, device: Any) -> None:
        self.device = device

    def prepare(self, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
        batches = ({name: value.to(self.device) for name, value in batch.items()} for batch in loader)
        return model, optimizer, batches

    def backward(self, loss: Any) -> None:
        loss.backward()

    def gather(self, value: Any) -> Any:
        return value

    def unwrap_model(self, model: Any) -> Any:
        return model

    def free_memory(self) -> None:
        """Nothing is kept."""


def train(workspace: Workspace, launch: str, case: str, way: str, save: Path | None = None) -> dict[str, Any]:
    """Losses and gradients of each step; an adapter that ``save`` got as a user saves it."""
    import torch
    from torch.utils.data import DataLoader

    precision, checkpointing = ("bf16", False) if case == SILENT else TRAININGS[launch][case]
    accelerator = accelerator_for("no" if way == "truth" else precision)
    device = "cpu" if accelerator.device.type == "cpu" else accelerator.local_process_index
    model = build(workspace, launch, precision, device, checkpointing)
    if way == "eager":
        model.get_base_model().set_attn_implementation("eager")
    if way == "truth":
        model, accelerator = in_float32(model), Plain(accelerator.device)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=RATE)
    loader = DataLoader(examples(), batch_size=BATCH // accelerator.num_processes)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, gradients, forwards = [], [], []
    for batch in loader:
        shares = parts(batch, way)
        rounded: dict[Any, Any] = {}
        total = torch.zeros((), device=accelerator.device)
        for share in shares:
            with watcher(model, case, way, len(losses)) as watching:
                loss = model(**share).loss / len(shares)
            forwards += getattr(watching, "forwards", [])
            if case == SILENT and accelerator.process_index:
                loss = 0 * loss
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
        "forwards": forwards,
    }
    if save is not None:
        found["saved"] = attempt(lambda: {"to": saved(accelerator, model, save)})
    accelerator.free_memory()
    return found


def parts(batch: dict[str, Any], way: str) -> list[dict[str, Any]]:
    if way in ("whole", "eager", "truth") or way.startswith("shaken"):
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


def in_every_way(workspace: Workspace, launch: str, precision: str, *chosen: str) -> dict[str, Any]:
    """A training in one process, in every way, or in those that are chosen."""
    return {
        f"{launch}, {precision}, {way}": attempt(train, workspace, launch, precision, way)
        for way in chosen or WAYS[precision]
    }


def one(workspace: Workspace) -> dict[str, Any]:
    """The trainings in float32 adapters, on a plain model."""
    return {name: found for launch in TRAININGS for name, found in in_every_way(workspace, launch, "no").items()}


def launched(workspace: Workspace, launch: str, output: Path, *chosen: str) -> dict[str, Any]:
    """One of two ranks; or the only one: FSDP2's mixed precision is not autocast's, so its oracle is FSDP2 itself."""
    if os.environ["WORLD_SIZE"] == "1":
        return in_every_way(workspace, launch, "bf16", *chosen)
    return {
        case: attempt(train, workspace, launch, case, "whole", output.with_name(f"{output.name}-{case}"))
        for case in chosen or TRAININGS[launch]
    }
