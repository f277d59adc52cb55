"""Offloaded weights that are read and replaced where they are stored, and tied ones that are apart.

accelerate's hook reads an offloaded weight for each forward: from a dict in host memory, or from an index of files.
:func:`write` puts another value there: in host memory in place of the old one; on disk into a file of its own, because
the old one may be the checkpoint's, or serve another model. Whatever keeps the old value (row lookup, module groups,
accelerate's map of tied weights) notices.

Weights that are tied on one device are apart where a device map separates their modules: each has its own copy.
:func:`tie` gives one the value of the other.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gemma4_compat._models import placement, walk
from gemma4_compat._offload import host_memory
from gemma4_compat._quantization import quant_states

_log = logging.getLogger("gemma4_compat")

#: A parameter: the module that has it, and its name there.
Place = tuple[Any, str]


def read(module: Any, name: str) -> Any:
    """The value with which a module computes as its parameter ``name``: on its device, or offloaded, on the host."""
    parameter, hook = holder(module, name)[name], placement.offload_hook(module)
    if hook is None:
        return parameter.data
    return host_memory.stored(hook.weights_map, name).tensor.to(parameter.dtype)


def write(module: Any, name: str, value: Any, *, in_place: bool = True) -> None:
    """Store ``value`` as the offloaded parameter ``name`` of ``module``, and leave that on meta.

    Not between the hook's ``pre_forward`` and its ``post_forward``.

    Args:
        module: has a hook that offloads its weights.
        name: of one of its parameters, or of a buffer that is offloaded.
        value: of any shape and dtype.
        in_place: write into the host memory of the old value, which may be pinned, or another module's tied weight;
            else, and where that has another shape or dtype, the tensor itself is kept if it is on the host.
    """
    with outside_inference():
        value = value.detach().cpu()
        store(placement.offload_hook(module), name, value, in_place=in_place)
        _leave_on_meta(module, name, value)


def write_scales(module: Any, scales: Any) -> None:
    """Store the scales of the offloaded 8-bit weight of ``module``: the tensor itself, if it is on the host."""
    with outside_inference():
        scales = scales.detach().cpu()
        vars(scales)[quant_states.PRISTINE] = True
        vars(module._parameters["weight"])["SCB"] = scales
        with contextlib.suppress(KeyError):  # accelerate's map has them as well, or has not
            store(placement.offload_hook(module), "SCB", scales)


def is_same(first: Place, second: Place) -> bool:
    """Whether two modules compute with the same values, bit for bit."""
    return equal(read(*first), read(*second))


def holds(module: Any, name: str, value: Any) -> bool:
    """Whether this value is already stored as the offloaded parameter ``name`` of ``module``, bit for bit."""
    return equal(host_memory.stored(placement.offload_hook(module).weights_map, name).tensor, value.detach())


def is_shared(model: Any, name: str, owner: str) -> bool:
    """Whether two parameters of a model, below the layers of adapters, have the same values."""
    first, second = _place(model, name), _place(model, owner)
    return first is not None and second is not None and is_same(first, second)


def pairs(model: Any, *, declared: bool = False) -> list[tuple[Place, Place]]:
    """Target and source of each tied weight of a model, offloaded or not; with ``declared`` also of what the model
    would tie, and has not.
    """
    names = dict(getattr(model, "all_tied_weights_keys", None) or {})
    if declared:
        names.update(model.get_expanded_tied_weights_keys(all_submodels=True))
    found = [(_place(model, target), _place(model, source)) for target, source in names.items()]
    return [(target, source) for target, source in found if target and source]


def equal(a: Any, b: Any) -> bool:
    """Whether two tensors, not on meta, are the same, bit for bit."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype or "meta" in (a.device.type, b.device.type):
        return False
    if a.device == b.device and a.data_ptr() == b.data_ptr():
        return True
    # Bytes, not numbers: a NaN is not equal to itself.
    return bool(torch.equal(*(part.cpu().contiguous().view(-1).view(torch.uint8) for part in (a, b))))


def tied(model: Any, *, declared: bool = False) -> list[tuple[Place, Place]]:
    """Target and source of each tied weight with one of the two offloaded.

    A target that shares the weight of an adapter's copy is left out, but not with ``declared`` (see :func:`pairs`).
    """
    return [
        (target, source)
        for target, source in pairs(model, declared=declared)
        if (declared if placement.COPYS_WEIGHT in vars(target[0]) else is_apart(target, source))
    ]


def is_apart(target: Place, source: Place) -> bool:
    """Whether one of two tied weights is offloaded."""
    return any(placement.offload_hook(module) for module, _ in (target, source))


def _place(model: Any, name: str) -> Place | None:
    """Where a parameter is, below the layers of adapters; None where there is none of that name."""
    path, _, attribute = name.rpartition(".")
    module = model
    for part in path.split("."):
        module = getattr(module, "_modules", {}).get(part)
    while module is not None and attribute not in module._parameters:
        inside = module._modules
        module = inside.get("base_layer") or inside.get("original_module") or inside.get("token_adapter")
    return None if module is None or module._parameters[attribute] is None else (module, attribute)


def tie(target: Place, source: Place) -> None:
    """Give ``target`` the value of ``source``, in the place where it is. One of them, or both, are offloaded."""
    import torch

    (module, name), (owner, owners_name) = target, source
    parameter, owners = module._parameters[name], owner._parameters[owners_name]
    hook = placement.offload_hook(module)
    if hook is None:
        if parameter.device.type == "meta" or not is_same(target, source):
            device = placement.hook_device(module) if parameter.device.type == "meta" else parameter.device
            with outside_inference():
                value = read(*source)
                if (parameter.device, parameter.shape, parameter.dtype) == (device, value.shape, value.dtype):
                    parameter.data.copy_(value)  # an optimizer may have it
                else:
                    value = value.to(device, copy=True)
                    module._parameters[name] = torch.nn.Parameter(value, requires_grad=owners.requires_grad)
            _serve_from(source, target)
    elif not is_same(target, source):
        with outside_inference():
            value = read(*source).cpu()
            if not _link(target, source):
                store(hook, name, value)
            _leave_on_meta(module, name, value)
        _serve_from(target, source)


@contextlib.contextmanager
def replaced(model: Any) -> Iterator[None]:
    """Around code that gives modules other parameters: those of offloaded modules are stored afterwards.

    Upstream leaves such a parameter where it was put; the module's next forward would compute with the old value.
    """
    before = {
        (module, name): parameter
        for module in walk.modules(model)
        if placement.offload_hook(module) is not None
        for name, parameter in module._parameters.items()
    }
    try:
        yield
    except BaseException:
        for (module, name), parameter in before.items():
            module._parameters[name] = parameter
        raise
    for (module, name), parameter in before.items():
        now, hook = module._parameters.get(name), placement.offload_hook(module)
        if now is None or now is parameter or now.device.type == "meta" or hook is None:
            continue
        if host_memory.stored(hook.weights_map, name).on_disk and holds(module, name, now):
            with outside_inference():
                _leave_on_meta(module, name, now)
        else:  # in host memory also the same value: upstream's is no longer that of the weight it was tied to
            write(module, name, now, in_place=False)


@contextlib.contextmanager
def gathered(model: Any, getters: list[Callable[[], Any]], device: Any = None) -> Iterator[None]:
    """Inside, modules have their weights and no accelerate hooks, and what is tied is one parameter.

    Afterwards everything is where it was, with the weights as they are then. Does nothing where none of the modules
    is offloaded.

    Args:
        model: declares which weights are tied.
        getters: each returns one of the modules, or None. Afterwards it may be another module.
        device: where the weights go; None for that on which their module computes.
    """
    roots = [(getter, root) for getter in getters if (root := getter()) is not None]
    parts = {part: dict(part._parameters) for _, root in roots for part in root.modules() if "_hf_hook" in vars(part)}
    if not any(placement.offload_hook(part) for part in parts):
        yield
        return
    pairs = [pair for pair in tied(model) if all(module in parts for module, _ in pair)]
    for part in parts:
        _bring(part, device)
    for (module, name), (owner, owners_name) in pairs:
        if placement.offload_hook(module) is None:  # the one that stays on its device is both
            owner._parameters[owners_name] = module._parameters[name]
        else:
            module._parameters[name] = owner._parameters[owners_name]
    inside = {part: {name: _identity(value) for name, value in part._parameters.items()} for part in parts}
    try:
        with placement.hooks_off(parts):
            yield
    finally:
        now = {root: getter() for getter, root in roots}
        targets, pairs_changed = {target for target, _ in pairs}, []
        for part, before in parts.items():
            if now.get(part, part) is not part:
                _move_hook(part, now[part])
            tied_names = {name for module, name in targets if module is part}
            changed = _put_back(now.get(part, part), before, inside[part], tied_names)
            pairs_changed += [pair for pair in pairs for name in changed if (part, name) in pair]
        for target, source in pairs_changed:
            tie(*((now.get(module, module), name) for module, name in (target, source)))


def _bring(part: Any, device: Any) -> None:
    import torch

    hook = placement.offload_hook(part)
    where = placement.hook_device(part) if device is None else device
    for name, parameter in part._parameters.items():
        if parameter is None or (hook is None and (where is None or parameter.device == torch.device(where))):
            continue
        if type(parameter) is not torch.nn.Parameter:  # quantized: where it computes
            hook.pre_forward(part)
            return
        value = read(part, name).to(where)
        part._parameters[name] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)


def _put_back(part: Any, before: dict[str, Any], inside: dict[str, Any], tied_names: set[str]) -> list[str]:
    """Put the parameters of a module back where they were; returns the names of those with other values."""
    import torch

    changed = []
    offloaded = placement.offload_hook(part) is not None
    for name, parameter in part._parameters.items():
        if parameter is None:
            continue
        if inside[name] == _identity(parameter):
            part._parameters[name] = before[name]
            continue
        changed.append(name)
        if offloaded and name in tied_names:  # stored with the weight that owns it
            _leave_on_meta(part, name, parameter)
        elif offloaded:
            write(part, name, parameter)
        elif parameter.device != before[name].device:
            value = parameter.data.to(before[name].device)
            part._parameters[name] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    return changed


def _identity(parameter: Any) -> Any:
    return None if parameter is None else (id(parameter), parameter.data_ptr(), parameter.shape, parameter._version)


def _move_hook(old: Any, new: Any) -> None:
    """Give ``new`` the hook of ``old``, as it is: it places nothing."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(new, ModelHook())
    vars(new).update(
        {name: value for name, value in vars(old).items() if name in ("_hf_hook", placement.COPYS_WEIGHT)}
    )


def store(hook: Any, name: str, value: Any, *, in_place: bool = False) -> None:
    """Replace what a hook reads as ``name`` by a tensor on the host.

    Raises:
        KeyError: it reads nothing of that name.
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
    # Another object: those that keep what they have read compare it.
    hook.weights_map = copy.copy(hook.weights_map)


def forget_address(hook: Any, tensor: Any) -> None:
    """Take an address that may soon be another tensor's out of accelerate's map of tied weights."""
    if hook.tied_params_map:
        hook.tied_params_map.pop(tensor.data_ptr(), None)


def _fits(stored: Any, value: Any) -> bool:
    same = (stored.shape, stored.dtype, stored.device) == (value.shape, value.dtype, value.device)
    return same and not stored.is_inference()


def _link(target: Place, source: Place) -> bool:
    """Let both read the same tensor, or the same file; False where their weights are stored in different ways."""
    hooks = placement.offload_hook(target[0]), placement.offload_hook(source[0])
    if hooks[1] is None:
        return False
    mine, theirs = (host_memory.stored(hook.weights_map, name) for hook, (_, name) in zip(hooks, (target, source)))
    if mine.holder is not None and theirs.holder is not None and not theirs.casts:
        store(hooks[0], target[1], theirs.raw)
        return True
    if mine.index is None or theirs.index is None or theirs.is_recast:
        return False
    if "safetensors_file" not in theirs.index[theirs.key]:
        return False
    mine.index[mine.key] = {"weight_name": theirs.key, **theirs.index[theirs.key]}
    mine.forget_casts()
    hooks[0].weights_map = copy.copy(hooks[0].weights_map)
    return True


def _written(place: Any, value: Any) -> dict[str, Any] | None:
    """The entry of a new file with ``value``; None where none can be written, with a line in the log."""
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
    """Once for each folder and reason: a merge changes hundreds of weights."""
    if (reason, folder) not in _said:
        _said.add((reason, folder))
        _log.warning(
            "gemma4_compat: the new value of the offloaded weight %r (%.2f GiB), and of others after it, is "
            "kept in host memory: %s",
            *(key, size, reason),
        )


_said: set[tuple[str, Any]] = set()


class _File(str):
    """The path of a file that is deleted with the last index that has it. Copies of a model share it."""

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
    """Which of the module's dicts has the tensor ``name``."""
    return module._parameters if name in module._parameters else module._buffers  # type: ignore[no-any-return]


def _leave_on_meta(module: Any, name: str, value: Any) -> None:
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


def _serve_from(offloaded: Place, resident: Place) -> None:
    """Let accelerate take a weight in host memory from the module that has it on the device, as after a dispatch."""
    hook, parameter = placement.offload_hook(offloaded[0]), resident[0]._parameters[resident[1]]
    if hook is None or placement.offload_hook(resident[0]) is not None or offloaded[1] not in hook.tied_params_names:
        return
    place = host_memory.stored(hook.weights_map, offloaded[1])
    if not place.on_disk and parameter.device == placement.execution_device(offloaded[0]):
        hook.tied_params_map[place.raw.data_ptr()] = {hook.execution_device: parameter}


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """New tensors inside are as those that a model is loaded with, in inference mode, too."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        yield
