"""An adapter can be trained on a quantized model with offloaded layers.

Symptom: ``ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk
offload`` from ``Trainer.train`` (of any trainer, through ``Accelerator.prepare``) for a quantized model with an
offloaded layer, and from the trainer's ``evaluate``.

Cause: ``Accelerator.prepare_model`` looks at ``hf_device_map`` and assumes that a model in training must fit on the
device. A frozen base does not have to: each layer's weights are onloaded for its backward pass as for its forward,
and the trained part (the adapter) is where its layer computes.

Fix: A Gemma 4 model whose offloaded weights are all frozen is prepared as if the map named only what is on the
training device; nothing is moved. accelerate's other refusals (distributed training, another device than the one
that trains) remain.

Offloaded weights that would be trained raise one error before the first step, with or without quantization. Their
gradients belong to a copy that is gone after the layer's backward pass, so the weights would silently never change.

Remove when: accelerate prepares a quantized model with frozen offloaded layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import FORWARDS, Outcome, Patch, Severity, Target
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import family, placement

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def prepare_model(
    original: Callable[..., Any],
    self: Any,
    model: Any,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:
    owner = placement.map_owner(model)
    if owner is None or not family.is_gemma4(model):
        return original(self, model, device_placement, evaluation_mode)
    if not evaluation_mode:
        _refuse_trained_and_offloaded(model)
    with _without_offloaded_entries(owner, self):
        return original(self, model, device_placement, evaluation_mode)


def _refuse_trained_and_offloaded(model: Any) -> None:
    names = [
        name for name, weight in model.named_parameters() if weight.requires_grad and weight.device.type == "meta"
    ]
    if names:
        raise Gemma4CompatError(
            f"{len(names)} weights are to be trained and are offloaded, {names[0]!r} among them: they would never "
            "change. Freeze them (model.requires_grad_(False)) and train an adapter (get_peft_model), or load the "
            "model with a device_map that keeps their modules on the accelerator. Nothing was moved."
        )


@contextlib.contextmanager
def _without_offloaded_entries(owner: Any, accelerator: Any) -> Iterator[None]:
    """Inside, the model's map names only what is on a device; not where it is distributed, or where nothing is."""
    whole = owner.hf_device_map
    offloaded = {"disk"} if accelerator.device.type == "cpu" else {"disk", "cpu"}
    resident = {name: device for name, device in whole.items() if str(device) not in offloaded}
    if not resident or str(accelerator.distributed_type) not in ("NO", "DistributedType.NO"):
        yield
        return
    vars(owner)["hf_device_map"] = resident
    try:
        yield
    finally:
        vars(owner)["hf_device_map"] = whole


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from accelerate import Accelerator
    from peft import PeftModel

    def losses(base: Any) -> list[float]:
        model = PeftModel.from_pretrained(base, workspace.adapter("language"), is_trainable=True).train()
        optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], 0.1)
        accelerator = Accelerator(cpu=workspace.main == "cpu")
        model, optimizer = accelerator.prepare(model, optimizer)
        found, batch = [], workspace.inputs()
        for _ in range(FORWARDS):
            loss = model(**batch, labels=batch["input_ids"]).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    right, found = losses(workspace.load("4bit")), losses(workspace.split("4bit"))
    worst = max(abs(a - b) for a, b in zip(right, found, strict=True))
    return Outcome(worst > 0, f"losses of {FORWARDS} steps on a split model differ by {worst:.3g}", worst)


PATCH = Patch(
    id="accelerate-train-offloaded",
    severity=Severity.CRASH,
    failure_points=("F34",),
    distribution="accelerate",
    affected=">=1.12",
    requires=("peft",),
    needs=(
        "peft-keep-dispatch",
        "bitsandbytes-meta-quant-state",
        "accelerate-int8-offload",
    ),
    targets=(Target(module="accelerate.accelerator", name="Accelerator.prepare_model", replacement=prepare_model),),
    reproduce=reproduce,
)
