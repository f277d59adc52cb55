"""``AttributeError: 'NoneType' object has no attribute 'unsqueeze'`` from the backward pass through an offloaded 8-bit
layer; on hosts without a GPU ``RuntimeError: Cannot access accelerator device when none is available`` from its first
forward. And silent: the weights of offloaded 8-bit layers stay on the GPU.

Why: a forward of ``Linear8bitLt`` takes the weight (``CB``) and its scales (``SCB``) over from the parameter into
``module.state``, which the backward pass reads. accelerate moves the parameter to meta and empties ``state.SCB``, so
the backward pass finds no scales, and ``state.CB`` keeps the whole weight on the device until the next forward: after
one forward offloading has saved no memory, after a forward *before* the dispatch it saves none until the first one
after it. A weight that comes back to the CPU goes there by way of GPU 0, to be quantized, even when it is already.

Here: when an 8-bit weight goes to meta, what the layer took over goes back to the parameter first, and the layer
starts over with a state without tensors; the one the forward used belongs to its graph alone, and lives as long. A
weight that is 8-bit already goes straight to the CPU. The scales come from the parameter when it has them (see
bitsandbytes-int8-meta-scales): whoever changed the weight, as a merge does, changed them there, not in the map.

Goes when accelerate leaves the state of a forward alone and empties ``state.CB``, and its CPU branch asks for the
dtype; no release does so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import placement
from gemma4_compat._offload import int8_state

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def set_module_tensor_to_device(
    original: Callable[..., None],
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
    if type(weight).__name__ == "Int8Params" and weight.dtype == torch.int8:
        onloading = value is not None and value.dtype == torch.int8
        hooked = placement.offload_hook(owner) is not None
        if torch.device(device).type == "meta" or (onloading and hooked):
            # On an onload as well: checkpointing leaves a recomputed forward early, before its weights are offloaded.
            _take_back(owner, weight)
        if onloading:
            if hooked:
                fp16_statistics = _scales(weight, fp16_statistics)
            if device == "cpu":
                # Upstream takes the string, and only the string, for a request to quantize on GPU 0. Its caches know
                # the string too: there is nothing in them for a weight that is not shared.
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
    """Give the parameter back what the layer's forward took from it; leave that forward's state to its graph."""
    state = vars(layer).get("state")
    if state is None or (state.CB is None and state.SCB is None):
        return
    if weight.CB is None:
        weight.CB, weight.SCB = state.CB, state.SCB
    int8_state.reset(layer)


def _scales(weight: Any, mapped: Any) -> Any:
    """The scales for upstream to set on a weight that is onloaded; None: its parameter has them."""
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

    import torch

    from gemma4_compat._reproduction.workspace import difference

    reference, model = workspace.load("8bit"), workspace.load("8bit")
    for parameter in model.parameters():
        vars(parameter).pop("_is_hf_initialized", None)  # on older releases its crash, F1, would come first
    found = difference(workspace.answers(reference), workspace.answers(workspace.dispatch(model)))
    if not torch.equal(_gradient(workspace, reference), _gradient(workspace, model)):
        found = math.inf
    return Outcome.of_parity(found, "8-bit layers offloaded, gradients through them")


def _gradient(workspace: Workspace, model: Any) -> Any:
    """The gradient of a norm below layers that the split offloads."""
    weight = model.model.language_model.layers[1].input_layernorm.weight.requires_grad_(True)
    model(**workspace.inputs()).logits.float().square().mean().backward()
    return weight.grad.cpu()


PATCH = Patch(
    id="accelerate-int8-offload",
    summary="offloaded 8-bit layers train, leave the GPU after a forward, and work without a GPU",
    symptom="AttributeError: 'NoneType' object has no attribute 'unsqueeze' (without a GPU RuntimeError: Cannot "
    "access accelerator device when none is available)",
    severity=Severity.CRASH,
    failure_points=("F28",),
    distribution="accelerate",
    affected=">=1.12",
    measured="1.15.0",
    requires=("bitsandbytes>=0.48.2",),
    retire_when="accelerate offloads Linear8bitLt without touching the state of its forward, and without GPU 0",
    after=("accelerate-hf-initialized",),
    targets=(
        Target(
            module="accelerate.utils.modeling",
            name="set_module_tensor_to_device",
            replacement=set_module_tensor_to_device,
            known={"423a8e632983": "1.12.0", "e84c6e14ba8c": "1.13.0", "6a6ec1cd3310": "1.14.0 - 1.15.0"},
        ),
    ),
    reproduce=reproduce,
)
