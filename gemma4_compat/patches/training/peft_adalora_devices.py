"""AdaLoRA computes its loss on a model whose layers are on several GPUs.

Symptom: ``RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and
cuda:1`` from a forward with labels, once layers with AdaLoRA are on two GPUs.

Cause: ``AdaLoraModel.forward`` adds to the loss how far the adapter's matrices are from orthogonal. It computes each
term on the device of its matrix and adds them.

Fix: On a model on several devices the sum is computed on the device of the loss. Gradients go back to each matrix.

Remove when: ``AdaLoraModel.forward`` brings all terms to one device in all supported releases of PEFT.
"""

from collections.abc import Iterator
from typing import Any

from gemma4_compat._engine.runtime.views import PlainView
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F83", severity="crash", affected=">=0.18.0", acts_on="every model")


@PATCH.replaces("peft.tuners.adalora.model", "AdaLoraModel.forward")
def adalora_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Without labels there is no loss, and the weights are not used."""
    if kwargs.get("labels") is None:
        return original(self, *args, **kwargs)
    devices = {value.device for value in self.model.parameters() if value.device.type != "meta"}
    return original(self if len(devices) < 2 else _AdaLora(self), *args, **kwargs)


class _AdaLora(PlainView):
    """Stands in for an AdaLoRA model in its forward, with :class:`_Together` in it."""

    def __init__(self, adapted: Any) -> None:
        super().__init__(adapted, model=_Together(adapted.model))


class _Together:
    """A model whose AdaLoRA matrices are on the device of the loss, once there is a loss."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._model.forward(*args, **kwargs)
        self._device = getattr(getattr(outputs, "loss", None), "device", None)
        return outputs

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        for name, value in self._model.named_parameters():
            yield name, value.to(self._device) if "lora_" in name else value


def reproduce(workspace: Workspace) -> Outcome:
    import peft

    from gemma4_compat._lab import tiny, tiny_adapters
    from gemma4_compat._lab.stand_ins import second_device

    workspace.needs_second_device()
    batch = workspace.inputs(text_only=True, device="cpu")

    def trained(*, split: bool) -> tuple[Any, list[Any]]:
        """The outputs, and the loss with the gradients of the adapter."""
        model = tiny.load(workspace.checkpoint)
        if split:
            model = tiny.dispatch_to_two(model, second_device.DEVICE)
        targets = tiny_adapters.SOME_LINEARS
        config = peft.AdaLoraConfig(task_type="CAUSAL_LM", init_r=4, target_r=2, total_step=10, target_modules=targets)
        model = tiny_adapters.tuned(model, config)
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        gradients = [value.grad.cpu() for value in model.parameters() if value.requires_grad]
        return workspace.outputs(model, device="cpu"), [loss.detach(), *gradients]

    with second_device.second_device():
        (whole, expected), (several, found) = (trained(split=there) for there in (False, True))
    off = max(float((mine - theirs).abs().max()) for mine, theirs in zip(found, expected, strict=True))
    if off > 0.0:
        return Outcome(True, f"the loss of AdaLoRA on two devices and its gradients are off by {off:.3g}")
    return Outcome.of_parity(
        workspace.difference(whole, several), "AdaLoRA on two devices, with its loss and gradients"
    )
