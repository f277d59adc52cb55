"""accelerate: prepare, save, load, dispatch and hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny_models
from tests.generated.search.differential.table import CLASSES, EVERYWHERE, LORA, WEIGHTS, Area, Expect
from tests.generated.search.differential.world import World

area = Area("accelerate")
USED = ("E2B", "E2B-lora", "E2B-4bit", "12B")


def _accelerator(**options: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, **options)


def _loader(world: World, batches: int = 2) -> Any:
    import torch

    rows = [{name: value[0] for name, value in world.inputs().items()} for _ in range(batches)]
    return torch.utils.data.DataLoader(rows, batch_size=1)


@area.call(
    variants={
        "": {},
        "evaluation": {"evaluation_mode": True},
        "loader": {"loader": True},
        "placed": {"device_placement": [False]},
        "eval": {"eval": True},
    },
    kinds=("E2B", "E2B-lora", "E2B-4bit", "E2B-8bit", "12B", "E2B-text"),
)
def prepare(world: World, loader: bool = False, eval: bool = False, **options: Any) -> Any:
    """``accelerator.prepare(model)`` for inference"""
    accelerator = _accelerator()
    model = world.model.eval() if eval else world.model
    if "evaluation_mode" in options:
        return world.logits(accelerator.prepare_model(model, evaluation_mode=True))
    if loader:
        model, batches = accelerator.prepare(model, _loader(world))
        return [world.logits(model), len(batches)]
    return world.logits(accelerator.prepare(model, **options))


@area.call(variants=["no", "bf16"], kinds=USED)
def prepare_mixed(world: World, precision: str) -> Any:
    """``Accelerator(mixed_precision=...)``, prepared for inference"""
    return world.logits(_accelerator(mixed_precision=precision).prepare_model(world.model, evaluation_mode=True))


def _trained(world: World, accelerator: Any, *, steps: int = 2, scheduler: bool = False) -> dict[str, Any]:
    import torch

    trainable = [parameter for parameter in world.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01)
    things = [world.model, optimizer, _loader(world, steps)]
    if scheduler:
        things.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 0.5))
    model, optimizer, loader, *rest = accelerator.prepare(*things)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch, labels=batch["input_ids"]).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            for item in rest:
                item.step()
            optimizer.zero_grad()
        losses.append(loss)
    return {"model": model, "losses": losses, "optimizer": optimizer}


@area.call(
    variants={
        "": {},
        "scheduler": {"scheduler": True},
        "accumulate": {"accumulate": 2},
        "bf16": {"precision": "bf16"},
    },
    kinds=("E2B", "E2B-lora", "E2B-4bit-lora", "12B-lora", "E2B-text-lora"),
)
def train(world: World, scheduler: bool = False, accumulate: int = 1, precision: str = "no") -> Any:
    """Prepare of model, optimizer and data; two steps"""
    from peft import PeftModel  # noqa: F401

    if world.adapter_kind:
        _trainable(world)
    accelerator = _accelerator(gradient_accumulation_steps=accumulate, mixed_precision=precision)
    found = _trained(world, accelerator, scheduler=scheduler)
    return [found["losses"], world.logits(found["model"].eval())]


def _trainable(world: World) -> None:
    for name, parameter in world.model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    world.model.train()


@area.call(
    variants={"safe": {"safe": True}, "pickle": {"safe": False}},
    kinds=("E2B", "E2B-lora", "E2B-4bit-lora"),
    places=EVERYWHERE,
)
def saved_state_inference(world: World, safe: bool) -> Any:
    """``save_state`` and ``load_state`` of a model prepared for evaluation"""
    accelerator = _accelerator()
    model = accelerator.prepare_model(world.model, evaluation_mode=True)
    before = world.logits(model)
    folder = world.new_folder()
    accelerator.save_state(folder, safe_serialization=safe)
    accelerator.load_state(folder)
    return Expect([world.logits(model), bool(list(Path(folder).iterdir()))], [before, True])


@area.call(variants={"safe": {"safe": True}, "pickle": {"safe": False}}, kinds=("E2B-lora", "E2B-4bit-lora", "E2B"))
def saved_state_training(world: World, safe: bool) -> Any:
    """Two steps, ``save_state``, other weights, ``load_state``: the losses, and the model answers as it did"""
    if world.adapter_kind:
        _trainable(world)
    accelerator = _accelerator()
    found = _trained(world, accelerator)
    folder = world.new_folder()
    accelerator.save_state(folder, safe_serialization=safe)
    before = world.logits(found["model"])
    import torch

    with torch.no_grad():
        for parameter in world.model.parameters():
            if parameter.requires_grad and parameter.device.type != "meta":
                parameter.mul_(1.1)
    accelerator.load_state(folder)
    after = world.logits(found["model"])
    return [found["losses"], after, torch.equal(after, before)]


@area.call(kinds=USED)
def get_state_dict(world: World) -> Any:
    """``accelerator.get_state_dict(model)``"""
    accelerator = _accelerator()
    return accelerator.get_state_dict(accelerator.prepare_model(world.model, evaluation_mode=True))


@area.call(
    variants={"": {}, "shards": {"max_shard_size": "100KB"}, "pickle": {"safe_serialization": False}},
    places=EVERYWHERE,
)
def save_model(world: World, **options: Any) -> Any:
    """``accelerator.save_model``: the files"""
    accelerator = _accelerator()
    folder = Path(world.new_folder())
    accelerator.save_model(accelerator.prepare_model(world.model, evaluation_mode=True), folder, **options)
    return _files(folder)


def _files(folder: Path) -> Any:
    import torch
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            found |= load_file(path)
        elif path.suffix == ".bin":
            found |= torch.load(path, weights_only=True)
    return found


@area.call(kinds=USED)
def unwrap(world: World) -> Any:
    """``accelerator.unwrap_model(accelerator.prepare_model(model))``"""
    accelerator = _accelerator()
    return world.logits(accelerator.unwrap_model(accelerator.prepare_model(world.model, evaluation_mode=True)))


@area.call(kinds=USED)
def free_memory(world: World) -> Any:
    """``accelerator.free_memory``"""
    accelerator = _accelerator()
    model = accelerator.prepare_model(world.model, evaluation_mode=True)
    accelerator.free_memory()
    return world.logits(model)


@area.call(kinds=("E2B", "E2B-4bit", "12B", "E2B-text"), places=EVERYWHERE)
def hooks_removed(world: World) -> Any:
    """``remove_hook_from_module(recurse=True)``: where weights are, and the answer"""
    from accelerate.hooks import remove_hook_from_module

    model = remove_hook_from_module(world.model, recurse=True)
    return [sorted({str(parameter.device) for parameter in model.parameters()}), world.logits(model)]


@area.call(variants=["ram", "disk", "embeddings", "one"], kinds=("E2B", "12B"))
def dispatched_again(world: World, to: str) -> Any:
    """Another ``dispatch_model`` of a model without its hooks"""
    from accelerate.hooks import remove_hook_from_module

    model = remove_hook_from_module(world.model, recurse=True)
    return world.logits(world.dispatch(model, to))


@area.call(variants=["ram", "disk"], kinds=("E2B",))
def dispatched_twice(world: World, to: str) -> Any:
    """``dispatch_model`` of a model that has hooks"""
    return world.logits(world.dispatch(world.model, to))


@area.call(
    variants=["cpu_offload", "disk_offload", "cpu_offload_with_hook"], kinds=(*CLASSES, "E2B-4bit"), places=("one",)
)
def big_modeling(world: World, how: str) -> Any:
    """``accelerate.cpu_offload`` and its siblings"""
    import accelerate
    import torch

    model = world.model
    if how == "disk_offload":
        model = accelerate.disk_offload(model, world.new_folder(), execution_device=torch.device("cpu"))
    elif how == "cpu_offload":
        model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        model, hook = accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))
        shown = world.logits(model)
        hook.offload()
        return [shown, world.logits(model)]
    return world.logits(model)


@area.call(
    variants={"buffers": {"offload_buffers": True}, "preload": {"preload_module_classes": ["Gemma4TextMLP"]}},
    kinds=("E2B", "12B"),
)
def dispatch_options(world: World, **options: Any) -> Any:
    """Options of ``dispatch_model``, then ``save_pretrained``"""
    model = world.dispatch(world.fresh(), **options)
    shown = world.logits(model)
    folder = world.new_folder()
    model.save_pretrained(folder)
    return [shown, world.logits(world.cls.from_pretrained(folder, dtype="auto").eval())]


@area.call(kinds=("E2B",), places=("one", "disk"))
def load_checkpoint_and_dispatch(world: World) -> Any:
    """``init_empty_weights``, ``load_checkpoint_and_dispatch``"""
    import torch
    from accelerate import load_checkpoint_and_dispatch

    model = tiny_models.empty_model(world.checkpoint, torch.bfloat16)
    plain = world.fresh()
    right = world.logits(plain)
    model = load_checkpoint_and_dispatch(
        model,
        str(world.checkpoint / "model.safetensors"),
        device_map={name: str(place) for name, place in world.map(plain).items()},
        offload_folder=world.new_folder(),
        dtype=torch.bfloat16,
        skip_keys=list(plain._skip_keys_device_placement),
    )
    return Expect(world.logits(model.eval()), right)


@area.call(kinds=("E2B", "12B"), places=("one",))
def automatic_map(world: World) -> Any:
    """``infer_auto_device_map``, ``get_balanced_memory``, sizes of modules"""
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes, find_tied_parameters

    placement = infer_auto_device_map(world.model, {"cpu": "100MB"})
    return [placement, compute_module_sizes(world.model)[""], find_tied_parameters(world.model)]


@area.call(kinds=WEIGHTS)
def align_device(world: World) -> Any:
    """``align_module_device``, ``has_offloaded_params``"""
    from accelerate.utils import align_module_device, has_offloaded_params

    module = world.text.layers[2].mlp.up_proj
    offloaded = has_offloaded_params(module)
    with align_module_device(module):
        inside = module.weight.detach().clone()
    return Expect([offloaded, inside], [world.place in ("ram", "disk"), inside])


@area.call(kinds=("E2B", "E2B-lora"))
def extracted(world: World) -> Any:
    """``extract_model_from_parallel``"""
    from accelerate.utils import extract_model_from_parallel

    return world.logits(extract_model_from_parallel(world.model))


@area.call(kinds=LORA)
def prepared_twice(world: World) -> Any:
    """``prepare_model`` of a model that is prepared"""
    accelerator = _accelerator()
    first = accelerator.prepare_model(world.model, evaluation_mode=True)
    return world.logits(accelerator.prepare_model(first, evaluation_mode=True))
