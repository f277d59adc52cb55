"""Quantization states of 4-bit weights survive a move to meta, so 4-bit layers can be offloaded.

Symptom: ``NotImplementedError: Cannot copy out of meta tensor`` at the first forward of an offloaded 4-bit layer.
With double quantization, ``RuntimeError: Tensor.item() cannot be called on meta tensors`` already when accelerate
attaches its hooks.

Cause: ``Params4bit.to("meta")`` calls ``QuantState.to("meta")``, which moves the state's tensors in place. The old
parameter, the new one and the module share that state, and what moved to meta is lost: scales, code book and nested
offset.

Fix: A move to meta gives the new parameter its own state with all tensors on the host, the *pristine copy*, and
does not touch the shared state. A move back to a real device copies the pristine copy and keeps a reference to it. On
the next move to meta, that reference is used again, and nothing is copied back. So nothing accumulates on the
device, and a state that bitsandbytes repacks for the CPU during a forward (hosts with AVX512-BF16) never becomes the
pristine copy. ``as_dict`` on an offloaded layer reads true values because they are there. Offloaded parameters can
be deep-copied.

A state that was destroyed before the patch was active cannot be restored: using it raises an error that says so.

Remove when: bitsandbytes keeps ``QuantState`` on a move to meta; no release does so far.
"""

import copy
from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.quantization import quant_states
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F2",
    severity="crash",
    affected=">=0.48.2",
    acts_on="every model",
    bug="https://github.com/huggingface/transformers/issues/43873",
)


@PATCH.replaces("bitsandbytes.nn.modules", "Params4bit.to")
def params4bit_to(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    state = self.quant_state
    offloading = device is not None and device.type == "meta"
    if (
        device is None
        or not self.bnb_quantized
        or state is None
        or not (offloading or quant_states.is_pristine(state))
    ):
        return original(self, *args, **kwargs)
    moved = quant_states.host_copy(state) if offloading else quant_states.device_copy(state, device)
    # Upstream moves `self.quant_state` in place and passes it on. Without it, only the data moves.
    self.quant_state = None
    try:
        new = original(self, *args, **kwargs)
    finally:
        self.quant_state = state
    new.quant_state = moved
    module = self.module
    if offloading and module is not None and module.weight is self and module.quant_state is state:
        module.quant_state = moved  # otherwise the module would keep the device's copy alive
    return new


@PATCH.replaces("bitsandbytes.nn.modules", "Params4bit.__deepcopy__")
def params4bit_deepcopy(original: Original, self: Any, memo: dict[int, Any]) -> Any:
    import torch

    if self.data.device.type != "meta":
        return original(self, memo)
    # Upstream makes an empty CPU parameter and sets its data, which torch refuses for meta data.
    new = torch.Tensor._make_subclass(type(self), self.data, self.requires_grad)
    vars(new).update(vars(self))
    new.quant_state = copy.deepcopy(self.quant_state, memo)
    return new


@PATCH.replaces("bitsandbytes.functional", "QuantState.to")
def quant_state_to(original: Original, self: Any, device: Any) -> None:
    import torch

    if device is not None and torch.device(device).type == "meta":
        original(self, "cpu")
        setattr(self, quant_states.PRISTINE, True)
        return
    quant_states.check_not_lost(self)
    original(self, device)


@PATCH.replaces("bitsandbytes.functional", "QuantState.as_dict")
def quant_state_as_dict(
    original: Callable[..., dict[str, Any]], self: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    quant_states.check_not_lost(self)
    return original(self, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    found = []
    for quantization in ("4bit-double", "4bit"):
        reference = workspace.reference(quantization)
        model = workspace.load_unmarked(quantization)
        found.append(workspace.difference(reference, workspace.dispatch(model)))
    return Outcome.of_parity(max(found), "4-bit layers offloaded, single and double quantization")
