"""An adapter can be trained on a quantized model with offloaded layers.

Symptom: ``ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk
offload`` from ``Trainer.train`` (of any trainer, through ``Accelerator.prepare``) for a quantized model with an
offloaded layer, and from the trainer's ``evaluate``. A backward pass of your own ends in ``RuntimeError: Function
MmBackward0 returned an invalid gradient at index 1 - expected device meta but got cpu`` (or the GPU).

Cause: ``Accelerator.prepare_model`` looks at ``hf_device_map`` and assumes that a model in training must fit on the
device. A frozen base does not have to: each layer's weights are onloaded for its backward pass as for its forward, and
the trained part (the adapter) is where its layer computes.

Fix: A Gemma 4 model whose offloaded weights are all frozen is prepared as if the map named only what is on the
training device; nothing is moved. accelerate's other refusals (distributed training, another device than the training
device) remain.

Offloaded weights that an optimizer would train raise one error before anything is prepared, with or without
quantization. Their gradients belong to a copy that is gone after the layer's backward pass, so the weights would
silently never change. A model that is prepared for inference, whose weights require gradients as ``from_pretrained``
leaves them, is prepared; a backward pass in training mode without a prepared optimizer is one warning. An optimizer
that accelerate never sees is refused at its step, before any weight has changed.

Remove when: accelerate prepares a quantized model with frozen offloaded layers.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import OffloadedWeightsError
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import FORWARDS, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F34",
    severity="crash",
    affected=">=1.12",
    requires="peft",
    needs="peft-keep-dispatch bitsandbytes-meta-quant-state accelerate-int8-offload",
    after="accelerate-offload-folder",
)


@PATCH.replaces("accelerate.accelerator", "Accelerator.prepare")
def prepare(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    models = [value for value in (*args, *self._models) if isinstance(value, torch.nn.Module)]
    optimizers = [value for value in (*args, *self._optimizers) if isinstance(value, torch.optim.Optimizer)]
    _refuse_trained_and_offloaded(models, optimizers)
    return original(self, *args, **kwargs)


@PATCH.replaces("accelerate.accelerator", "Accelerator.prepare_model")
def prepare_model(
    original: Original,
    self: Any,
    model: Any,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:
    owner = module_hooks.map_owner(model)
    if owner is None or not family.has_parts(model):
        return original(self, model, device_placement, evaluation_mode)
    with _without_offloaded_entries(owner, self):
        return original(self, model, device_placement, evaluation_mode)


@PATCH.replaces("accelerate.big_modeling", "dispatch_model")
def dispatch_model(original: Original, *args: Any, **kwargs: Any) -> Any:
    model = original(*args, **kwargs)
    if module_hooks.map_owner(model) is model and family.has_parts(model):
        _watch(model)
    return model


@PATCH.replaces("accelerate.accelerator", "Accelerator.backward")
def backward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Warn once about what :func:`prepare` cannot see: an optimizer not prepared, or prepared separately."""
    training = [model for model in self._models if model.training and model not in _asked]
    if training:
        _asked.update(training)
        _refuse_trained_and_offloaded(training, self._optimizers)
        names = [] if self._optimizers else [name for model in training for name in _trained_and_offloaded(model)]
        if names:
            notice.warn_user(
                f"{len(names)} offloaded weights require gradients, {names[0]!r} among them, and will not get any. "
                f"An optimizer never changes them. {_REMEDY}"
            )
    return original(self, *args, **kwargs)


_REMEDY = (
    "Freeze them (model.requires_grad_(False)) and train an adapter (get_peft_model), or load the model with a "
    "device_map that keeps their modules on the accelerator."
)
#: Models that have already had a backward pass in training mode.
_asked: weakref.WeakSet[Any] = weakref.WeakSet()


#: Split models that live, and torch's handle of :func:`_before_step` while there are any.
_split: weakref.WeakSet[Any] = weakref.WeakSet()
_handles: list[Any] = []


def _watch(model: Any) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    if model not in _split:
        _split.add(model)
        weakref.finalize(model, _unwatch)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))


def _unwatch() -> None:
    if not any(True for _ in _split):  # its length counts the one that goes
        while _handles:
            _handles.pop().remove()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Called before every optimizer step. Each forward makes new placeholders on meta, alike in shape and dtype."""
    asked = {(weight.shape, weight.dtype) for weight in _offloaded([optimizer]) if weight.grad is None}
    if asked:
        found = ((model, name) for model in _split for name in _trained_and_offloaded(model))
        weights = ((name, model.get_parameter(name)) for model, name in found)
        _refuse([name for name, weight in weights if (weight.shape, weight.dtype) in asked])


def _refuse_trained_and_offloaded(models: list[Any], optimizers: list[Any]) -> None:
    if any(True for _ in _offloaded(optimizers)):
        _refuse([name for model in models for name in _trained_and_offloaded(model)])


def _offloaded(optimizers: list[Any]) -> Iterator[Any]:
    """What these optimizers are to train and is on meta."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (weight for weight in group["params"] if weight.requires_grad and weight.device.type == "meta")


def _refuse(names: list[str]) -> None:
    if names:
        raise OffloadedWeightsError(
            f"{len(names)} weights are to be trained and are offloaded, {names[0]!r} among them: they would never "
            f"change. {_REMEDY} Nothing was changed."
        )


def _trained_and_offloaded(model: Any) -> list[str]:
    if module_hooks.map_owner(model) is None or not family.has_parts(model):
        return []
    return [name for name, weight in model.named_parameters() if weight.requires_grad and weight.device.type == "meta"]


@contextlib.contextmanager
def _without_offloaded_entries(owner: Any, accelerator: Any) -> Iterator[None]:
    """Inside, the model's map names only modules on a device; unchanged if it is distributed, or if nothing is
    there.
    """
    whole = owner.hf_device_map
    offloaded = {"disk"} if accelerator.device.type == "cpu" else {"disk", "cpu"}
    resident = {name: device for name, device in whole.items() if str(device) not in offloaded}
    if not resident or str(accelerator.distributed_type) not in ("NO", "DistributedType.NO"):
        yield
        return
    with in_place.assigned(owner, "hf_device_map", resident):
        yield


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
