"""What runs in the child processes of the tests on two GPUs; each leaves ``OUTPUT.RANK`` for ``torch.load``:

    python -m tests.world.gpu.two_gpus split FOLDER OUTPUT    a model on two devices and the host, against one device
    python -m tests.world.gpu.two_gpus one FOLDER OUTPUT      the trainings, on one device
    accelerate launch ... --module tests.world.gpu.two_gpus ddp FOLDER OUTPUT      the same in two processes; or fsdp2
    accelerate launch --num_processes 1 ... fsdp2 FOLDER OUTPUT      one device, in FSDP2's mixed precision

CASE... after OUTPUT: these trainings (of one process: these ways) instead of all. FOLDER is a workspace. Without a GPU
(``ACCELERATE_USE_CPU=true``) trainings run on the CPU, and two devices are the CPU and the disk. There accelerate
shards nothing and uses DDP in autocast, whatever it was configured for: see ``trainings.shard_on_the_cpu``. Every case
is on its own: an error is a result, kept as is.
"""

from __future__ import annotations

import gemma4_compat  # isort: skip  (first, as a user would; GEMMA4_COMPAT_DISABLE=all gives the unpatched stack)

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import Outputs, Workspace, difference
from tests.world.gpu.trainings import TRAININGS, attempt, launched, one

QUANTIZATIONS = (None, "4bit", "4bit-double")
TOWERS = ("model.vision_tower", "model.audio_tower")
#: Two layers that read the keys and values of others, and one whose input and output cross.
ON_SECOND = (1, 4, 5)

#: How a base model comes to two devices, and what is loaded onto it.
SPLITS = {
    "base": "from_pretrained with the map",
    "dispatched": "dispatch_model with the map and nothing else",
    "adapter": "the map, and PeftModel.from_pretrained",
    "adapter device_map": "the map, also given to PeftModel.from_pretrained",
    "adapter GPUs only": "the map with the towers on the first GPU, and PeftModel.from_pretrained",
    "adapter auto": 'device_map="auto", and PeftModel.from_pretrained',
}


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


def main(argv: list[str]) -> int:
    import torch

    name, folder, output = argv[0], Path(argv[1]), Path(argv[2])
    workspace = Workspace(folder)
    if name in TRAININGS:
        found = launched(workspace, name, output, *argv[3:])
    else:
        found = {"split": split, "one": one}[name](workspace)
    found["patches"] = {patch_id: str(status.state) for patch_id, status in gemma4_compat.status().items()}
    torch.save(found, output.with_name(f"{output.name}.{os.environ.get('RANK', '0')}"))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
