"""Where a loaded model wants its inputs, and which of its tensors have no values. Reads only.

Duck-typed on accelerate's hooks, PEFT's wrappers and bitsandbytes' states; torch is imported when something is called.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.io import arguments
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat._gemma4.state import contents

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MetaTensor:
    """A tensor of a model that is on meta: it has a shape and no values.

    Attributes:
        path: its place in the model: ``"model.layers.0.mlp.up_proj.weight"`` or, for a member of a quantization state,
            ``"model.layers.0.mlp.up_proj.weight.quant_state.absmax"``.
        kind: ``"parameter"``, ``"buffer"`` or ``"quantization"`` (a member of a quantization state).
        offloaded: True if a hook will onload the values for the next forward, as it should; False if no hook will: the
            values are lost, and the module cannot compute.
        shape: as ``torch.Tensor.shape``.
        dtype: as ``torch.Tensor.dtype`` (``torch.uint8`` for 4-bit weights, two values a byte).
    """

    path: str
    kind: str
    offloaded: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


def input_device(model: Any) -> torch.device:
    """Where ``input_ids`` must be: the device on which the input embedding of ``model`` computes.

    For an offloaded embedding that is its hook's execution device, not the place of its weight. A model with
    accelerate's hooks takes inputs from any device and moves them there; PEFT layers around the embedding, and models
    without hooks, do not.

    >>> batch = tokenizer("Hello", return_tensors="pt").to(gemma4_compat.input_device(model))

    Args:
        model: a transformers model, plain, quantized, dispatched over devices, or wrapped by PEFT or torch.compile.

    Returns:
        The device, with its index if that is known (``cuda:0``).

    Raises:
        Gemma4CompatError: it is unknown: ``model`` has no input embedding, or the embedding is on meta and no hook
            will onload it. The message names the module and the remedy.
    """
    import torch

    embedding = _input_embedding(model)
    device = module_hooks.hook_device(embedding)
    if device is not None:
        return device  # as nearly always: `model.device` asks several times per token
    path = next((name for name, module in model.named_modules() if module is embedding), "")
    for module in _ancestors(model, path):
        device = module_hooks.hook_device(module, of_submodules=True)
        if device is not None:
            return device
    tensor: Any = next(iter((*embedding.parameters(), *embedding.buffers())), None)
    if tensor is None or tensor.device.type == "meta":
        raise Gemma4CompatError(
            f"the device of the inputs cannot be told: the input embedding {path or type(embedding).__name__!r} "
            + ("has no weights. " if tensor is None else "is on meta, and no hook will bring its values in. ")
            + "Load the model again with from_pretrained(..., device_map=...), and do not remove its hooks."
        )
    return torch.device(tensor.device)


def device_of_offloaded(model: Any) -> torch.device | None:
    """Where a model takes its inputs if its first parameter is on meta until a hook onloads it.

    That is :func:`input_device`; for a part without an input embedding, such as a tower, it is where its first
    parameter computes.

    Returns:
        The device; None if no hook onloads the first parameter: that model really is on meta.
    """
    named = ((name, module) for name, module in model.named_modules() if _has_parameters(module))
    path, first = next(named, ("", None))
    if first is None:
        return None
    above = [module for module in _ancestors(model, path) if _offloads_submodules(module)]
    offloading = [module for module in (first, *above) if module_hooks.offload_hook(module) is not None]
    if not offloading:
        return None
    try:
        return input_device(model)
    except Gemma4CompatError:
        found: torch.device | None = module_hooks.execution_device(offloading[0])
        return found


def _has_parameters(module: Any) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def _offloads_submodules(module: Any) -> bool:
    return bool(getattr(module_hooks.offload_hook(module), "place_submodules", False))


def find_meta_tensors(model: Any) -> tuple[MetaTensor, ...]:
    """Every parameter, buffer and member of a quantization state of ``model`` that is on meta.

    On a dispatched model the offloaded ones are normal: between two forwards their values are in host memory or on
    disk, and the hook of their module onloads them. A tensor that is *not* ``offloaded`` has lost its values for good:
    the next forward of its module raises ``Cannot copy out of meta tensor`` (or worse, computes with noise). The
    remedy is to load the model again after importing this package. Nothing is read from disk and nothing is moved.

    Args:
        model: any ``torch.nn.Module``; PEFT wrappers are walked through.

    Returns:
        One :class:`MetaTensor` for each, in the order of ``model.named_modules()``; tied weights once for each place.

    Raises:
        Gemma4CompatError: ``model`` is not a module.

    Examples:
        >>> [tensor.path for tensor in gemma4_compat.find_meta_tensors(model) if not tensor.offloaded]
        []
    """
    return tuple(_find(arguments.model(model, "find_meta_tensors")))


def _find(model: Any) -> Iterator[MetaTensor]:
    keys: dict[int, frozenset[Any]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        hooks = list(_offload_hooks(model, path, module))
        attributes = vars(module)
        persistent = attributes["_buffers"].keys() - attributes["_non_persistent_buffers_set"]
        states: dict[int, str] = {}
        for name, tensor in attributes["_parameters"].items():
            if tensor is None:
                continue
            if tensor.device.type == "meta":
                yield _found(path, name, "parameter", tensor, _is_held(hooks, name, keys))
            yield from _find_in_states(path, name, vars(tensor), hooks, keys, states)
        for name, tensor in attributes["_buffers"].items():
            if tensor is not None and tensor.device.type == "meta":
                by = [(hook, prefix) for hook, prefix in hooks if getattr(hook, "offload_buffers", False)]
                yield _found(path, name, "buffer", tensor, name in persistent and _is_held(by, name, keys))
        own = {name: attributes[name] for name in ("quant_state", "state") if name in attributes}
        yield from _find_in_states(path, "", own, hooks, keys, states)


def _find_in_states(
    path: str, owner: str, attributes: dict[str, Any], hooks: Any, keys: Any, states: dict[int, str]
) -> Iterator[MetaTensor]:
    """Members on meta of the quantization states in ``attributes`` (of a parameter, or of a module)."""
    import torch

    for name, value in attributes.items():
        label = f"{owner}.{name}" if owner else name
        if isinstance(value, torch.Tensor) and name in ("CB", "SCB"):  # Int8Params: hooks onload weight and SCB
            if value.device.type == "meta":
                held = _is_held(hooks, "SCB" if name == "SCB" else owner or "weight", keys)
                yield _found(path, label, "quantization", value, held)
        elif name == "quant_state" and value is not None and id(value) not in states:
            states[id(value)] = label  # parameter and module share one
            for member, tensor in contents.named_tensors(value):
                if tensor.device.type == "meta":  # no hook onloads scales
                    yield _found(path, f"{label}.{member}", "quantization", tensor, False)
        elif name == "state" and hasattr(value, "CB") and hasattr(value, "SCB"):  # of a Linear8bitLt
            own = {member: getattr(value, member) for member in ("CB", "SCB")}
            yield from _find_in_states(path, label, own, hooks, keys, states)


def _found(path: str, name: str, kind: str, tensor: Any, offloaded: bool) -> MetaTensor:
    place = f"{path}.{name}" if path else name
    return MetaTensor(path=place, kind=kind, offloaded=offloaded, shape=tuple(tensor.shape), dtype=tensor.dtype)


def _offload_hooks(model: Any, path: str, module: Any) -> Iterator[tuple[Any, str]]:
    """The hooks that onload tensors of ``module``, each with the prefix its map has for them."""
    hook = module_hooks.offload_hook(module)
    if hook is not None:
        yield hook, ""
    parts = path.split(".") if path else []
    for depth, ancestor in enumerate(reversed(_ancestors(model, path))):
        if _offloads_submodules(ancestor):
            yield module_hooks.offload_hook(ancestor), ".".join(parts[depth:]) + "."


def _is_held(hooks: list[tuple[Any, str]], name: str, keys: dict[int, frozenset[Any]]) -> bool:
    return any(_holds(hook.weights_map, prefix + name, keys) for hook, prefix in hooks)


def _holds(weights: Any, key: str, keys: dict[int, frozenset[Any]]) -> bool:
    """``key in weights``, which accelerate's maps would answer by reading the tensor from disk."""
    if isinstance(weights, ChainMap):
        return any(_holds(item, key, keys) for item in weights.maps)
    if hasattr(weights, "dataset") and hasattr(weights, "prefix"):
        return _holds(weights.dataset, f"{weights.prefix}{key}", keys)
    if id(weights) not in keys:
        keys[id(weights)] = frozenset(weights or ())
    return key in keys[id(weights)]


def _ancestors(model: Any, path: str) -> list[Any]:
    """The modules above ``path``, the nearest first, ``model`` last."""
    if not path:
        return []
    above = [model]
    for part in path.split(".")[:-1]:
        above.append(above[-1].get_submodule(part))
    return above[::-1]


def _input_embedding(model: Any) -> Any:
    """The module that looks rows up, below anything PEFT has put around it."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = None
    if embedding is None:
        raise Gemma4CompatError(
            f"the device of the inputs cannot be told: {type(model).__name__} has no input embedding "
            "(get_input_embeddings). Give the language model, or the whole model, not a part of it."
        )
    return walk.innermost(embedding)
