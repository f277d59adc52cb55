"""Scales of 8-bit weights survive a move to meta, so offloaded 8-bit layers can be saved and merged into.

Symptom: ``AttributeError: Linear8bitLt has no attribute `SCB` `` (newer transformers: ``...SCB is neither a
parameter, buffer, nor extra state``) from ``save_pretrained`` on an 8-bit model with offloaded layers.
``state_dict()`` has their scales on meta. PEFT's DoRA on the CPU raises ``AttributeError: 'NoneType' object has no
attribute 'unsqueeze'``.

Cause: ``Int8Params.to("meta")`` moves the scales (``SCB``, one for each output row) to meta with the weight, and
nothing else keeps them on the layer. Forwards read them from accelerate's weights map, where they are until something
rebuilds the map, as PEFT's merge does. accelerate before 1.14 does not read them from there when it removes its hooks.

In its first forward the layer takes the scales over from the parameter. Moving such a parameter to the device where it
already is gives one that claims to have the weight but has no scales. This is the DoRA case.

Fix: On a move to meta the scales of the new parameter stay on the host, as the *pristine copy*. A move back to a
real device makes a fresh copy that remembers it. When that copy moves to meta again, the pristine copy itself is
used and nothing is copied back. A parameter whose scales the layer took over no longer claims the weight without its
scales after a move to its own device.

8-bit offload works from bitsandbytes 0.48.2 on: upstream's own is broken in 0.48.0 and 0.48.1.

Remove when: bitsandbytes keeps ``Int8Params.SCB`` on a move to meta; no release does so far.
"""

from typing import Any

from gemma4_compat._gemma4.quantization import quant_states
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F28", severity="crash", affected=">=0.48.2", acts_on="every model", needs="accelerate-int8-offload")

# A tensor of scales has the same attributes as a 4-bit weight's quantization state.
PRISTINE, ORIGIN = quant_states.PRISTINE, quant_states.ORIGIN


@PATCH.replaces("bitsandbytes.nn.modules", "Int8Params.to")
def int8params_to(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    scales = vars(self).get("SCB")
    if device is None or self.dtype != torch.int8:
        return original(self, *args, **kwargs)
    if scales is None:
        new = original(self, *args, **kwargs)
        if vars(self).get("CB") is None and new.device == self.device:
            new.CB = None  # otherwise the layer would take over a weight without scales
        return new
    offloading = device.type == "meta"
    if scales.device.type == "meta" or not (offloading or hasattr(scales, PRISTINE)):
        return original(self, *args, **kwargs)
    # Upstream also moves `self.SCB`. Without it, only the data moves.
    self.SCB = None
    try:
        new = original(self, *args, **kwargs)
    finally:
        self.SCB = scales
    new.SCB = _host_copy(scales) if offloading else _device_copy(scales, device)
    return new


def _host_copy(scales: Any) -> Any:
    """The pristine scales for ``scales``: the ones they were copied from, or a copy on the host."""
    if hasattr(scales, PRISTINE):
        return scales
    if not hasattr(scales, ORIGIN):
        pristine = scales.detach().to("cpu")  # tensors already on the host are shared
        setattr(pristine, PRISTINE, True)
        setattr(scales, ORIGIN, pristine)  # accelerate moves each parameter twice; one copy serves both
    return getattr(scales, ORIGIN)


def _device_copy(pristine: Any, device: Any) -> Any:
    copied = pristine.to(device, copy=True)
    setattr(copied, ORIGIN, pristine)
    return copied


def reproduce(workspace: Workspace) -> Outcome:
    reference = workspace.reference("8bit")
    model = workspace.load_unmarked("8bit")
    saved = workspace.new_folder()
    workspace.dispatch(model).save_pretrained(saved)
    reloaded = type(model).from_pretrained(saved, device_map={"": workspace.main}).eval()
    found = workspace.difference(reference, reloaded)
    return Outcome.of_parity(found, "an offloaded 8-bit model, saved and loaded again")
