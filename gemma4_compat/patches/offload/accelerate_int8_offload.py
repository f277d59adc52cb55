"""Offloaded 8-bit layers train, free the GPU after a forward, and work without a GPU.

Symptom: ``AttributeError: 'NoneType' object has no attribute 'unsqueeze'`` from the backward pass through an
offloaded 8-bit layer. On hosts without a GPU, ``RuntimeError: Cannot access accelerator device when none is
available`` from its first forward. In addition, and without an error, the weights of offloaded 8-bit layers stay on
the GPU.

Cause: A forward of ``Linear8bitLt`` moves the weight (``CB``) and its scales (``SCB``) from the parameter to
``module.state``, which the backward pass reads. ``AlignDevicesHook.post_forward`` moves the parameter to meta and
clears ``state.SCB``, so the backward pass finds no scales. It does not clear ``state.CB``, which keeps the whole
weight on the device until the next forward. After one forward, offloading has therefore saved no memory; after a
forward *before* the dispatch it saves none until the first forward after the dispatch.

``set_module_tensor_to_device`` sends an 8-bit weight that returns to the CPU through GPU 0 to quantize it, even if it
is already quantized or should stay as it is (``llm_int8_has_fp16_weight=True``). It turns a float32 weight into
float16.

Fix: When an 8-bit weight moves to meta, ``CB`` and ``SCB`` first return from the layer to the parameter, and the layer
gets a new state without tensors. The state that the forward used belongs only to its autograd graph and lives as long
as the graph. The same happens when a hook onloads the weight, because checkpointing leaves a recomputed forward before
its weights are offloaded again. A weight that is already 8-bit goes straight to the CPU, and one that should not
become 8-bit keeps its dtype.

The scales come from the parameter when it has them; the patch that keeps 8-bit scales through a move to meta puts them
there. Code that changes the weight, such as a merge, changes the scales on the parameter and not in accelerate's
weights map. If neither has the scales, an error says that an earlier move to meta destroyed them.

Remove when: accelerate leaves the state of a ``Linear8bitLt`` forward alone and clears ``state.CB``, and its CPU
branch checks the dtype instead of using GPU 0; no release does so far.
"""

from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._offload.transfer import group_weights
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F28",
    severity="crash",
    affected=">=1.12",
    acts_on="every model",
    requires="bitsandbytes>=0.48.2",
    after="accelerate-hf-initialized",
    needs="bitsandbytes-int8-meta-scales",
)


@PATCH.replaces("accelerate.utils.modeling", "set_module_tensor_to_device")
def set_module_tensor_to_device(
    original: Original,
    module: Any,
    tensor_name: str,
    device: Any,
    value: Any = None,
    dtype: Any = None,
    fp16_statistics: Any = None,
    tied_params_map: Any = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    import torch

    path, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(path) if path else module
    weight = owner._parameters.get(name)
    if type(weight).__name__ == "Int8Params":
        to_meta, hooked = torch.device(device).type == "meta", module_hooks.offload_hook(owner) is not None
        if getattr(weight, "has_fp16_weights", False) and weight.is_floating_point() and (to_meta or hooked):
            new = (weight.data if value is None else value).to(device, dtype, non_blocking=non_blocking)
            owner._parameters[name] = type(weight)(new, requires_grad=weight.requires_grad, has_fp16_weights=True)
            group_weights.reset_int8(owner)
            return
        onloading = weight.dtype == torch.int8 and value is not None and value.dtype == torch.int8
        if weight.dtype == torch.int8 and (to_meta or (onloading and hooked)):
            # Also on an onload: checkpointing leaves a recomputed forward before its weights are offloaded.
            _take_back(owner, weight)
        if onloading:
            if hooked:
                fp16_statistics = _scales(weight, fp16_statistics)
            if device == "cpu":
                # Upstream takes only the string as a request to quantize on GPU 0. Its caches also use the string as a
                # key, but hold nothing for a weight that is not shared.
                device, tied_params_map, clear_cache = torch.device("cpu"), None, False
    original(
        module,
        tensor_name,
        device,
        value=value,
        dtype=dtype,
        fp16_statistics=fp16_statistics,
        tied_params_map=tied_params_map,
        non_blocking=non_blocking,
        clear_cache=clear_cache,
    )


def _take_back(layer: Any, weight: Any) -> None:
    """Return to the parameter what the layer's forward took from it; leave that forward's state to its graph."""
    state = vars(layer).get("state")
    if state is None or (state.CB is None and state.SCB is None):
        return
    if weight.CB is None:
        weight.CB, weight.SCB = state.CB, state.SCB
    group_weights.reset_int8(layer)


def _scales(weight: Any, mapped: Any) -> Any:
    """The scales for upstream to set on a weight being onloaded; None if its parameter has them."""
    own = vars(weight).get("SCB")
    if own is not None and own.device.type != "meta":
        return None
    if mapped is None:
        raise Gemma4CompatError(
            f"the scales of an 8-bit weight of shape {tuple(weight.shape)} were destroyed by an earlier move to meta, "
            "before the patch bitsandbytes-int8-meta-scales was active. Import gemma4_compat first and load the model "
            "again."
        )
    return mapped


def reproduce(workspace: Workspace) -> Outcome:
    import math

    reference, model = workspace.load("8bit"), workspace.load_unmarked("8bit")
    found = workspace.difference(workspace.reference("8bit"), workspace.dispatch(model))
    if not _gradient(workspace, reference).equal(_gradient(workspace, model)):
        found = math.inf
    return Outcome.of_parity(found, "8-bit layers offloaded, gradients through them")


def _gradient(workspace: Workspace, model: Any) -> Any:
    """The gradient of a norm below layers that the split offloads."""
    weight = model.model.language_model.layers[1].input_layernorm.weight.requires_grad_(True)
    model(**workspace.inputs()).logits.float().square().mean().backward()
    return weight.grad.cpu()
