"""Adapters in towers that get no input are reported before DistributedDataParallel waits for them.

Symptom: ``RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one`` in the
second step of a training under DDP on text batches, with LoRA by plain names such as ``q_proj``. The error only lists
numbers of parameters.

Cause: These names also reach the vision and audio towers. On text their adapters get no gradient, but DDP waits for
one unless it is told to look for unused parameters.

Fix: In the first such forward one warning names the towers, ``find_unused_parameters``, and a pattern that targets
only the language model. The error itself stays, because a step that feeds images and audio in another forward is
right.

Remove when: PEFT keeps plain names out of towers, or DDP says which modules it waits for.
"""

from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F99", kind="notice", severity="crash", affected=">=5.5.0")

#: A tower, the module that joins it to the language model, and the inputs that feed it.
_TOWERS = (
    ("vision_tower", "embed_vision", ("pixel_values", "pixel_values_videos")),
    ("audio_tower", "embed_audio", ("input_features",)),
)
_WARNED = attached.UNFED_TOWERS_WARNED


@PATCH.replaces(MODELING_GEMMA4, "Gemma4Model.forward")
def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.training and not args:
        _look(self, kwargs)
    return original(self, *args, **kwargs)


def _look(model: Any, given: dict[str, Any]) -> None:
    import torch

    ranks = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if ranks is None or not torch.is_grad_enabled() or _WARNED in vars(ranks):
        return
    if ranks.find_unused_parameters or ranks.static_graph or not ranks.require_backward_grad_sync:
        return
    unfed = {
        name: count
        for *names, inputs in _TOWERS
        if all(given.get(key) is None for key in inputs)
        for name in names
        if (count := _trained(getattr(model, name, None)))
    }
    if not unfed:
        return
    setattr(ranks, _WARNED, True)
    notice.warn_user(
        f"this batch does not feed {' and '.join(unfed)}, so {sum(unfed.values())} trained weights there get no "
        "gradient, and DistributedDataParallel waits for them: the next forward ends in 'Expected to have finished "
        "reduction'. Train the language model only, with a pattern such as "
        r"target_modules=r'.*language_model.*\.(q_proj|v_proj)', or give find_unused_parameters=True to "
        "DistributedDataParallel (accelerate: DistributedDataParallelKwargs; Trainer: ddp_find_unused_parameters)."
    )


def _trained(module: Any) -> int:
    return 0 if module is None else sum(weight.requires_grad for weight in module.parameters())


def reproduce(workspace: Workspace) -> Outcome:
    import warnings

    import torch
    from peft import LoraConfig, get_peft_model

    workspace.needs("vision_tower")
    if not torch.distributed.is_available() or torch.distributed.is_initialized():
        return Outcome(False, "no process group can be made here", applicable=False)
    model = get_peft_model(workspace.load().float(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()
    batch = workspace.inputs(text_only=True)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ranks = torch.nn.parallel.DistributedDataParallel(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                ranks(**batch, labels=batch["input_ids"]).loss.backward()
    except RuntimeError as error:
        if not str(error).startswith("Expected to have finished reduction"):
            raise
        said = [str(one.message) for one in caught if "target_modules" in str(one.message)]
        return Outcome(not said, said[0] if said else Outcome.of_error(error).detail)
    finally:
        torch.distributed.destroy_process_group()
    return Outcome(False, "DDP does not wait for the towers")
