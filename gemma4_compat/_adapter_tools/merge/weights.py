"""The weights a merge starts from: the tensors of a checkpoint by the names of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._checkpoint import shards
from gemma4_compat._checkpoint.shards import Entry
from gemma4_compat._errors import Gemma4CompatError

#: What bitsandbytes keeps beside a quantized weight on disk.
_STATE = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.")


@dataclass
class Base:
    """The base checkpoint by the names of the model.

    Attributes:
        disk: name of a parameter or buffer -> its tensor on disk.
        keys: the same name -> its key on disk.
        rest: tensors on disk that the model does not have (copied unchanged).
        round_trip: quantizes and dequantizes a weight; None to keep weights as stored.
        quantized: names of the weights that are, or would be, quantized.
        stored: weight -> the tensors that bitsandbytes stores beside it.
    """

    disk: dict[str, Entry]
    keys: dict[str, str]
    rest: dict[str, Entry]
    quantized: frozenset[str] = frozenset()
    round_trip: Callable[[Any], Any] | None = None
    stored: dict[str, dict[str, Entry]] = field(default_factory=dict)

    def read(self, name: str) -> Any:
        """The values of one weight from which the merge starts."""
        entry = self.disk[name]
        if name in self.stored:
            return dequantized(entry, self.stored[name])
        tensor = shards.read(entry)
        if name in self.quantized and self.round_trip is not None:
            return self.round_trip(tensor)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the weight, not that of its packed form."""
        if name not in self.stored:
            return self.disk[name].shape
        return tuple(_state(self.stored[name]).shape) if _packed(self.stored[name]) else self.disk[name].shape

    def pieces(self, name: str) -> Iterator[Any]:
        """The weight that :meth:`read` returns, in pieces if it is only copied."""
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
            "them. Its config.json and its weights belong to different models"
        )
    for name, entry in base.disk.items():
        if name not in base.stored and entry.shape != shapes[name]:
            raise Gemma4CompatError(
                f"{name} is {list(entry.shape)} in the weights and {list(shapes[name])} by config.json: they "
                "belong to different models"
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
        settings: those of a ``BitsAndBytesConfig``; only ``bnb_4bit_quant_type`` matters.
        dtype: of the weight when it is quantized; if 16-bit, the one given to ``from_pretrained``.
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
    """The dequantized values of a weight that is quantized on disk."""
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
