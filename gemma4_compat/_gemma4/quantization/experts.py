"""The experts of a mixture of experts: their modules and parameters, and which of them are quantized.

:mod:`expert_storage` makes them 4-bit weights, :mod:`expert_forward` computes with these. Imports nothing upstream at
module level.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from gemma4_compat._engine.io.text import scaled_text
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.quantization import offloaded, opt_in
from gemma4_compat._gemma4.quantization.bytes import stored_bytes, stored_bytes_of

#: The classes of experts modules, which are copies of one another.
_CLASSES = ("Gemma4TextExperts", "DiffusionGemmaTextExperts")
#: The parameters of these experts, in every release.
NAMES = ("gate_up_proj", "down_proj")

_LOGGER = logging.getLogger("gemma4_compat")


def is_experts(module: Any) -> bool:
    """Whether this is the experts module of a decoder layer."""
    return any(base.__name__ in _CLASSES for base in type(module).__mro__)


def all_experts(model: Any) -> dict[str, Any]:
    """The experts modules of a model, by path."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def is_moe(model: Any) -> bool:
    """Whether this is a model with Gemma 4's experts."""
    return family.has_parts(model) and bool(all_experts(model))


def owner_of(model: Any, name: str) -> Any:
    """The experts module that owns the parameter with the path ``name``; None if it is something else."""
    path, _, last = name.rpartition(".")
    if last not in NAMES:
        return None
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return module if is_experts(module) else None


def quantized_parameter(module: Any, name: str) -> Any:
    """The 4-bit parameter ``name`` of an experts module (quantized, or to be quantized while loading); else None."""
    parameter = module._parameters.get(name) if is_experts(module) else None
    # Unpickling gives a plain parameter with the attributes of a Params4bit.
    return parameter if parameter is not None and "quant_state" in vars(parameter) else None


def tail_of(name: str) -> str | None:
    """The part of the name of an experts' parameter that all classes share: ``layers.<number>.experts.<name>``."""
    match = re.search(rf"(?:^|\.)(layers\.\d+\.experts\.(?:{'|'.join(NAMES)}))$", name)
    return match[1] if match else None


def report(model: Any, bits: int) -> None:
    """Log one line for a quantized model with unquantized experts: their size, and what to do.

    Like the line about offloaded modules it is a warning: a "4-bit" model of almost its original size looks like a
    defect.
    """
    plain: dict[str, int] = {}  # bytes by dtype
    counted: set[int] = set()  # experts may share their weights
    for module in all_experts(model).values():
        for name in NAMES:
            parameter = module._parameters.get(name)
            if parameter is not None and quantized_parameter(module, name) is None and id(parameter) not in counted:
                counted.add(id(parameter))
                kind = offloaded.precision(parameter)
                plain[kind] = plain.get(kind, 0) + stored_bytes(parameter)
    if not plain:
        return
    total = stored_bytes_of(model)
    hint = "load inside gemma4_compat.quantize(experts=True) to quantize them too"
    if bits != 4:
        hint = (
            f"experts can only be quantized to 4 bits (load_in_4bit, gemma4_compat.quantize(experts=True)), "
            f"not to {bits}"
        )
    elif opt_in.EXPERTS.is_enabled():
        hint = "they are skipped (llm_int8_skip_modules, offloaded), or are not a multiple of a block"
    _LOGGER.warning(
        "gemma4_compat: experts: %s of %s stay %s; %s",
        *(gigabytes(sum(plain.values())), gigabytes(total), " and ".join(sorted(plain)), hint),
    )


def gigabytes(nbytes: int) -> str:
    """``nbytes`` as text, in units of 1000."""
    return scaled_text(nbytes, base=1000, digits=1)


def refuse_merge(model: Any) -> None:
    """Raise :class:`Gemma4CompatError` if an adapter on 4-bit experts would be merged into them."""
    for name, module in model.named_modules():
        parameter = getattr(module, "parameter_name", None)
        if parameter is None or not hasattr(module, "get_base_layer"):
            continue
        if quantized_parameter(module.get_base_layer(), parameter) is not None:
            raise Gemma4CompatError(
                f"the adapter on {name!r} cannot be merged into experts in 4 bits. Nothing was changed. To merge "
                "without loss, merge into the unquantized checkpoint: gemma4-compat merge BASE ADAPTER FOLDER; or "
                "call dequantize() on this model before merging."
            )
