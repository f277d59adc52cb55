"""The merged weights of one module, computed by PEFT's own code.

A module of the base model is built by itself, in float32, at its own path. PEFT puts its layer on it, loads the
adapters' weights and merges. So the result is exactly PEFT's, rounded once.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from gemma4_compat._adapter_tools.merge.adapter import Adapter, kind_of
from gemma4_compat._adapter_tools.merge.weights import Weights
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters import matching
from gemma4_compat._gemma4.adapters.translation import PREFIX
from gemma4_compat._gemma4.checkpoint import shards

#: A linear beside the module, so that shared projections are as large as in the whole model.
_WIDEST = "widest"


def merged(
    path: str, model: Any, base: Weights, adapters: Sequence[Adapter], sources: Mapping[str, str]
) -> dict[str, Any]:
    """The weights of one module with the adapters in them, in float32, by their names in the model.

    Args:
        path: of the module.
        model: the model on meta.
        base: the weights to start from.
        adapters: what to merge; those without weights for the module are ignored.
        sources: tied parameter -> the parameter that holds its values.

    Raises:
        Gemma4CompatError: an adapter does not fit the module, or PEFT cannot merge it.
    """
    import torch

    module = copy.deepcopy(model.get_submodule(path))
    for name, _ in list(module.named_parameters()):
        full = f"{path}.{name}"
        replacing = next((adapter for adapter in adapters if full in adapter.replaced), None)
        if replacing is None:
            value = base.read(sources.get(full, full))
        else:
            value = shards.read(replacing.entries[replacing.replaced[full]])
        _put(module, name, torch.nn.Parameter(value.to(torch.float32), requires_grad=False))
    names = [name for name, _ in module.named_parameters()]
    shapes = ", ".join(f"{name} {list(module.get_parameter(name).shape)}" for name in names)
    host = _host(path, module)
    used = [adapter for adapter in adapters if path in adapter.modules]
    for adapter in used:
        _load(host, path, model, adapter, names, shapes)
    layer = host.get_submodule(path)
    for adapter in used:
        if adapter.weight != 1:
            layer.set_scale(adapter.name, adapter.weight)
    if (len(used) > 1 or any(adapter.weight != 1 for adapter in used)) and getattr(layer, "lora_variant", None):
        raise Gemma4CompatError(
            f"the adapter of {path} is a variant of LoRA that has no weighted sum; merge it by itself"
        )
    with torch.no_grad():
        values = _merge(layer, path, [adapter.name for adapter in used] if len(used) > 1 else None)
    return {f"{path}.{name}": value for name, value in values.items() if name in names}


def _load(host: Any, path: str, model: Any, adapter: Adapter, names: list[str], shapes: str) -> None:
    """Put one adapter on the module and load its weights."""
    from peft.utils.save_and_load import set_peft_model_state_dict

    keys = adapter.modules[path]
    weights = {key.removeprefix(PREFIX): shards.read(adapter.entries[key]) for key in keys}
    if kind_of(keys, adapter.config, path) == "tokens":
        weights = {key.replace(".token_adapter.", "."): value for key, value in weights.items()}
    shared = {key.removeprefix("base_model."): shards.read(adapter.entries[key]) for key in adapter.shared}
    config = _config_for(path, keys, adapter, model)
    try:
        _inject(host, config, adapter)
        before = set(host.state_dict())
        with warnings.catch_warnings():
            if shared:
                warnings.simplefilter("ignore")  # it says that PEFT makes new ones; they are set below
            result = set_peft_model_state_dict(host, weights, adapter_name=adapter.name)
        _set_shared(host.get_submodule(path), shared, adapter.name)
        if ranks := getattr(host.get_submodule(path), "ranknum", None):
            ranks[adapter.name].data.fill_(float(adapter.config.init_r))  # PEFT divides by the rank before pruning
    except (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError, AttributeError) as error:
        raise Gemma4CompatError(
            f"the adapter does not fit {path} ({shapes}): {' '.join(str(error).split())}. Its file holds "
            + ", ".join(f"{key.rpartition(path + '.')[2]} {list(value.shape)}" for key, value in weights.items())
        ) from error
    layer = host.get_submodule(path)
    parts = set(getattr(layer, "adapter_layer_names", ())) | {"token_adapter"}
    of_layer = [key for key in result.missing_keys if key in before and key.startswith(f"{path}.")]
    lost = [key for key in of_layer if adapter.name in key[len(path) + 1 :].split(".") or "token_adapter" in key]
    lost = [key for key in lost if parts & set(key[len(path) + 1 :].split("."))]
    lost = [key for key in lost if not key.endswith(tuple(f"base_layer.{name}" for name in names))]
    if lost or result.unexpected_keys:
        what = (
            f"lacks {lost[0]}" if lost else f"holds {result.unexpected_keys[0]}, which this configuration does not use"
        )
        raise Gemma4CompatError(f"the adapter's file and its configuration do not agree for {path}: the file {what}")


def _inject(host: Any, config: Any, adapter: Adapter) -> None:
    """Let PEFT put its layer on the module."""
    import torch
    from peft import inject_adapter_in_model
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    # PEFT's warnings about the type and ties of a model do not apply to this one-module model.
    if adapter.widest is None:
        inject_adapter_in_model(config, host, adapter_name=adapter.name)
    else:
        rows, columns = adapter.widest
        linear = torch.nn.Linear(columns, rows, bias=False, device="meta")
        linear.weight = torch.nn.Parameter(torch.zeros(1, 1).expand(rows, columns), requires_grad=False)
        host.add_module(_WIDEST, linear)
        PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](host, config, adapter.name)  # holds what its layers share


def _set_shared(layer: Any, shared: Mapping[str, Any], name: str) -> None:
    """Give the layer the projections that all layers of the adapter share."""
    for attribute, value in shared.items():
        held = getattr(layer, attribute)
        if held[name].shape != value.shape:
            raise ValueError(
                f"{attribute} is {list(value.shape)} in the file, and PEFT makes {list(held[name].shape)}"
            )
        held[name] = value.to(held[name].dtype)


def _merge(layer: Any, path: str, names: list[str] | None) -> dict[str, Any]:
    try:
        if hasattr(layer, "unload_and_optionally_merge_module"):
            plain = layer.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=names)
        else:
            layer.merge(safe_merge=True, adapter_names=names)
            plain = layer.get_base_layer()
    except (ValueError, NotImplementedError, RuntimeError, AttributeError) as error:
        raise Gemma4CompatError(f"PEFT cannot merge the adapter of {path}: {' '.join(str(error).split())}") from error
    return dict(plain.state_dict())


def _host(path: str, module: Any) -> Any:
    """An otherwise empty model with ``module`` at ``path``."""
    import torch

    root = torch.nn.Module()
    parent, *rest = root, *path.split(".")
    for part in rest[:-1]:
        child = torch.nn.Module()
        parent.add_module(part, child)
        parent = child
    parent.add_module(rest[-1], module)
    return root


def _put(module: Any, name: str, parameter: Any) -> None:
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, parameter)


def _config_for(path: str, keys: list[str], adapter: Adapter, model: Any) -> Any:
    """A copy of the adapter's configuration for this one module."""
    import peft

    config = adapter.config
    kind = kind_of(keys, config, path)
    single = copy.copy(config)
    single.inference_mode = True
    for attribute in ("exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"):
        if getattr(single, attribute, None) is not None:
            setattr(single, attribute, None)
    if adapter.shared:
        single.save_projection = False
    if getattr(single, "ensure_weight_tying", False):
        single.ensure_weight_tying = False  # the head of this model is another module
    if kind == "tokens":
        indices: Any = getattr(config, "token_indices", None) or getattr(config, "trainable_token_indices", None)
        if isinstance(indices, dict):
            indices = next(value for name, value in indices.items() if path == name or path.endswith(f".{name}"))
        return peft.TrainableTokensConfig(target_modules=[path], token_indices=list(indices), init_weights=True)
    if getattr(single, "trainable_token_indices", None):
        single.trainable_token_indices = None
    if kind == "target":
        single.target_modules = {path} if adapter.widest is None else {path, _WIDEST}
        if getattr(single, "target_parameters", None):
            single.target_parameters = None
    else:
        single.target_modules = set()
        own = dict(model.get_submodule(path).named_parameters(recurse=False))
        single.target_parameters = [
            name
            for name in config.target_parameters
            if any(full == name or full.endswith(f".{name}") for full in (f"{path}.{last}" for last in own))
        ]
    if getattr(single, "feedforward_modules", None):
        is_one = matching.names_module(single.feedforward_modules, path)
        single.feedforward_modules = {path} if is_one else set()
    if config.peft_type.value == "ADALORA":
        single.init_r = next(adapter.entries[key].shape[0] for key in keys if key.endswith(".lora_E"))
        single.rank_pattern = None  # the file has only the ranks that were kept
        return single
    for attribute in ("rank_pattern", "alpha_pattern"):
        if patterns := getattr(single, attribute, None):
            found = matching.pattern_for(patterns, path)
            setattr(single, attribute, {} if found is None else {re.escape(path): patterns[found]})
    return single
