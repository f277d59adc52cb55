"""What ``adapter_config.json`` says: the PEFT type, the settings worth showing, the tool that wrote it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters.saved import CONFIG, SavedAdapter

#: PEFT's types, those of prompts first; the installed PEFT may know others.
_PROMPT_NAMES = "PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING CPT CARTRIDGE ADAPTION_PROMPT"
_NAMES = """
    LORA ADALORA ADAMSS BOFT IA3 BEFT LILY LOHA LOKR OFT POLY LN_TUNING VERA FROD PVERA FOURIERFT GLORA XLORA HRA
    VBLORA UNILORA MISS BONE RANDLORA ROAD TRAINABLE_TOKENS HIRA SHIRA C3A WAVEFT OSF DELORA GRALORA TINYLORA PSOFT
    PEANUT SHADOW SUPERTUNING DEFT
"""
PROMPTS = frozenset(_PROMPT_NAMES.split())
_TYPES = PROMPTS | frozenset(_NAMES.split())
#: Settings worth showing where they differ from these, PEFT's defaults.
_SETTINGS: dict[str, Any] = {
    "r": None,
    "lora_alpha": None,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": None,
    "alpha_pattern": None,
    "bias": "none",
    "target_modules": None,
    "exclude_modules": None,
    "target_parameters": None,
    "layers_to_transform": None,
    "layers_pattern": None,
    "layer_replication": None,
    "modules_to_save": None,
    "trainable_token_indices": None,
    "lora_bias": False,
    "fan_in_fan_out": False,
}


def peft_type(saved: SavedAdapter) -> str:
    """The adapter's PEFT type, such as "LORA".

    Raises:
        Gemma4CompatError: the file has none, or one that neither this package nor the installed PEFT knows.
    """
    name = saved.config.get("peft_type")
    if name is None:
        made_by = "; it looks like one of mlx-lm, which PEFT cannot load" if "lora_parameters" in saved.config else ""
        raise Gemma4CompatError(
            f"adapter_config.json in {str(saved.folder)!r} has no peft_type, so PEFT did not write it{made_by}"
        )
    if not isinstance(name, str) or (name not in _TYPES and name not in _installed_types()):
        raise Gemma4CompatError(
            f"the peft_type {reprlib.repr(name)} in {str(saved.folder / CONFIG)!r} is unknown, also to the "
            "installed PEFT; a newer one may have it: pip install -U peft"
        )
    return name


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not at PEFT's defaults."""
    changed = {}
    for name, default in _SETTINGS.items():
        value = config.get(name, default)
        if value != default and value not in ([], {}):
            changed[name] = sorted(value, key=str) if name == "target_modules" and isinstance(value, list) else value
    return changed


def saved_by(config: Mapping[str, Any]) -> str:
    """Tool and version that saved the adapter."""
    mapping = config.get("auto_mapping")
    tool = "Unsloth, " if isinstance(mapping, Mapping) and mapping.get("unsloth_fixed") else ""
    version = config.get("peft_version")
    return f"{tool}PEFT {version}" if version else f"{tool}PEFT"


def _installed_types() -> set[str]:
    try:
        from peft import PeftType
    except ModuleNotFoundError:
        return set()
    return {item.value for item in PeftType}
