"""``DistributedDataParallel`` takes a model whose frozen weights are offloaded.

Symptom: ``ValueError: DistributedDataParallel's input module must be on the same type of devices, but input module
parameters locate in {'meta', 'cpu'}`` for a split model whose offloaded weights are frozen.

Cause: accelerate leaves an offloaded weight on meta between two calls of its module. DDP wants all weights on one type
of device and sends them from the first rank to the others, frozen ones as well.

Fix: While it wraps the module, DDP is told to ignore frozen offloaded weights, and offloaded buffers, in torch's own
way (``_ddp_params_and_buffers_to_ignore``). Each rank has read them from the checkpoint. All that is trained is
exchanged as before. An offloaded weight to be trained is one error, also the ``ValueError`` that torch raises.

Remove when: accelerate tells DDP what it has offloaded.
"""

from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat.patches.api import FORWARDS, Original, Outcome, Patch, Workspace

PATCH = Patch("F34", severity="crash", affected=">=1.12", acts_on="every model")

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # names relative to the module that DDP wraps


class _TrainedError(Gemma4CompatError, ValueError):
    """An offloaded weight is to be trained: in torch a ``ValueError``."""


@PATCH.replaces(
    "torch.nn.parallel.distributed",
    "DistributedDataParallel.__init__",
    codes={
        "c2959b67ae55": "torch 2.15",
        "abd5b59bbd28": "torch 2.13 to 2.14",
        "4ea651de3b75": "torch 2.12",
        "800daaa48ef7": "torch 2.11",
        "97fdf7dd8138": "torch 2.10",
        "2fbd02519363": "torch 2.8 to 2.9",
        "4b3b017cc02f": "torch 2.7",
        "66b1c9d14f61": "torch 2.5 to 2.6",
        "04e7c5112f2c": "torch 2.4",
    },
)
def wrap(original: Original, self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    theirs = set(getattr(module, _IGNORED, ()))
    offloaded = {name: value for name, value in _offloaded(module).items() if name not in theirs}
    if not offloaded:
        return original(self, module, *args, **kwargs)
    trained = [name for name, value in offloaded.items() if value.requires_grad]
    if trained:
        raise _TrainedError(
            f"{len(trained)} weights are to be trained and are offloaded, {trained[0]!r} among them: they get no "
            "gradient, and DistributedDataParallel cannot wait for one. Freeze them (model.requires_grad_(False)) and "
            "train an adapter (get_peft_model), or load the model with a device_map that keeps their modules on the "
            "accelerator."
        )
    own = vars(module)
    before = {_IGNORED: own[_IGNORED]} if _IGNORED in own else {}
    own[_IGNORED] = [*theirs, *offloaded]
    try:
        return original(self, module, *args, **kwargs)
    finally:
        own.pop(_IGNORED)
        own.update(before)


def _offloaded(model: Any) -> dict[str, Any]:
    """Parameters and buffers on meta that accelerate's hooks bring in, by name."""
    return {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, module in model.named_modules()
        if module_hooks.offload_hook(module) is not None
        for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if value.device.type == "meta"
    }


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    if not torch.distributed.is_available() or torch.distributed.is_initialized():
        return Outcome(False, "no process group can be made here", applicable=False)
    base, split = workspace.load(), workspace.split()
    chosen = [
        name
        for name, weight in split.named_parameters()
        if "language_model.layers" in name and name.endswith("input_layernorm.weight") and not weight.is_meta
    ]

    def steps(model: Any, *, ranks: bool) -> list[Any]:
        model.requires_grad_(False)
        trained = [model.get_parameter(name).requires_grad_(True) for name in chosen]
        called = torch.nn.parallel.DistributedDataParallel(model) if ranks else model
        batch = workspace.inputs(text_only=True)
        found = []
        for _ in range(FORWARDS):
            loss = called(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            found += [loss.detach(), *(weight.grad.clone() for weight in trained)]
        return found

    right = steps(base, ranks=False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        found = steps(split, ranks=True)
    finally:
        torch.distributed.destroy_process_group()
    worst = max((a.float() - b.float()).abs().max().item() for a, b in zip(right, found, strict=True))
    return Outcome(worst > 0, f"losses and gradients of {FORWARDS} steps differ by {worst:.3g}", worst)
