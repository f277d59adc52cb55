"""``tie_weights`` of a split model, also where the embedding has a trainable copy (``modules_to_save``).

Upstream ties the head to the weight that the embedding computes with: the active adapter's copy, if there is one. A
copy is on the device, and the head shares its parameter, as on one device: it learns with the copy, and keeps the
weight when the adapter is deleted. Meanwhile the head is not offloaded. The next ``tie_weights`` to the embedding's
own weight offloads it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat._offload.weights import stored_weights, tied_pairs
from gemma4_compat._offload.weights.stored_weights import Place


@contextlib.contextmanager
def tied_apart(model: Any) -> Iterator[None]:
    """Around a ``tie_weights``: tied weights stay in place, with the value of the owner.

    Upstream makes the modules share one parameter, even one on meta. Does nothing if nothing is offloaded.
    """
    if not any(
        module_hooks.offload_hook(module) or attached.COPYS_WEIGHT in vars(module) for module in walk.modules(model)
    ):
        yield
        return
    pairs = tied_pairs.tied(model, declared=True)
    before = {place: place[0]._parameters[place[1]] for pair in pairs for place in pair}
    yield
    for target, source in pairs:
        (module, name), was_copys = target, attached.COPYS_WEIGHT in vars(target[0])
        shared = module._parameters[name]
        if shared is source[0]._parameters[source[1]]:
            _offload_again(target, shared is not before[target])
            if shared is not before[target] and tied_pairs.is_apart(target, source):
                module._parameters[name] = before[target]
                if was_copys:  # it keeps its value
                    module._parameters[name] = _like(target, shared)
                tied_pairs.tie(target, source)
        elif shared is not before[target]:
            copied = next((place for place in _copies(model) if place[0]._parameters[place[1]] is shared), None)
            if copied is not None:
                module._parameters[name] = before[target]
                share(target, copied)


@contextlib.contextmanager
def kept(model: Any) -> Iterator[None]:
    """Around code that may replace the parameter of one of two tied weights: afterwards both have the same value.

    If both get a new parameter, and the values differ, they are no longer tied.
    """
    pairs = [
        (pair, [module._parameters[name] for module, name in pair])
        for pair in tied_pairs.pairs(model)
        if stored_weights.is_same(*pair)
    ]
    yield
    for (target, source), before in pairs:
        now = [module._parameters[name] for module, name in (target, source)]
        changed = [new is not old for new, old in zip(now, before)]
        if not any(changed) or (all(changed) and not stored_weights.is_same(target, source)):
            continue
        first, second = (target, source) if changed[1] else (source, target)
        if tied_pairs.is_apart(target, source):
            tied_pairs.tie(first, second)
        else:
            first[0]._parameters[first[1]] = second[0]._parameters[second[1]]


def share(target: Place, copied: Place) -> None:
    """Have ``target`` share the weight of an adapter's copy, and not be offloaded while it does."""
    (module, name), parameter = target, copied[0]._parameters[copied[1]]
    own: dict[str, Any] = module.__dict__
    hook = module_hooks.offload_hook(module)
    if module_hooks.offload_hook(copied[0]) is not None or not _computes_on(module, parameter.device):
        tied_pairs.tie(target, copied)
        own[attached.COPYS_WEIGHT] = None
        return
    module._parameters[name] = parameter
    own.setdefault(attached.COPYS_WEIGHT, None)
    if hook is not None:
        hook.offload, own[attached.COPYS_WEIGHT] = False, hook


def _computes_on(module: Any, device: Any) -> bool:
    own = module_hooks.hook_device(module)
    return own is None or (own.type == device.type and own.index in (None, device.index))


def shared_with_copies(model: Any) -> list[tuple[Place, Place]]:
    """Before a dispatch: the parameters that adapters' copies also have, each with the copy's."""
    if any(attached.COPYS_WEIGHT in vars(module) for module in walk.modules(model)):
        for target, source in tied_pairs.tied(model, declared=True):
            if target[0]._parameters[target[1]] is source[0]._parameters[source[1]]:  # the copy is the embedding now
                target[0].__dict__.pop(attached.COPYS_WEIGHT, None)
    copies = {id(module._parameters[name]): (module, name) for module, name in _copies(model)}
    inside = {module for module, _ in copies.values()}
    return [
        ((module, name), copies[id(parameter)])
        for module in walk.modules(model)
        if copies and module not in inside
        for name, parameter in module._parameters.items()
        if id(parameter) in copies
    ]


def _copies(model: Any) -> list[Place]:
    """The parameters of adapters' copies of modules."""
    wrappers = [module._modules.get("modules_to_save") for module in walk.modules(model)]
    copies = [part for wrapper in wrappers if wrapper is not None for part in wrapper.modules()]
    return [(part, name) for part in copies for name, value in part._parameters.items() if value is not None]


def _offload_again(target: Place, tied_anew: bool) -> None:
    """Undo :func:`share`; the caller takes care of the weight itself."""
    attributes: dict[str, Any] = target[0].__dict__
    hook, own = attributes.pop(attached.COPYS_WEIGHT, None), attributes.get("_hf_hook")
    if tied_anew and hook is not None and hook in getattr(own, "hooks", (own,)):  # not one of an earlier dispatch
        hook.offload = True


def _like(target: Place, owners: Any) -> Any:
    import torch

    with stored_weights.outside_inference():
        offloaded = module_hooks.offload_hook(target[0]) is not None
        value = owners.data.to("meta") if offloaded else target[0]._parameters[target[1]].data.clone()
        return torch.nn.Parameter(value, requires_grad=owners.requires_grad)
