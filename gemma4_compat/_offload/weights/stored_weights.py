"""Offloaded weights, read and replaced where they are stored.

accelerate's hook reads an offloaded weight for each forward: from a dict in host memory, or from an index of files.
:func:`write` stores another value: in host memory in place of the old one; on disk in a file of its own, because the
old file may be the checkpoint's, or serve another model. Row lookup, module groups and accelerate's map of tied
weights, which keep the old value, notice that.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat._gemma4.quantization import quant_states
from gemma4_compat._offload import host_memory

_log = logging.getLogger("gemma4_compat")

#: A parameter: its module, and its name there.
Place = tuple[Any, str]


def read(module: Any, name: str) -> Any:
    """The value that a module uses as its parameter ``name``: on its device, or on the host if it is offloaded."""
    parameter, hook = holder(module, name)[name], module_hooks.offload_hook(module)
    if hook is None:
        return parameter.data
    return host_memory.stored(hook.weights_map, name).tensor.to(parameter.dtype)


def write(module: Any, name: str, value: Any, *, in_place: bool = True) -> None:
    """Store ``value`` as the offloaded parameter ``name`` of ``module``, and leave the parameter on meta.

    Not between the hook's ``pre_forward`` and its ``post_forward``.

    Args:
        module: has a hook that offloads its weights.
        name: of one of its parameters, or of an offloaded buffer.
        value: of any shape and dtype.
        in_place: write into the host memory of the old value, which may be pinned, or another module's tied weight.
            Otherwise, and if that memory has another shape or dtype, keep the tensor itself if it is on the host.
    """
    with outside_inference():
        value = value.detach().cpu()
        store(module_hooks.offload_hook(module), name, value, in_place=in_place)
        leave_on_meta(module, name, value)


def write_scales(module: Any, scales: Any) -> None:
    """Store the scales of the offloaded 8-bit weight of ``module``: the tensor itself, if it is on the host."""
    with outside_inference():
        scales = scales.detach().cpu()
        vars(scales)[quant_states.PRISTINE] = True
        vars(module._parameters["weight"])["SCB"] = scales
        with contextlib.suppress(KeyError):  # they may also be in accelerate's map
            store(module_hooks.offload_hook(module), "SCB", scales)


def is_same(first: Place, second: Place) -> bool:
    """Whether two modules compute with the same values, bit for bit."""
    return equal(read(*first), read(*second))


def holds(module: Any, name: str, value: Any) -> bool:
    """Whether this value is already stored as the offloaded parameter ``name`` of ``module``, bit for bit."""
    return equal(host_memory.stored(module_hooks.offload_hook(module).weights_map, name).tensor, value.detach())


def equal(a: Any, b: Any) -> bool:
    """Whether two tensors, not on meta, are equal bit for bit."""
    if a.shape != b.shape or a.dtype != b.dtype or "meta" in (a.device.type, b.device.type):
        return False
    return module_hooks.same_bytes(a, b)


@contextlib.contextmanager
def replaced(model: Any) -> Iterator[None]:
    """Around code that replaces parameters of modules: afterwards those of offloaded modules are stored.

    Upstream leaves such a parameter where it was put; the module's next forward would use the old value.
    """
    before = {
        (module, name): parameter
        for module in walk.modules(model)
        if module_hooks.offload_hook(module) is not None
        for name, parameter in module._parameters.items()
    }
    try:
        yield
    except BaseException:
        for (module, name), parameter in before.items():
            module._parameters[name] = parameter
        raise
    for (module, name), parameter in before.items():
        now, hook = module._parameters.get(name), module_hooks.offload_hook(module)
        if now is None or now is parameter or now.device.type == "meta" or hook is None:
            continue
        if host_memory.stored(hook.weights_map, name).on_disk and holds(module, name, now):
            with outside_inference():
                leave_on_meta(module, name, now)
        else:  # in host memory also the same value: upstream's is no longer that of the weight it was tied to
            write(module, name, now, in_place=False)


def store(hook: Any, name: str, value: Any, *, in_place: bool = False) -> None:
    """Replace the tensor that a hook reads as ``name`` by a tensor on the host.

    Raises:
        KeyError: the hook reads nothing with that name.
    """
    import torch

    place = host_memory.stored(hook.weights_map, name)
    if place.on_disk and (entry := _written(place, value)) is not None:
        place.index[place.key] = entry  # type: ignore[index]
        place.forget_casts()
    elif in_place and place.holder is not None and _fits(place.raw, value):
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a forward may still be reading it
        place.raw.copy_(value)
        place.forget_casts()
    elif place.holder is not None:
        forget_address(hook, place.raw)
        place.replace(value)
    else:
        hook.weights_map = collections.ChainMap({name: value}, hook.weights_map)
    # A new object: anything that keeps what it has read compares it.
    hook.weights_map = copy.copy(hook.weights_map)


def forget_address(hook: Any, tensor: Any) -> None:
    """Remove an address, which may soon belong to another tensor, from accelerate's map of tied weights."""
    if hook.tied_params_map:
        hook.tied_params_map.pop(tensor.data_ptr(), None)


def _fits(stored: Any, value: Any) -> bool:
    same = (stored.shape, stored.dtype, stored.device) == (value.shape, value.dtype, value.device)
    return same and not stored.is_inference()


def _written(place: Any, value: Any) -> dict[str, Any] | None:
    """The entry of a new file with ``value``; None, with a line in the log, if the file cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    reason = "no offload_folder was given"
    if place.folder is not None:
        path = Path(place.folder, f"{place.key}-{uuid.uuid4().hex[:8]}.safetensors")
        try:
            save_file({place.key: value.contiguous()}, path)
        except (OSError, SafetensorError) as error:  # the disk is full, or the folder is gone
            reason = " ".join(str(error).split())
            path.unlink(missing_ok=True)
        else:
            dtype = str(value.dtype).removeprefix("torch.")
            return {"safetensors_file": _File(path), "weight_name": place.key, "dtype": dtype}
    _say_kept(reason, place.folder, place.key, value.nbytes / 2**30)
    return None


def _say_kept(reason: str, folder: Any, key: str, size: float) -> None:
    """Log once per folder and reason: a merge changes hundreds of weights."""
    if (reason, folder) not in _said:
        _said.add((reason, folder))
        _log.warning(
            "gemma4_compat: the new value of the offloaded weight %r (%.2f GiB), and of others after it, is "
            "kept in host memory: %s",
            *(key, size, reason),
        )


_said: set[tuple[str, Any]] = set()


class _File(str):
    """The path of a file that is deleted with the last index that refers to it. Copies of a model share it."""

    def __new__(cls, path: Path) -> _File:
        file = super().__new__(cls, path)
        weakref.finalize(file, _delete, str(path)).atexit = False
        return file

    def __deepcopy__(self, _memo: Any) -> _File:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def _delete(path: str) -> None:
    with contextlib.suppress(OSError):  # on Windows, while it is mapped
        Path(path).unlink()


def holder(module: Any, name: str) -> dict[str, Any]:
    """The dict of the module that has the tensor ``name``."""
    return module._parameters if name in module._parameters else module._buffers  # type: ignore[no-any-return]


def leave_on_meta(module: Any, name: str, value: Any) -> None:
    import torch

    if name in module._buffers:
        module._buffers[name] = value.to("meta")
        return
    parameter = module._parameters[name]
    if type(parameter) is torch.nn.Parameter:
        module._parameters[name] = torch.nn.Parameter(value.to("meta"), requires_grad=parameter.requires_grad)
        return
    meta = torch.Tensor._make_subclass(type(parameter), value.to("meta"), parameter.requires_grad)
    vars(meta).update(vars(parameter))  # a quantized one has its state there
    module._parameters[name] = meta


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """Inside, new tensors are like those of a loaded model, even in inference mode."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        yield
