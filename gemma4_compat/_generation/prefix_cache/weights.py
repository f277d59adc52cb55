"""Whether a model still computes what it computed before: what it is made of, and the values of its weights."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemma4_compat._accelerate import module_hooks
from gemma4_compat._generation.prefix_cache import values
from gemma4_compat._graphs import signatures
from gemma4_compat._graphs.dependencies import Dependencies
from gemma4_compat._models import walk
from gemma4_compat._offload import host_memory, idle_hooks
from gemma4_compat._quantization import quant_states

#: Arguments of PEFT's hooks that choose adapters for one call.
_CHOSEN = {"adapter_names", "alora_offsets"}


def adapters_are_chosen(model: Any) -> bool:
    """Whether PEFT has put hooks there for one ``generate``, which choose the adapters of its rows or tokens."""
    hooks = (hook for module in walk.modules(model) for hook in vars(module)["_forward_pre_hooks"].values())
    return any(not _CHOSEN.isdisjoint(getattr(hook, "keywords", ())) for hook in hooks)


def seen(model: Any, before: Dependencies | None) -> tuple[Any, ...]:
    """What is equal as long as the model has the same weights, adapters, hooks, attributes and settings of torch.

    Modules, and everything in them, are looked at as before a replay of ``decode_fast``. Values are compared as well,
    because a cache was computed from them: all of those on a device, and some of each weight that is in host memory.
    Weights on disk are compared by their files.

    Args:
        model: a transformers model.
        before: the first entry of what this has returned the last time.
    """
    import torch

    with idle_hooks.put_back(model):  # a thread in a forward has them bypassed
        modules = walk.modules(model)
        if before is None or not before.hold_under_any_adapter():
            configs = {id(config): vars(config) for module in modules if (config := getattr(module, "config", None))}
            before = Dependencies(modules, configs.values(), [], _gone, offloaded=False)
        stored: list[Any] = []
        for module in modules:
            hook: Any = module_hooks.offload_hook(module) if "_hf_hook" in vars(module) else None
            for own in (module._parameters, module._buffers) if hook is not None else ():
                for name, tensor in own.items():
                    if tensor is not None and tensor.device.type == "meta":
                        stored += [tensor.dtype, _stored(hook.weights_map, name), *_of_state(tensor)]
    kind = model.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (
        before,
        before.active_adapters(),
        autocast,
        signatures.settings(),
        *stored,
        values.digest(before.tensors()),
    )


def _gone(_dependencies: Dependencies, _module: str) -> None:
    """A module was deleted: what it was in does not hold any more."""


def _stored(weights_map: Any, name: str) -> Any:
    """The same for an offloaded weight, without reading a file."""
    import torch

    where, key = weights_map, name
    while not isinstance(where, (dict, collections.ChainMap)):
        held, index = getattr(where, "state_dict", {}), getattr(where, "index", {})
        if key in held:
            return _of_tensor(held[key]) if isinstance(held[key], torch.Tensor) else str(held[key])
        if key in index:
            return str(index[key]), _of_file(index[key], key, getattr(where, "save_folder", None))
        if not isinstance(where, host_memory.CastWeights):
            key = f"{getattr(where, 'prefix', None) or ''}{key}"
        if not hasattr(where, "dataset"):
            return id(where)
        where = where.dataset
    parts: Iterable[Any] = where.maps if isinstance(where, collections.ChainMap) else [where]
    for part in parts:
        if not isinstance(part, dict):
            found = _stored(part, key)
            if found != id(part):
                return found
        elif isinstance(part.get(key), torch.Tensor):
            return _of_tensor(part[key])
    return id(where)


def _of_tensor(tensor: Any) -> tuple[Any, ...]:
    """Where it is, how often operations have written to it, which an inference tensor does not count, and a sample."""
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, values.sample(tensor)


def _of_state(weight: Any) -> list[Any]:
    """The same, of what a 4-bit weight is unpacked with."""
    state = vars(weight).get("quant_state")
    parts = () if state is None else quant_states.tensors(vars(state).get(quant_states.ORIGIN, state))
    return [_of_tensor(part) for part in parts if part.device.type != "meta"]


def _of_file(entry: Any, name: str, folder: Any) -> tuple[int, ...]:
    """When the file of a weight was written, and its size: nothing if there is none."""
    path = Path(entry.get("safetensors_file") or Path(folder or "", f"{name}.dat"))
    if not path.exists():
        return ()
    found = path.stat()
    return found.st_mtime_ns, found.st_size
