"""The weights a merge starts from: the base as stored on disk, or quantized by bitsandbytes and dequantized again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._adapter_tools.merge import weights
from gemma4_compat._adapter_tools.merge.weights import Base
from gemma4_compat._checkpoint.shards import Entry
from gemma4_compat._engine import versions
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._quantization import config, qat

BASES = ("original", "dequantized")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: The quantization for "dequantized" if neither the base nor the caller states one.
ASSUMED = "4bit-double"


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
    stored = getattr(model.config, "quantization_config", None)
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
        raise Gemma4CompatError("--start dequantized needs bitsandbytes: pip install 'gemma4-compat[stack]'")
    if stored is not None:
        settings = stored if isinstance(stored, dict) else stored.to_dict()
        quantization = _quantization_of(settings)
        requested = given if given is None or isinstance(given, str) else _quantization_of(given)
        if requested not in (None, quantization):
            raise Gemma4CompatError(f"the base is quantized on disk, as {quantization}; leave --quantize out")
        skipped = tuple(settings.get("llm_int8_skip_modules") or ())
        return Start(name, quantization, stored=True, settings=settings, skip=skipped)
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


def apply(start: Start, base: Base, model: Any, dtype: str) -> None:
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
    base.round_trip = weights.quantizer(start.quantize, start.settings, getattr(torch, DTYPES[dtype]))


def is_exact_in_4bit(start: Start, base: Base) -> bool:
    """Whether bitsandbytes computes with exactly the weights that the merge starts from.

    8-bit layers also round their inputs, by more than the merge changes; 4-bit blocks must fill rows.
    """
    return start.quantize != "8bit" and all(base.shape(name)[-1] % 64 == 0 for name in base.quantized)


def quantization_config(start: Start, dtype: Any) -> Any:
    """The ``BitsAndBytesConfig`` that loads the base quantized; ``dtype`` is torch's."""
    from transformers import BitsAndBytesConfig

    skip = list(start.skip)
    if start.quantize == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip, llm_int8_enable_fp32_cpu_offload=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=start.settings.get("bnb_4bit_quant_type", "nf4"),
        bnb_4bit_use_double_quant=start.quantize == "4bit-double",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=skip,
        llm_int8_enable_fp32_cpu_offload=True,
    )
