"""Adapters of a model that is dispatched after they were loaded: they stay on the device where their layers compute.

accelerate treats an adapter as part of the layer it offloads. But a LoRA on an embedding, and trained tokens, are in
containers that are never called, so no hook onloads them, and offloaded tensors get no gradient. Here accelerate does
not see the adapters of offloaded modules. They end up where they would be if they were loaded after the dispatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from gemma4_compat._gemma4.accelerate import device_maps, module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat._offload.weights import peft_layers, tied_weights

_TABLES = ("_modules", "_parameters", "_buffers")


@contextlib.contextmanager
def hidden(model: Any, device_map: Mapping[str, Any]) -> Iterator[None]:
    """Inside, adapters of modules that the map offloads are empty; afterwards they are on the execution device."""
    layers = [
        (layer, base)
        for name, layer in walk.named_modules(model)
        for key, base in walk.wrapped(layer)
        if _is_offloaded(f"{name}.{key}".lstrip("."), device_map)
    ]
    adapters = {part for layer, base in layers for part in layer._modules.values() if part not in (base, None)}
    shared = tied_weights.shared_with_copies(model)
    contents = [(vars(part)[table], dict(vars(part)[table])) for part in adapters for table in _TABLES]
    for table, _ in contents:
        table.clear()
    try:
        yield
    finally:
        for table, content in contents:
            table.update(content)
    additive = peft_layers.are_additive(model)
    for layer, base in layers:
        _place(layer, base)
        if hasattr(layer, "trainable_tokens_delta") or (hasattr(layer, "merged_adapters") and not additive):
            peft_layers.keep_onloaded_for_whole_forward(layer)
    for target, copied in shared:
        tied_weights.share(target, copied)


def _is_offloaded(name: str, device_map: Mapping[str, Any]) -> bool:
    """Whether the map offloads a part of the module ``name``."""
    entries = [entry for entry in device_map if entry.startswith(f"{name}.")]
    around = device_maps.entry_for(name, device_map)
    if around is not None:
        entries.append(around)
    return any(device_map[entry] in ("cpu", "disk") for entry in entries)


def _place(layer: Any, base: Any) -> None:
    """Put the adapters of a layer where it computes. A trainable copy of ``base`` also gets its inputs there."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    parts = list(base.modules())
    devices = [device for part in parts if (device := module_hooks.execution_device(part)) is not None]
    if not devices:  # "cpu" is not offloading where the CPU computes
        devices = [tensor.device for tensor in base.parameters()]
    for adapter in layer._modules.values():
        if adapter not in (base, None) and devices:
            adapter.to(devices[0])
    for copied in getattr(layer, "modules_to_save", {}).values():
        for part, own in zip(parts, list(copied.modules())):
            device = module_hooks.execution_device(part)
            if device is not None:
                add_hook_to_module(own, AlignDevicesHook(execution_device=device))
