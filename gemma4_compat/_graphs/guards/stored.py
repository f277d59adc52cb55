"""What stands for the values of offloaded weights: a sample of those in host memory, the files of those on disk."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.quantization import quant_states
from gemma4_compat._gemma4.state import contents as values
from gemma4_compat._offload import host_memory


def contents(modules: Iterable[Any]) -> list[Any]:
    """What is equal as long as the offloaded weights of these modules have the same values, as far as it is seen."""
    found: list[Any] = []
    for module in modules:
        hook: Any = module_hooks.offload_hook(module) if "_hf_hook" in vars(module) else None
        for own in (module._parameters, module._buffers) if hook is not None else ():
            for name, tensor in own.items():
                if tensor is not None and tensor.device.type == "meta":
                    found += [tensor.dtype, _stored(hook.weights_map, name), *_of_state(tensor)]
    return found


def _stored(weights_map: Any, name: str) -> Any:
    """The same for an offloaded weight, without reading a file."""
    import torch

    where, key = weights_map, name
    while not isinstance(where, (dict, collections.ChainMap)):
        held, index = getattr(where, "state_dict", {}), getattr(where, "index", {})
        if key in held:
            return values.sampled(held[key]) if isinstance(held[key], torch.Tensor) else str(held[key])
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
            return values.sampled(part[key])
    return id(where)


def _of_state(weight: Any) -> list[Any]:
    """Samples of the quantization state of a 4-bit weight, of what is not offloaded."""
    state = vars(weight).get("quant_state")
    parts = () if state is None else quant_states.tensors(vars(state).get(quant_states.ORIGIN, state))
    return [values.sampled(part) for part in parts if part.device.type != "meta"]


def _of_file(entry: Any, name: str, folder: Any) -> tuple[int, ...]:
    """When the file of a weight was written, and its size; empty without a file."""
    path = Path(entry.get("safetensors_file") or Path(folder or "", f"{name}.dat"))
    if not path.exists():
        return ()
    found = path.stat()
    return found.st_mtime_ns, found.st_size
