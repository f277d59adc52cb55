"""UniLora works on offloaded and on quantized layers, FRoD on offloaded ones.

Symptom: silent: UniLora on layers of bitsandbytes changes nothing and is not trained, whatever its weights. On
offloaded layers its training raises ``Function MmBackward0 returned an invalid gradient at index 1 - expected device
meta but got cpu``, and a merge leaves it out; FRoD raises ``NotImplementedError: Cannot copy out of meta tensor``.

Cause: Both tuners create a part that all their layers share, outside the call that creates a layer. UniLora casts its
scales, which are below 1 as soon as a value is used twice, to the device and the dtype of the base weight: meta, or an
integer dtype. FRoD reads all base weights.

Fix: UniLora's scales go to the device where the layer computes, and stay float32 beside packed weights. FRoD reads the
stored weights, in host memory or mapped from their files.

Remove when: in all supported releases PEFT casts UniLora's scales only to floating-point dtypes, and asks offloaded
layers for neither device nor values.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat._offload.weights import stored_weights
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F77", severity="wrong_result", affected=">=0.20.0", acts_on="every model")


@PATCH.replaces("peft.tuners.unilora.layer", "UniLoraLayer.update_scaling", group="UniLora")
def update_scaling(
    original: Original,
    self: Any,
    adapter_name: str,
    unilora_scales_A: Any,  # noqa: N803  # PEFT's name
    unilora_scales_B: Any,  # noqa: N803
) -> None:
    base = self.get_base_layer()
    with module_hooks.seen_on_execution_device(base):
        original(self, adapter_name, unilora_scales_A, unilora_scales_B)
        if base.weight.dtype.is_floating_point or adapter_name not in self.unilora_scales_A:
            return
        device = base.weight.device
    self.unilora_scales_A[adapter_name] = unilora_scales_A.to(device)
    self.unilora_scales_B[adapter_name] = unilora_scales_B.to(device)


@PATCH.replaces("peft.tuners.frod.model", "FrodModel._init_frod_projections", group="FRoD")
def init_projections(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    with _stored_weights(walk.modules(self.model)):
        original(self, *args, **kwargs)


@contextlib.contextmanager
def _stored_weights(modules: list[Any]) -> Iterator[None]:
    """Inside, offloaded linears have their weights on the host, without loading them to the device."""
    import torch

    before = []
    try:
        for module in modules:
            if isinstance(module, torch.nn.Linear) and module_hooks.is_offloaded(module):
                stored = torch.nn.Parameter(stored_weights.read(module, "weight"), requires_grad=False)
                before.append((module, module.weight))
                module._parameters["weight"] = stored
        yield
    finally:
        for module, weight in before:
            module._parameters["weight"] = weight


def reproduce(workspace: Workspace) -> Outcome:
    import peft
    import torch

    from gemma4_compat._lab import tiny_adapters

    if not hasattr(peft, "UniLoraConfig"):
        return Outcome(False, "this release of PEFT has neither UniLora nor FRoD", applicable=False)

    def tuned(model: Any, kind: str = "UniLoraConfig") -> Any:
        torch.manual_seed(0)
        config = getattr(peft, kind)(target_modules=tiny_adapters.SOME_LINEARS)
        tuned = peft.get_peft_model(model, config).eval()
        with torch.no_grad():
            for value in tuned.parameters():
                if value.requires_grad:
                    value.add_(2.0)
        return tuned

    def merged(model: Any) -> Any:
        return workspace.outputs(tuned(model).merge_and_unload())

    found = workspace.difference(merged(workspace.load()), merged(workspace.split()))
    if found > 0.0:
        return Outcome(True, "UniLora merged into a split model: other answers than on one device", found)
    expected = workspace.outputs(tuned(workspace.load("4bit")))
    if workspace.difference(workspace.reference("4bit"), expected) == 0.0:
        return Outcome(True, "UniLora on a 4-bit base changes nothing")
    found = workspace.difference(expected, tuned(workspace.split("4bit")))
    expected = workspace.outputs(tuned(workspace.load(), "FrodConfig"))
    found = max(found, workspace.difference(expected, tuned(workspace.split(), "FrodConfig")))
    return Outcome.of_parity(found, "UniLora on a split 4-bit base, and FRoD on a split one")
