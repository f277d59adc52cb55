"""The weights a merge starts from: the tensors of a checkpoint, as stored or as bitsandbytes computes with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._engine.io import address
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._gemma4.checkpoint.shards import Entry
from gemma4_compat._gemma4.quantization import config, qat

BASES = ("original", "dequantized")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: The quantization for "dequantized" if neither the base nor the caller states one.
ASSUMED = "4bit-double"
#: What bitsandbytes keeps beside a quantized weight on disk.
_STATE = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.")


@dataclass(frozen=True)
class Start:
    """Which values of the base's weights a merge starts from.

    Attributes:
        name: one of :data:`BASES`.
        quantize: the quantization behind "dequantized"; None for "original".
        assumed: whether ``quantize`` is :data:`ASSUMED` because nothing states it.
        stored: whether the base is quantized on disk.
        settings: those of a ``BitsAndBytesConfig``.
        skip: modules that are not quantized.
    """

    name: str
    quantize: str | None = None
    assumed: bool = False
    stored: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    skip: tuple[str, ...] = ()


def choose(model: Any, name: str, quantize: Any, skip_modules: Sequence[str] | None) -> Start:
    """The :class:`Start` called ``name`` for this base.

    Raises:
        Gemma4CompatError: the options contradict each other or the base.
    """
    if isinstance(skip_modules, str):
        raise Gemma4CompatError(
            f"skip_modules must be a list of names, not {skip_modules!r}; write [{skip_modules!r}]"
        )
    if not (quantize is None or isinstance(quantize, str) or hasattr(quantize, "to_dict")):
        raise Gemma4CompatError(f"quantize must be 4bit, 8bit or a BitsAndBytesConfig, not {quantize!r}")
    given = quantize.to_dict() if hasattr(quantize, "to_dict") else quantize
    if isinstance(given, str):
        config.check(given)
    stored = config.stored_settings(model.config)
    if qat.is_method(stored):
        raise Gemma4CompatError(
            "the base is one of Google's QAT checkpoints (quant_method 'gemma'): it has no weights to merge into. "
            "Load it with from_pretrained, call model.dequantize() and model.save_pretrained(FOLDER), and give that "
            "folder"
        )
    if name == "original":
        if stored is not None:
            raise Gemma4CompatError(
                "the base is quantized on disk: there are no high-precision weights in it. Give the checkpoint it was "
                "made from, or take what the adapter was trained on: --start dequantized (start='dequantized')"
            )
        if given is not None or skip_modules is not None:
            raise Gemma4CompatError(
                "quantize and skip_modules are for --start dequantized (start='dequantized'): they say how the base "
                "was quantized. For a quantized result: --quantize-result 4bit (quantize_result='4bit')"
            )
        return Start(name)
    if not versions.installed("bitsandbytes"):
        raise Gemma4CompatError(f"--start dequantized needs bitsandbytes: {address.install('stack')}")
    if stored is not None:
        quantization = _quantization_of(stored)
        requested = given if given is None or isinstance(given, str) else _quantization_of(given)
        if requested not in (None, quantization):
            raise Gemma4CompatError(f"the base is quantized on disk, as {quantization}; leave --quantize out")
        skipped = tuple(stored.get("llm_int8_skip_modules") or ())
        return Start(name, quantization, stored=True, settings=stored, skip=skipped)
    if isinstance(given, dict):
        skip = given.get("llm_int8_skip_modules") if skip_modules is None else skip_modules
        settings, quantization = given, _quantization_of(given)
    else:
        skip, settings, quantization = skip_modules, {"bnb_4bit_quant_type": "nf4"}, given or ASSUMED
    chosen = config.default_skip_modules(model) if skip is None else list(skip)
    return Start(name, quantization, given is None, False, settings, tuple(chosen))


def _quantization_of(settings: Mapping[str, Any]) -> str:
    if (name := config.name_of(settings)) is not None:
        return name
    raise Gemma4CompatError(
        f"the quantization {settings.get('quant_method')!r} is not bitsandbytes' 4-bit or 8-bit; give the checkpoint "
        "the base was made from, with --start original"
    )


def stored_dtype(model: Any, entries: Mapping[str, Entry], start: Start) -> str:
    """The dtype of most of the base's values, a key of :data:`DTYPES`; bf16 if a quantized base does not state one."""
    import torch

    names = {value: key for key, value in DTYPES.items()}
    if start.stored:
        stated = str(getattr(model.config, "dtype", None) or torch.bfloat16).removeprefix("torch.")
        return names.get(stated, "bf16")
    sizes: dict[str, int] = {}
    for entry in entries.values():
        if entry.dtype in names:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
    return names[max(sizes, key=lambda name: sizes[name])] if sizes else "bf16"


def apply(start: Start, base: Weights, model: Any, dtype: str) -> None:
    """Set which weights of ``base`` are, or would be, quantized, and how they are read.

    Args:
        start: which values a merge starts from.
        base: changed in place.
        model: the model on meta.
        dtype: of the merged weights, a key of :data:`DTYPES`.

    Raises:
        Gemma4CompatError: the weights on disk contradict ``config.json``.
    """
    import torch

    if start.name == "original":
        if base.stored:
            raise Gemma4CompatError(
                "the base's weights are quantized on disk, though its config.json does not say so; give the "
                "checkpoint they were made from"
            )
        return
    if start.stored:
        if not base.stored:
            raise Gemma4CompatError("config.json says that the base is quantized, but none of its weights are")
        return
    assert start.quantize is not None
    names = config.linear_names(model, start.skip)
    base.quantized = frozenset(f"{name}.weight" for name in names if f"{name}.weight" in base.disk)
    base.round_trip = quantizer(start.quantize, start.settings, getattr(torch, DTYPES[dtype]))


def is_exact_in_4bit(start: Start, base: Weights) -> bool:
    """Whether bitsandbytes computes with exactly the weights that the merge starts from.

    8-bit layers also round their inputs, by more than the merge changes; 4-bit blocks must fill rows.
    """
    return start.quantize != "8bit" and all(base.shape(name)[-1] % 64 == 0 for name in base.quantized)


def quantization_config(start: Start, dtype: Any) -> Any:
    """The ``BitsAndBytesConfig`` that loads the base quantized; ``dtype`` is torch's."""
    kind = start.settings.get("bnb_4bit_quant_type", "nf4")
    return config.bitsandbytes(start.quantize, dtype, start.skip, offloads=True, kind=kind)


@dataclass
class Weights:
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


def find_base(entries: Mapping[str, Entry], model: Any) -> Weights:
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
    base = Weights({}, {}, {})
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
