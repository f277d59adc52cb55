"""Where accelerate put a module. Duck-typed on accelerate's hooks; imports nothing upstream."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.state import contents

#: Bytes that come from a device at a time, to be compared.
_AT_ONCE = 2**26


def offload_hook(module: Any) -> Any:
    """The ``AlignDevicesHook`` that onloads this module's own weights for a forward and offloads them; or None."""
    hook = getattr(module, "_hf_hook", None)
    for candidate in getattr(hook, "hooks", (hook,)):  # a SequentialHook holds several
        if getattr(candidate, "offload", False):
            return candidate
    return None


def execution_device(module: Any) -> Any:
    """The ``torch.device`` on which an offloaded module computes; None if its weights are not offloaded."""
    hook = offload_hook(module)
    return None if hook is None else _device(hook.execution_device)


def hook_device(module: Any, *, of_submodules: bool = False) -> Any:
    """The ``torch.device`` that a hook of ``module`` computes on, offloaded or not; None if no hook says so.

    With ``of_submodules``, only hooks count that also place the modules below this one.
    """
    hook = computing_hook(module, of_submodules=of_submodules)
    return None if hook is None else _device(hook.execution_device)


def computing_hook(module: Any, *, of_submodules: bool = False) -> Any:
    """The hook of ``module`` that :func:`hook_device` reads; or None."""
    hook = getattr(module, "_hf_hook", None)
    for candidate in getattr(hook, "hooks", (hook,)):
        # A hook without the second attribute (accelerate's CpuOffload) moves the whole module.
        if getattr(candidate, "execution_device", None) is not None and (
            not of_submodules or getattr(candidate, "place_submodules", True)
        ):
            return candidate
    return None


def _device(device: Any) -> Any:
    import torch

    if device is None:
        return None
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def is_offloaded(module: Any) -> bool:
    """Whether the module's own weights are on meta now, with a hook that can onload them."""
    return offload_hook(module) is not None and any(
        parameter.device.type == "meta" for parameter in module.parameters(recurse=False)
    )


def gemma4_forward(module: Any, ending: str) -> Callable[..., Any] | None:
    """The function that accelerate's hook on a module calls, if it is Gemma 4's and its name ends so."""
    function = getattr(vars(module).get("_old_forward"), "__func__", None)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    return function if name.startswith("transformers.models.gemma4") and name.endswith(ending) else None


def offload_tied(module: Any) -> None:
    """Put the module's own weights on meta if a hook offloads them and they are not there yet.

    accelerate leaves an offloaded weight on the device if it is tied to a weight there, until the first forward of its
    module: until then, the module does not look offloaded.
    """
    hook = offload_hook(module)
    if hook is None or is_offloaded(module) or not any(True for _ in module.parameters(recurse=False)):
        return
    hook.pre_forward(module)
    hook.post_forward(module, None)


def map_owner(model: Any) -> Any:
    """The object in a chain of PEFT wrappers whose own ``hf_device_map`` has CPU or disk entries; or None."""
    seen: set[int] = set()
    while model is not None and id(model) not in seen:
        seen.add(id(model))
        placement = vars(model).get("hf_device_map")
        if placement and {"cpu", "disk"} & {str(device) for device in placement.values()}:
            return model
        modules = vars(model).get("_modules", {})
        model = modules.get("base_model") or modules.get("model")
    return None


@contextlib.contextmanager
def seen_on_execution_device(module: Any) -> Iterator[None]:
    """Inside, an offloaded module's own parameters *look* as if they were on its execution device.

    For code that only reads ``weight.device`` and ``weight.dtype``: it finds empty parameters, and nothing is moved.
    Does nothing for a module that is not offloaded.
    """
    import torch

    if not is_offloaded(module):
        yield
        return
    device = execution_device(module)
    parameters = dict(module._parameters)
    for name, parameter in parameters.items():
        if parameter is not None and parameter.device.type == "meta":
            empty = torch.empty(0, dtype=parameter.dtype, device=device)
            module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
    try:
        yield
    finally:
        module._parameters.update(parameters)


@contextlib.contextmanager
def weights_brought_in(module: Any) -> Iterator[None]:
    """Inside, an offloaded module holds its real weights on its execution device and has no accelerate hook.

    So code can read, deep-copy and change it like any other module. Changed weights are kept in host memory from then
    on: those that are other tensors afterwards, and those that were written in place. No version counter sees all such
    writes (``weight.data -= x``, a view in numpy), so every weight is compared with the stored one, read again.
    Does nothing for a module that is not offloaded.
    """
    hook = offload_hook(module)
    if hook is None or not is_offloaded(module):
        yield
        return
    hook.pre_forward(module)
    before = {name: _identity(value) for name, value in _onloaded(module, hook)}
    try:
        with hooks_off([module]):
            yield
    finally:
        changed = {
            name: value.detach().to("cpu")
            for name, value in _onloaded(module, hook)
            if not value.is_meta and (before.get(name) != _identity(value) or not is_stored(hook, name, value))
        }
        for value in module._parameters.values():
            changed.update(_changed_scales(hook, value))
        if changed:
            hook.weights_map = collections.ChainMap(changed, hook.weights_map)
        hook.post_forward(module, None)


def _changed_scales(hook: Any, weight: Any) -> dict[str, Any]:
    """Have changed scales of a quantized weight kept on the host; returns those that the hook reads for itself."""
    attributes = {} if weight is None else vars(weight)
    state, scales = attributes.get("quant_state"), attributes.get("SCB")
    for held, origin in ((one, getattr(one, attached.ORIGIN, None)) for one in (state, scales)):
        if origin is None or getattr(held, "packing_format_for_cpu", False):
            continue
        named = ([("SCB", one)] if held is scales else contents.named_tensors(one) for one in (held, origin))
        pairs = zip(*named, strict=True)
        if not all(one.shape == other.shape and same_bytes(one, other) for (_, one), (_, other) in pairs):
            delattr(held, attached.ORIGIN)  # the next move to meta makes a copy
    with contextlib.suppress(KeyError):
        if scales is not None and not scales.is_meta and not is_stored(hook, "SCB", scales):
            return {"SCB": scales.detach().to("cpu")}
    return {}


def _onloaded(module: Any, hook: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of a module that its hook offloads after a forward, by name."""
    yield from module.named_parameters(recurse=False)
    for name, value in module.named_buffers(recurse=False) if hook.offload_buffers else ():
        if name not in module._non_persistent_buffers_set:
            yield name, value


def _identity(value: Any) -> tuple[int, int]:
    return id(value), value.data_ptr()


def is_stored(hook: Any, name: str, value: Any) -> bool:
    """Whether a hook would onload ``value``, a tensor on any device, as ``name``, bit for bit.

    True for a tensor subclass around other tensors, whose bytes cannot be compared.
    """
    import torch

    if type(value.data) is not torch.Tensor:
        return True
    stored = hook.weights_map[name]
    if stored.shape != value.shape:
        return False
    stored = stored.detach().to(value.dtype)  # as accelerate onloads it
    return same_bytes(stored, value)


def same_bytes(one: Any, other: Any) -> bool:
    """Whether two tensors of one shape and dtype, not on meta, are equal bit for bit; a NaN equals itself."""
    import torch

    if one.device == other.device and one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    parts = (tensor.detach().reshape(-1).view(torch.uint8).split(_AT_ONCE) for tensor in (one, other))
    return all(torch.equal(first.cpu(), second.cpu()) for first, second in zip(*parts, strict=True))


@contextlib.contextmanager
def hooks_off(modules: Iterable[Any]) -> Iterator[None]:
    """Inside, accelerate's hooks are off these modules: set aside, not detached, which would move weights."""
    taken: list[tuple[Any, dict[str, Any]]] = []
    for module in modules:
        attributes = vars(module)
        if "_hf_hook" in attributes and "_old_forward" in attributes:
            taken.append((module, {name: attributes.pop(name) for name in ("_hf_hook", "_old_forward", "forward")}))
            attributes["forward"] = taken[-1][1]["_old_forward"]
    try:
        yield
    finally:
        for module, attributes in taken:
            vars(module).update(attributes)


def hidden_map(model: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, a dispatched model hides its ``hf_device_map``. Does nothing for a model without one."""
    owner = map_owner(model)
    return contextlib.nullcontext() if owner is None else in_place.assigned(owner, "hf_device_map", in_place.ABSENT)
