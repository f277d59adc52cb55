"""Offloaded weights that somebody parametrized, which computed the originals from a weight without values.

``torch.nn.utils.parametrize`` reads a module's weight once, when a parametrization is registered. That of an offloaded
module is on meta then, and so are the originals, which no hook of accelerate's brings: a GPU reports tensors on two
devices, and a CPU multiplies by whatever is in its memory. Before the next forward the originals are computed again,
from the weight that accelerate keeps. They stay on the device from then on.
"""

from __future__ import annotations

import contextlib
from typing import Any

from gemma4_compat._errors import OffloadedWeightsError
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._offload import host_memory


def settle(module: Any, hook: Any) -> None:
    """Give the parametrizations of a module that this hook offloads originals with values.

    Raises:
        OffloadedWeightsError: a parametrization has a state of its own that it computed from the weight without
            values, as that of ``spectral_norm``.
    """
    import torch

    if not torch.nn.utils.parametrize.is_parametrized(module):
        return
    for name, chain in module.parametrizations.items():
        originals = dict(chain.named_parameters(recurse=False))
        if any(original.device.type == "meta" for original in originals.values()):
            _renew(name, chain, originals, module, hook)


def _renew(name: str, chain: Any, originals: dict[str, Any], module: Any, hook: Any) -> None:
    import torch

    own = [tensor for part in chain for tensor in (*part.parameters(), *part.buffers())]
    if any(tensor.device.type == "meta" for tensor in own):
        kinds = ", ".join(type(part).__name__ for part in chain)
        raise OffloadedWeightsError(
            f"{name!r} of a {type(module).__name__} was parametrized ({kinds}) while it was offloaded: what the "
            "parametrization computed from it has no values. Parametrize the model before it is dispatched, or keep "
            "this module on the device (device_map)."
        )
    device = module_hooks.execution_device(module)
    dtype = next(iter(originals.values())).dtype
    with torch.inference_mode(False), torch.no_grad():
        stored = host_memory.stored(hook.weights_map, name)
        value: Any = host_memory.cast(stored.raw, (*stored.casts, dtype)).to(device, copy=True)
        # As torch, which asks the first one only, and takes the weight itself where there is no answer.
        if hasattr(chain[0], "right_inverse"):
            with contextlib.suppress(NotImplementedError):
                value = chain[0].right_inverse(value)
        values = [value] if isinstance(value, torch.Tensor) else value
        for (key, original), found in zip(originals.items(), values, strict=True):
            setattr(chain, key, torch.nn.Parameter(found.clone(), requires_grad=original.requires_grad))
