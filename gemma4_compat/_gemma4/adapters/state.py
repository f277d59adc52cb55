"""``load_state_dict`` for the few weights of an adapter in a model of thousands of modules.

Torch's own function passes every module the weights below it, found by comparing names at every level. Here each key
is looked up. Anything unusual (unexpected keys, weights below a module with its own loading method, hooks that run
after a load, an error) is left to torch's function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemma4_compat._gemma4.models import walk


def load(model: Any, weights: Any, strict: bool = True, assign: bool = False) -> Any:
    """``model.load_state_dict``, with the same results."""
    found = None if strict or assign or type(weights) is not dict else _load(model, weights)
    return type(model).load_state_dict(model, weights, strict, assign) if found is None else found


def _load(model: Any, weights: Mapping[str, Any]) -> Any:
    """The result; None if torch's own function must do it."""
    import torch
    from torch.nn.modules.module import _IncompatibleKeys

    plain = torch.nn.Module
    if type(model).load_state_dict is not plain.load_state_dict:
        return None
    owned: dict[str, dict[str, Any]] = {}
    above: set[str] = set()
    for key, value in weights.items():
        owner = key.rpartition(".")[0] + "."
        owned.setdefault(owner, {})[key] = value
        while owner not in above:
            above.add(owner)
            owner = owner[:-1].rpartition(".")[0] + "."
    found = walk.named_modules(model, remove_duplicate=False)
    modules = [(f"{name}." if name else "", module) for name, module in found]  # prefixes, as torch has them
    kinds: dict[type, bool] = {}
    known = dict(modules)
    for owner, here in owned.items():
        module = known.get(owner)
        if module is None or not all(_is_own(module, key[len(owner) :], value) for key, value in here.items()):
            return None
    special = {prefix for prefix, module in modules if not _is_plain(module, kinds)}
    for prefix, module in modules:
        if module._load_state_dict_post_hooks or (prefix in special and (module._modules or prefix in above)):
            return None
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    for prefix, module in modules:
        here = owned.get(prefix, {})
        if here or prefix in special:
            module._load_from_state_dict(here, prefix, {}, True, missing, unexpected, errors)
        else:
            left_out = module._non_persistent_buffers_set
            missing += [prefix + name for name, value in module._parameters.items() if value is not None]
            missing += [
                prefix + name for name, value in module._buffers.items() if value is not None and name not in left_out
            ]
    return None if errors or unexpected else _IncompatibleKeys(missing, unexpected)


def _is_own(module: Any, name: str, value: Any) -> bool:
    own = module._parameters.get(name)
    return own is not None and getattr(value, "shape", None) == own.shape


def _is_plain(module: Any, kinds: dict[type, bool]) -> bool:
    """Whether the module loads as ``nn.Module`` does; ``kinds`` caches the answer by class."""
    import torch

    kind, plain = type(module), torch.nn.Module
    if kind not in kinds:
        own = kind._load_from_state_dict is not plain._load_from_state_dict
        kinds[kind] = not own and kind.set_extra_state is plain.set_extra_state
    return kinds[kind] and not module._load_state_dict_pre_hooks
