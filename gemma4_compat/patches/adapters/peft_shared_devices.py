"""Lily computes, and RandLora merges, on a model whose layers are on several devices.

Symptom: ``RuntimeError: Expected all tensors to be on the same device, but got mat2 is on cuda:0, different from other
tensors on cuda:1`` from a forward with Lily, and a similar error from ``merge_and_unload`` with RandLora, once layers
are on two GPUs.

Cause: Layers of both tuners share weights, which are on one device. Lily computes with them where they are. RandLora's
forward moves them to its input, but its merge computes where they are and adds the result to a weight that is
elsewhere.

Fix: Lily's forward gets shared weights on the device of its input, and RandLora merges on the device of the weight.

Remove when: both move the shared weights to their layer's device in all supported releases of PEFT.
"""

from typing import Any

from gemma4_compat._engine.runtime.views import PlainView
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F78", severity="crash", affected=">=0.18.0", acts_on="every model")


@PATCH.replaces("peft.tuners.lily.layer", "Linear.forward", optional=True)
def lily_forward(original: Original, self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    shared = [layers[name] for layers in (self.lily_A, self.lily_B) for name in self.active_adapters if name in layers]
    if all(layer.weight.device == x.device for layer in shared):
        return original(self, x, *args, **kwargs)
    return original(_LilyOn(self, x.device), x, *args, **kwargs)


class _LilyOn(PlainView):
    """Stands in for a Lily layer in its forward, with the shared linears of its active adapters on one device."""

    def __init__(self, layer: Any, device: Any) -> None:
        super().__init__(layer)
        active = [name for name in layer.active_adapters if name in layer.lily_A]
        self.lily_A = {name: _LinearOn(layer.lily_A[name], device) for name in active}
        self.lily_B = {name: _LinearOn(layer.lily_B[name], device) for name in active}


class _LinearOn:
    """A linear without a bias and with its weight on one device; gradients reach the original weight."""

    def __init__(self, linear: Any, device: Any) -> None:
        self.weight = linear.weight.to(device)

    def __call__(self, x: Any) -> Any:
        import torch

        return torch.nn.functional.linear(x, self.weight)


@PATCH.replaces("peft.tuners.randlora.layer", "Linear.get_scaled_bases")
@PATCH.replaces("peft.tuners.randlora.bnb", "Linear4bit.get_scaled_bases", group="quantized")
@PATCH.replaces("peft.tuners.randlora.bnb", "Linear8bitLt.get_scaled_bases", group="quantized")
def randlora_bases(original: Original, self: Any, adapter: str, device: Any = None) -> Any:
    """``device`` is None while an adapter is merged."""
    if device is None:
        base = self.get_base_layer()
        device = module_hooks.execution_device(base) or base.weight.device
    return original(self, adapter, device)


def reproduce(workspace: Workspace) -> Outcome:
    import peft

    from gemma4_compat._lab import tiny, tiny_adapters
    from gemma4_compat._lab.stand_ins import second_device

    workspace.needs_second_device()

    def tuned(kind: str, *, split: bool) -> Any:
        model = tiny.load(workspace.checkpoint)
        if split:
            model = tiny.dispatch_to_two(model, second_device.DEVICE)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", target_modules=tiny_adapters.SOME_LINEARS)
        tuned = tiny_adapters.tuned(model, config)
        return tuned if kind == "LilyConfig" else tuned.merge_and_unload()

    found = 0.0
    with second_device.second_device():
        for kind in ("LilyConfig", "RandLoraConfig"):
            if hasattr(peft, kind):
                whole, several = (workspace.outputs(tuned(kind, split=there), device="cpu") for there in (False, True))
                found = max(found, workspace.difference(whole, several))
    return Outcome.of_parity(found, "Lily, and RandLora merged, on two devices")
