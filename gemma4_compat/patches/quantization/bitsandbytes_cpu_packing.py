"""Weights in 4-bit keep their exact scales when bitsandbytes repacks them for the CPU.

Symptom: silent: on a CPU with AVX512-BF16, a 4-bit weight has different scales after its first eval forward.
``state_dict()``, ``save_pretrained``, ``dequantize()``, a move to a GPU and a training step after that forward use
the wrong scales. Such a training step also loses the gradient through the base layer.

Cause: ``Linear4bit.forward`` repacks weight and state in place for a faster kernel. This rounds the scales to bf16 and
flattens nested ones; the inverse that ``state_dict`` uses quantizes the rounded scales again. ``dequantize_4bit`` and
``Params4bit.to`` cannot read the packed layout, and the fast kernel has no gradient.

Fix: Packing keeps the attributes it replaces (a few percent of the weight's bytes), and unpacking restores them. The
weight's nibbles are only permuted, so their inverse is exact. Code that cannot read the packed layout gets the
unpacked one, and an offloaded weight has its unpacked shape between two forwards. A move to the CPU leaves a weight
packed: PEFT's DoRA makes one in every forward. A weight that is tied to an offloaded one is packed with a state of its
own, and accelerate, which knows it by its address, forgets that address. A weight that was packed before the patch was
active has lost its exact scales, and unpacking it warns. Only hosts with the instruction set pack.

Remove when: bitsandbytes restores the original scales when it unpacks, exactly and completely; no release since
0.49.0, which introduced the packing, does.
"""

import copy
import sys
from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._gemma4 import host
from gemma4_compat._gemma4.quantization import quant_states
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F18", severity="wrong_result", affected=">=0.49.0", acts_on="every model", after="bitsandbytes-meta-quant-state"
)
detect = host.packs_for_cpu


@PATCH.replaces("bitsandbytes.functional", "_convert_weight_packed_for_cpu")
def pack(original: Original, qweight: Any, quant_state: Any, *args: Any, **kwargs: Any) -> Any:
    before = dict(vars(quant_state))
    packed = original(qweight, quant_state, *args, **kwargs)
    setattr(quant_state, quant_states.UNPACKED, before)
    return packed


@PATCH.replaces("bitsandbytes.functional", "_convert_weight_packed_for_cpu_inverse")
def unpack(original: Original, packed_weight: Any, quant_state: Any, *args: Any, **kwargs: Any) -> Any:
    before = vars(quant_state).get(quant_states.UNPACKED)
    qweight, recovered = original(packed_weight, quant_state, *args, **kwargs)
    if before is None:
        notice.warn_user(
            "a 4-bit weight was repacked for the CPU before the patch bitsandbytes-cpu-packing was active; its exact "
            "scales are gone. Import gemma4_compat before the first forward and load the model again.",
        )
    else:
        vars(recovered).clear()
        vars(recovered).update(before)
    return qweight, recovered


@PATCH.replaces("bitsandbytes.nn.modules", "Params4bit.to")
def params4bit_to(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    state = self.quant_state
    if quant_states.is_packed(state) and self.shape == state.original_qshape:
        # accelerate gives a tied weight its bytes, and the state that the other one has packed meanwhile
        self.quant_state = state = quant_states.before_packing(state)
    # A parameter that is not quantized yet may carry the state of the one it replaces: PEFT merges that way.
    if device is None or not self.bnb_quantized or not quant_states.is_packed(state):
        return original(self, *args, **kwargs)
    if device.type == "meta" and quant_states.ORIGIN in vars(state):
        # The data is dropped, and the new parameter gets the state's pristine copy, which is not the packed one.
        new = original(self, *args, **kwargs)
        new.data = quant_states.unpacked_on_meta(state)
        return new
    if device.type != "cpu":  # PEFT's DoRA moves a weight to where it is in every forward
        _unpack_parameter(self)
    return original(self, *args, **kwargs)


@PATCH.replaces("bitsandbytes.nn.modules", "Linear4bit.forward")
def linear4bit_forward(original: Original, self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    # FSDP2 gives the layer a plain parameter; the original function makes it a Params4bit again.
    weight = self.weight
    state = getattr(weight, "quant_state", None)
    if self.training or x.requires_grad:
        if quant_states.is_packed(state):
            _unpack_parameter(weight)
    elif state is not None and x.device.type == "cpu" and not quant_states.is_packed(state):
        # It is packed now, with its state: not also that of a tied weight that is elsewhere.
        weight.quant_state = copy.copy(state)
        if self.quant_state is state:
            self.quant_state = weight.quant_state
        address = weight.data_ptr()
        result = original(self, x, *args, **kwargs)
        _forget(self, address)
        return result
    return original(self, x, *args, **kwargs)


def _forget(layer: Any, address: int) -> None:
    """Have accelerate not take what others load to a free address for the tied weight that has been there.

    It forgets by itself what it has brought in for this forward.
    """
    hook = vars(layer).get("_hf_hook")
    for one in getattr(hook, "hooks", (hook,)):
        tied, brought_in = (getattr(one, name, ()) for name in ("tied_params_map", "tied_pointers_to_remove"))
        if tied and layer.weight.data_ptr() != address and not any(address in pointer for pointer in brought_in):
            tied.pop(address, None)


@PATCH.replaces("bitsandbytes.functional", "dequantize_4bit")
def dequantize_4bit(
    original: Original,
    A: Any,  # noqa: N803  (upstream's name; callers may use it as a keyword)
    quant_state: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if quant_states.is_packed(quant_state):
        A, quant_state = _inverse()(A, copy.copy(quant_state))  # noqa: N806
    return original(A, quant_state, *args, **kwargs)


def _unpack_parameter(parameter: Any) -> None:
    parameter.data, parameter.quant_state = _inverse()(parameter.data, parameter.quant_state)


def _inverse() -> Any:
    return vars(sys.modules["bitsandbytes.functional"])["_convert_weight_packed_for_cpu_inverse"]


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from bitsandbytes import functional

    from gemma4_compat._lab import tiny

    if not hasattr(functional, "has_avx512bf16"):
        return Outcome(False, "this bitsandbytes does not repack")
    if not functional.has_avx512bf16():
        return Outcome(False, "this CPU has no AVX512-BF16: bitsandbytes does not repack", applicable=False)
    worst = 0.0
    for quantization in ("4bit", "4bit-double"):
        model = tiny.load(workspace.checkpoint, quantization)
        layer = model.model.language_model.layers[0].mlp.up_proj
        before = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
        with torch.no_grad():
            model(**tiny.inputs(text_only=True))
        model.state_dict()
        after = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
        worst = max(worst, (before - after).abs().max().item())
    if worst:
        return Outcome(True, f"weights change by {worst:.3g} in an eval forward and state_dict()")
    return Outcome(False, "weights are bit-equal after an eval forward and state_dict()")
