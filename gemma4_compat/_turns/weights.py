"""Whether a model still computes what it computed before: its weights, adapters and hooks, as far as these tell."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Iterator
from typing import Any

from gemma4_compat._accelerate import module_hooks
from gemma4_compat._decoding import obstacles
from gemma4_compat._models import walk
from gemma4_compat._offload import host_memory

#: Arguments of PEFT's hooks that choose adapters for one call.
_CHOSEN = {"adapter_names", "alora_offsets"}
#: Attributes of PEFT's layers that say which adapters compute, and how strongly.
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def seen(model: Any) -> tuple[Any, ...]:
    """What is equal as long as the model has the same weights, adapters, hooks and settings of torch.

    A tensor counts as changed if it is another tensor, or if an operation has written to it. What is written through
    ``.data`` is noticed in adapters only, by their norms.
    """
    import torch

    found: list[Any] = [torch.is_inference_mode_enabled(), torch.is_autocast_enabled(model.device.type)]
    found.append(getattr(model.config.get_text_config(), "_attn_implementation", None))
    tensors: list[Any] = []
    adapters: list[Any] = []
    kinds: dict[type, bool] = {}  # whether modules of it are PEFT's
    for module in walk.modules(model):
        attributes, kind = module.__dict__, type(module)
        if attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]:
            found += map(id, obstacles.users_hooks(module))
            if any(map(_is_of_a_call, attributes["_forward_pre_hooks"].values())):
                found.append(object())  # equal to nothing else
        if "forward" in attributes and obstacles.has_own_forward(module):
            found.append(id(attributes["forward"]))
        if kind not in kinds:
            kinds[kind] = hasattr(kind, "adapter_layer_names")
        if kinds[kind] or "_active_adapter" in attributes:
            found.append([str(getattr(module, name, None)) for name in _ADAPTERS])
            adapters += _weights_of_adapters(module)
        hook = module_hooks.offload_hook(module) if "_hf_hook" in attributes else None
        for own in (attributes["_parameters"], attributes["_buffers"]):
            if hook is None:
                tensors += own.values()
            else:
                found += [_stored(hook.weights_map, name) for name, tensor in own.items() if tensor is not None]
    return (*found, *_tensors([tensor for tensor in tensors if tensor is not None]), *_norms(adapters))


def _is_of_a_call(hook: Any) -> bool:
    """Whether PEFT has put it there for one ``generate``, which chooses the adapters of its rows or tokens."""
    return not _CHOSEN.isdisjoint(getattr(hook, "keywords", ()))


def _tensors(tensors: list[Any]) -> list[int]:
    """Where they are, and how often operations have written to each; an inference tensor does not count that."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():  # bitsandbytes' parameters take a detour through Python
        counting = itertools.filterfalse(torch.Tensor.is_inference, tensors)
        return [*map(torch.Tensor.data_ptr, tensors), *map(operator.attrgetter("_version"), counting)]


def _stored(weights_map: Any, name: str) -> Any:
    """The same for an offloaded weight, without reading a file."""
    import torch

    where, key = weights_map, name
    while not isinstance(where, (dict, collections.ChainMap)):
        held, index = getattr(where, "state_dict", {}), getattr(where, "index", {})
        if key in held or key in index:
            value = held[key] if key in held else index[key]
            return tuple(_tensors([value])) if isinstance(value, torch.Tensor) else str(value)
        if not isinstance(where, host_memory.CastWeights):
            key = f"{getattr(where, 'prefix', None) or ''}{key}"
        if not hasattr(where, "dataset"):
            return id(where)
        where = where.dataset
    parts = where.maps if isinstance(where, collections.ChainMap) else [where]
    for part in parts:
        if not isinstance(part, dict):
            found = _stored(part, key)
            if found != id(part):
                return found
        elif isinstance(part.get(key), torch.Tensor):
            return tuple(_tensors([part[key]]))
    return id(where)


def _weights_of_adapters(layer: Any) -> Iterator[Any]:
    """The weights of a PEFT layer itself, on their device: without those of the layer that it wraps."""
    for name in getattr(layer, "adapter_layer_names", ()):
        part: Any = getattr(layer, name, None)
        if hasattr(part, "parameters"):
            yield from part.parameters()


def _norms(tensors: list[Any]) -> tuple[float, ...]:
    import torch

    found: dict[Any, list[Any]] = {}
    for tensor in tensors:
        if tensor.device.type != "meta" and tensor.is_floating_point() and tensor.numel():
            found.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    norms = [torch._foreach_norm(alike, 2, torch.float32) for alike in found.values()]
    return tuple(value for one in norms for value in torch.stack(list(one)).tolist())
