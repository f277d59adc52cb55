"""The weights a merge starts from, and the merged weights of one module. The mathematics is PEFT's own.

A module of the base model is built alone, in float32, at its own path; PEFT puts its layer on it, loads the adapter's
weights for it and merges. So the result is exactly PEFT's, rounded once.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._adapters import matching
from gemma4_compat._adapters.translation import PREFIX
from gemma4_compat._checkpoint import shards
from gemma4_compat._checkpoint.shards import Entry
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._merge.adapter import Adapter, kind_of

#: What bitsandbytes keeps beside a quantized weight on disk.
_STATE = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.")


@dataclass
class Base:
    """The base checkpoint by the names of the model.

    Attributes:
        disk: name of a parameter or buffer -> its tensor on disk.
        keys: the same name -> its key on disk.
        rest: tensors on disk that the model does not have (copied unchanged).
        round_trip: quantizes and dequantizes a weight; None to take weights as they are.
        quantized: names of the weights that are, or would be, quantized.
        stored: weight -> the tensors that bitsandbytes stores with it.
    """

    disk: dict[str, Entry]
    keys: dict[str, str]
    rest: dict[str, Entry]
    quantized: frozenset[str] = frozenset()
    round_trip: Callable[[Any], Any] | None = None
    stored: dict[str, dict[str, Entry]] = field(default_factory=dict)

    def read(self, name: str) -> Any:
        """One weight, as the merge starts from it."""
        entry = self.disk[name]
        if name in self.stored:
            return dequantized(entry, self.stored[name])
        tensor = shards.read(entry)
        if name in self.quantized and self.round_trip is not None:
            return self.round_trip(tensor)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the weight, not of its packed form."""
        if name not in self.stored:
            return self.disk[name].shape
        return tuple(_state(self.stored[name]).shape) if _packed(self.stored[name]) else self.disk[name].shape

    def pieces(self, name: str) -> Iterator[Any]:
        """The weight that :meth:`read` returns, in pieces where it is only copied."""
        if name in self.stored or (name in self.quantized and self.round_trip is not None):
            yield self.read(name)
        else:
            yield from shards.pieces(self.disk[name])


def find_base(entries: Mapping[str, Entry], model: Any) -> Base:
    """Match the tensors on disk with those of the model.

    Args:
        entries: of the checkpoint.
        model: the model on meta.

    Raises:
        Gemma4CompatError: weights of the model are missing, or have other shapes.
    """
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    parameters = set(shapes)
    shapes |= {name: tuple(value.shape) for name, value in model.named_buffers(remove_duplicate=False)}
    renamings = _renamings(model)
    base = Base({}, {}, {})
    extra: dict[str, Entry] = {}
    for key, entry in entries.items():
        name = next((name for name in _names_of(key, renamings) if name in shapes), None)
        if name is None:
            extra[key] = entry
        else:
            base.disk[name], base.keys[name] = entry, key
    for key, entry in extra.items():
        owner = _owner(key)
        name = next((name for name in _names_of(owner, renamings) if name in base.disk), None) if owner else None
        if name is None:
            base.rest[key] = entry
        else:
            base.stored.setdefault(name, {})[key.removeprefix(base.keys[name]).removeprefix(".")] = entry
    base.quantized = frozenset(base.stored)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {}) | set(model._tied_weights_keys or {})
    missing = parameters - set(base.disk) - tied
    if missing:
        raise Gemma4CompatError(
            f"the base has no weight for {len(missing)} parameters of {type(model).__name__}, {min(missing)!r} among "
            "them. Its config.json and its weights are not of the same model"
        )
    for name, entry in base.disk.items():
        if name not in base.stored and entry.shape != shapes[name]:
            raise Gemma4CompatError(
                f"{name} is {list(entry.shape)} in the weights and {list(shapes[name])} by config.json: they are not "
                "of the same model"
            )
    return base


def _names_of(key: str, renamings: list[Any]) -> Iterator[str]:
    yield key
    yield f"model.{key}"
    yield key.removeprefix("model.")
    for renaming in renamings:
        key = renaming.rename_source_key(key)[0]
    yield key


def _renamings(model: Any) -> list[Any]:
    """What transformers renames when it loads this model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return [item for item in get_model_conversion_mapping(model) if type(item).__name__ == "WeightRenaming"]


def _owner(key: str) -> str | None:
    """The weight on disk that this tensor of bitsandbytes belongs to."""
    for mark in _STATE:
        if mark in key:
            return key.partition(mark)[0]
    for end in (".SCB", ".weight_format"):
        if key.endswith(end):
            return key.removesuffix(end) + ".weight"
    return None


def quantizer(quantize: str, settings: Mapping[str, Any], dtype: Any) -> Callable[[Any], Any]:
    """A function that quantizes a weight with bitsandbytes and dequantizes it again.

    Args:
        quantize: "4bit", "4bit-double" or "8bit".
        settings: of a ``BitsAndBytesConfig``; ``bnb_4bit_quant_type`` counts.
        dtype: the weight's when it is quantized; a 16-bit one is what ``from_pretrained`` was told.
    """
    import torch
    from bitsandbytes import functional

    if quantize == "8bit":

        def round_trip(weight: Any) -> Any:
            codes, scales = functional.int8_vectorwise_quant(weight.to(torch.float16))[:2]
            return codes.float() * (scales.float()[:, None] / 127)

    else:
        kind = settings.get("bnb_4bit_quant_type", "nf4")

        def round_trip(weight: Any) -> Any:
            packed, state = functional.quantize_4bit(
                weight.to(dtype), blocksize=64, compress_statistics=quantize == "4bit-double", quant_type=kind
            )
            return functional.dequantize_4bit(packed, state).reshape(weight.shape)

    return round_trip


def dequantized(entry: Entry, stored: Mapping[str, Entry]) -> Any:
    """The values of a weight that is quantized on disk."""
    from bitsandbytes import functional

    packed = shards.read(entry)
    if not _packed(stored):
        return packed.float() * (shards.read(stored_part(stored, "SCB")).float()[:, None] / 127)
    state = _state(stored)
    return functional.dequantize_4bit(packed, state).reshape(state.shape)


def _packed(stored: Mapping[str, Entry]) -> bool:
    return not any(key.endswith("SCB") for key in stored)


def stored_part(stored: Mapping[str, Entry], end: str) -> Entry:
    """The tensor of bitsandbytes with a key that ends in ``end``."""
    return next(entry for key, entry in stored.items() if key.endswith(end))


def _state(stored: Mapping[str, Entry]) -> Any:
    from bitsandbytes.functional import QuantState

    return QuantState.from_dict({key: shards.read(entry) for key, entry in stored.items()}, device="cpu")


def merged(path: str, model: Any, base: Base, adapter: Adapter, sources: Mapping[str, str]) -> dict[str, Any]:
    """The weights of one module with the adapter in them, in float32, by their names in the model.

    Args:
        path: of the module.
        model: the model on meta.
        base: the weights to start from.
        adapter: what to merge.
        sources: tied parameter -> the parameter that holds its values.

    Raises:
        Gemma4CompatError: the adapter does not fit the module, or PEFT cannot merge it.
    """
    import torch
    from peft import inject_adapter_in_model
    from peft.utils.save_and_load import set_peft_model_state_dict

    module = copy.deepcopy(model.get_submodule(path))
    for name, _ in list(module.named_parameters()):
        full = f"{path}.{name}"
        key = adapter.replaced.get(full)
        value = (base.read(sources.get(full, full)) if key is None else shards.read(adapter.entries[key])).to(
            torch.float32
        )
        _put(module, name, torch.nn.Parameter(value, requires_grad=False))
    names = [name for name, _ in module.named_parameters()]
    host = _host(path, module)
    keys = adapter.modules[path]
    weights = {key.removeprefix(PREFIX): shards.read(adapter.entries[key]) for key in keys}
    if kind_of(keys, adapter.config, path) == "tokens":
        weights = {key.replace(".token_adapter.", "."): value for key, value in weights.items()}
    try:
        # PEFT's warnings about the type and ties of a model do not apply to this one-module model.
        inject_adapter_in_model(_config_for(path, keys, adapter.config, model), host)
        before = set(host.state_dict())
        result = set_peft_model_state_dict(host, weights)
    except (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError, AttributeError) as error:
        raise Gemma4CompatError(
            f"the adapter does not fit {path} ({_shapes(module, names)}): {' '.join(str(error).split())}. Its file "
            "holds "
            + ", ".join(f"{key.rpartition(path + '.')[2]} {list(value.shape)}" for key, value in weights.items())
        ) from error
    layer = host.get_submodule(path)
    parts = set(getattr(layer, "adapter_layer_names", ())) | {"token_adapter"}
    lost = [key for key in result.missing_keys if key in before and parts & set(key[len(path) + 1 :].split("."))]
    lost = [key for key in lost if not key.endswith(tuple(f"base_layer.{name}" for name in names))]
    if lost or result.unexpected_keys:
        what = (
            f"lacks {lost[0]}" if lost else f"holds {result.unexpected_keys[0]}, which this configuration does not use"
        )
        raise Gemma4CompatError(f"the adapter's file and its configuration do not agree for {path}: the file {what}")
    with torch.no_grad():
        values = _merge(layer, path)
    return {f"{path}.{name}": value for name, value in values.items() if name in names}


def _merge(layer: Any, path: str) -> dict[str, Any]:
    try:
        if hasattr(layer, "unload_and_optionally_merge_module"):
            plain = layer.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
        else:
            layer.merge(safe_merge=True)
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


def _config_for(path: str, keys: list[str], config: Any, model: Any) -> Any:
    """A copy of ``config`` for this one module."""
    import peft

    kind = kind_of(keys, config, path)
    single = copy.copy(config)
    single.inference_mode = True
    for attribute in ("exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"):
        if getattr(single, attribute, None) is not None:
            setattr(single, attribute, None)
    if kind == "tokens":
        indices: Any = getattr(config, "token_indices", None) or getattr(config, "trainable_token_indices", None)
        if isinstance(indices, dict):
            indices = next(value for name, value in indices.items() if path == name or path.endswith(f".{name}"))
        return peft.TrainableTokensConfig(target_modules=[path], token_indices=list(indices), init_weights=True)
    if getattr(single, "trainable_token_indices", None):
        single.trainable_token_indices = None
    if kind == "target":
        single.target_modules = {path}
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
    for attribute in ("rank_pattern", "alpha_pattern"):
        if patterns := getattr(single, attribute, None):
            found = matching.pattern_for(patterns, path)
            setattr(single, attribute, {} if found is None else {re.escape(path): patterns[found]})
    return single


def _shapes(module: Any, names: list[str]) -> str:
    return ", ".join(f"{name} {list(module.get_parameter(name).shape)}" for name in names)
