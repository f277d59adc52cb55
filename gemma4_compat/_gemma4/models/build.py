"""Building a Gemma 4 on the meta device from a configuration: no weights, no accelerator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import arguments, files
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint import folders
from gemma4_compat._gemma4.models import variants

_CLASSES = {
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
}


def on_meta(model: Any) -> tuple[Any, str, str]:
    """The model on meta, the class name for ``from_pretrained``, and what was assumed.

    Args:
        model: a folder with a ``config.json``, the id of a cached model, a variant, a configuration, or a model,
            which is returned unchanged.

    Raises:
        Gemma4CompatError: it is not a Gemma 4, or there is no configuration for it.
    """
    refuse_unknown(model)
    import torch
    import transformers

    if isinstance(model, torch.nn.Module) and hasattr(model, "config"):
        return model, str(getattr(model, "name_or_path", "")) or "MODEL", ""
    assumed = ""
    if own := isinstance(model, transformers.PretrainedConfig):
        config, name = model, str(model.name_or_path or "MODEL")
    else:
        config, name, assumed = _configuration(_name(model))
    wanted = _CLASSES.get(config.model_type)
    if wanted is None:
        raise Gemma4CompatError(
            f"{str(model)!r} is a {config.model_type} model, not a Gemma 4; known are {', '.join(sorted(_CLASSES))}"
        )
    named = (config.architectures or [wanted])[0]
    if named.startswith("Gemma4") and hasattr(transformers, named):
        wanted = named
    try:
        with torch.device("meta"):
            return getattr(transformers, wanted)._from_config(config, dtype=torch.bfloat16), name, assumed
    except Exception as error:
        if own:
            raise
        raise Gemma4CompatError(
            f"no model can be built from config.json in {name!r}: {type(error).__name__}: {_line(error)}"
        ) from error


def refuse_unknown(model: Any) -> None:
    """Refuse a folder or an id of which nothing is here, before torch and transformers are imported.

    Raises:
        Gemma4CompatError: it is neither a folder with a ``config.json`` nor a variant, nor a model in the cache.
    """
    if isinstance(model, (str, os.PathLike)):
        _found(_name(model))


def _name(model: Any) -> str:
    if isinstance(model, (str, os.PathLike)) and isinstance(text := os.fspath(model), str):
        return text
    raise Gemma4CompatError(
        f"the model is {arguments.shown(model)}; give a folder, an id, a variant ({', '.join(variants.NAMES)}), a "
        "Gemma 4 configuration, or a transformers model"
    )


def _found(model: str) -> tuple[str | None, Path | None]:
    """The variant that a name means, and the file with the configuration; one of them may be None."""
    from gemma4_compat._engine.io import json_files
    from gemma4_compat._engine.io.formats import ModelConfig

    variant, local = variants.find(model), files.exists(Path(model), "folder")
    if variant is not None and not local and "/" not in model:
        return variant, None
    if not local and not folders.may_be_id(model):
        instead = ", ".join(variants.NAMES) if variant is None else variant
        raise Gemma4CompatError(
            f"the folder {model!r} does not exist; give that of a checkpoint, an id on the hub, "
            f"or a variant ({instead})"
        )
    file = Path(model) / "config.json" if local else folders.cached(model, "config.json")
    if local and not (file is not None and files.exists(file)):
        raise Gemma4CompatError(f"there is no config.json in the folder {model!r}; give the folder of a checkpoint")
    if file is not None:
        json_files.settings(file, ModelConfig)  # refuses wrong types, or too many layers, before they are built
    elif variant is None:
        raise Gemma4CompatError(
            f"{model!r} is not a folder, not a variant ({', '.join(variants.NAMES)}) and not a model in the cache of "
            f"the hub; give one of these, or fetch its configuration with: hf download {model} config.json"
        )
    return None if local else variant, file


def _configuration(model: str) -> tuple[Any, str, str]:
    from transformers import AutoConfig

    variant, file = _found(model)
    if variant is not None and file is None:
        if "/" not in model:
            return variants.config(variant), f"google/gemma-4-{variant}-it", variants.ASSUMED
        return variants.config(variant), model, f"{model} is neither a folder nor in the cache: {variants.ASSUMED}"
    try:
        # The cache is enough: nothing is downloaded. Code from the folder does not run, and nobody is asked whether
        # to.
        return AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False), model, ""
    except ImportError:  # the libraries' fault, not the file's
        raise
    except Exception as error:
        if variant is not None:
            return variants.config(variant), model, f"{model} is neither a folder nor in the cache: {variants.ASSUMED}"
        raise Gemma4CompatError(f"the configuration in {model!r} cannot be read: {_line(error)}") from error


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
