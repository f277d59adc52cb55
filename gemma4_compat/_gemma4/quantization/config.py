"""How weights are stored: names of quantizations, and the modules they apply to."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from gemma4_compat._errors import Gemma4CompatError

#: How bitsandbytes stores weights; the names of the command line's ``--quantize`` (its "none" is None here).
QUANTIZATIONS = ("4bit", "4bit-double", "8bit")


def check(quantization: str, *, or_none: bool = False) -> None:
    """Raise :class:`Gemma4CompatError` for a name that is not one of :data:`QUANTIZATIONS`.

    ``or_none``: the caller also accepts unquantized weights, and the message says so.
    """
    if quantization not in QUANTIZATIONS:
        names = ", ".join(QUANTIZATIONS) + (", or none" if or_none else "")
        raise Gemma4CompatError(f"quantization {quantization!r} is unknown; use one of {names}")


def stored_settings(config: Any) -> dict[str, Any] | None:
    """The quantization a model's configuration describes, as plain data; None if the weights are not quantized."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    return dict(stored if isinstance(stored, dict) else stored.to_dict())


def name_of(settings: Mapping[str, Any]) -> str | None:
    """Which of :data:`QUANTIZATIONS` the settings of a quantization describe; None for another library's."""
    if settings.get("load_in_8bit"):
        return "8bit"
    if settings.get("load_in_4bit"):
        return "4bit-double" if settings.get("bnb_4bit_use_double_quant") else "4bit"
    return None


def bitsandbytes(
    quantization: str | None, dtype: Any, skip: Collection[str], *, offloads: bool, kind: str = "nf4"
) -> Any:
    """The ``BitsAndBytesConfig`` of one of :data:`QUANTIZATIONS`.

    Args:
        quantization: its name.
        dtype: that 4-bit layers compute in, torch's.
        skip: modules that are not quantized.
        offloads: whether some modules are off the GPU.
        kind: of the values of 4 bits.
    """
    from transformers import BitsAndBytesConfig

    options = {"llm_int8_enable_fp32_cpu_offload": offloads, "llm_int8_skip_modules": list(skip)}
    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True, **options)
    options |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": quantization == "4bit-double"}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **options)


def default_skip_modules(model: Any) -> list[str]:
    """``llm_int8_skip_modules`` for this model: the head, which shares the embedding's weight, and routers, which
    decide from small differences.
    """
    routed = any(path.endswith(".router.proj") for path, _ in model.named_modules())
    return ["lm_head", "router.proj"] if routed else ["lm_head"]


def converts(skip: Collection[str]) -> Callable[[str], bool]:
    """A function that says, by transformers' own rule, whether it quantizes a module or parameter with these
    ``llm_int8_skip_modules``.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    return lambda name: bool(should_convert_module(name, list(skip)))


def tied_linears(model: Any) -> frozenset[str]:
    """The linears that, by the model's configuration, share a weight with a module of another class, such as
    ``lm_head`` with the embedding. Works on meta, where nothing is tied yet.
    """
    import torch

    paths = {path for paths in _tied_modules(model) if not _are_alike(model, paths) for path in paths}
    return frozenset(name for name in paths if type(model.get_submodule(name)) is torch.nn.Linear)


#: A tensor of a module in a layer: its module and its name. Detectors tie heads, whose own linears are ``layers.0``.
_IN_LAYER = re.compile(r"((?:.+\.)?layers\.\d+\..+)\.(\w+)")


def tied_layers(model: Any) -> dict[str, str]:
    """The tensors that layers share by the model's configuration, each to its source: of one name, in modules of the
    same class. They can be quantized, as all are or none is.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    pairs = {pair: [_IN_LAYER.fullmatch(name) for name in pair] for pair in tied.items()}
    modules = dict(model.named_modules()) if any(map(all, pairs.values())) else {}

    def kind(found: re.Match[str]) -> tuple[type, str]:
        return type(modules.get(found[1])), found[2]  # a model may have fewer layers than when it was made

    return dict(pair for pair, (one, other) in pairs.items() if one and other and kind(one) == kind(other))


def _tied_modules(model: Any) -> list[set[str]]:
    """The paths of the modules that share each tied weight."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    groups: dict[str, set[str]] = {}
    for target, source in tied.items():
        if target.endswith(".weight") and source.endswith(".weight"):
            groups.setdefault(source, {source.rpartition(".")[0]}).add(target.rpartition(".")[0])
    return list(groups.values())


def _are_alike(model: Any, paths: Iterable[str]) -> bool:
    return len({type(model.get_submodule(path)) for path in paths}) == 1


def linear_names(model: Any, skip: Collection[str]) -> frozenset[str]:
    """The linears that transformers quantizes with these ``llm_int8_skip_modules``."""
    import torch

    chosen = converts(skip)
    return frozenset(
        name for name, module in model.named_modules() if type(module) is torch.nn.Linear and chosen(name)
    )
