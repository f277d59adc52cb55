"""Read the description of a saved PEFT adapter: ``adapter_config.json`` and the header of the weights.

No weights are read, no pickle is opened, no upstream library is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import arguments, files, json_files
from gemma4_compat._engine.io import patterns as patterned
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters import translation
from gemma4_compat._gemma4.checkpoint import folders, header

#: Exceptions of PEFT, torch and ``re`` for settings that they cannot use.
REFUSALS = (
    ValueError,
    TypeError,
    RuntimeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    re.error,
)
CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"

#: Types whose weights have a side of length ``r``. (LoKr takes the whole matrix if ``r`` is larger.)
_OF_RANK = ("LORA", "HRA", "LOHA", "MISS", "BONE")

#: Where, in a key, the name of the base module ends and the tuner's part begins.
_TUNER = re.compile(
    r"\.(?:lora_|base_layer|modules_to_save|token_adapter|trainable_tokens_|ia3_|hada_|lokr_|oft_|boft_|vera_|pvera_|"
    r"vblora_|randlora_|fourierft_|waveft_|hra_|miss_|bone_|c3a_|shira_|road_|delora_|gralora_|adamss_|hira_|"
    r"ln_tuning_layers)"
)


@dataclass(frozen=True)
class SavedAdapter:
    """The description of an adapter.

    Attributes:
        folder: with its files.
        config: ``adapter_config.json``.
        tensors: by key, in the order of the file.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, header.Tensor]


def read(adapter: str | os.PathLike[str]) -> SavedAdapter:
    """Read the description of the adapter in a folder, or of one in the cache of the hub by its id.

    Raises:
        Gemma4CompatError: there is no adapter, it is a pickle, or a file is damaged. The message names the file and
            the remedy.
    """
    folder = _folder(adapter)
    if not files.exists(folder / CONFIG):
        raise _no_config(folder)
    if not files.exists(folder / WEIGHTS):
        raise _no_weights(folder)
    return SavedAdapter(folder, configuration(folder / CONFIG), header.header(folder / WEIGHTS))


def module_of(key: str) -> str:
    """The module of a key, derived only from its text, without PEFT's prefix."""
    path = _TUNER.split(key.removeprefix(translation.PREFIX), maxsplit=1)[0]
    return path.removesuffix(".weight").removesuffix(".bias")


def first_line(error: Exception) -> str:
    """An error that is one of :data:`REFUSALS`, in a line."""
    said = (str(error).strip().splitlines() or ["without a reason"])[0][:300]
    return f"{type(error).__name__}: {said}"


def configuration(file: Path) -> dict[str, Any]:
    """The settings in an ``adapter_config.json``.

    Raises:
        Gemma4CompatError: it is damaged, or a setting has the wrong type.
    """
    from gemma4_compat._engine.io.formats import AdapterConfig

    return json_files.settings(file, AdapterConfig)


def refuse_unbounded(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], modules: Iterable[str]
) -> None:
    """Refuse settings that make PEFT use far more memory or time than the size of the files explains.

    Args:
        folder: of the adapter.
        config: its settings.
        shapes: of its tensors, by key.
        modules: names of the base's modules.

    Raises:
        Gemma4CompatError: a rank is larger than everything in the file, or a pattern takes too long to match.
    """
    where = repr(str(folder / CONFIG))
    largest = max((extent for shape in shapes.values() for extent in shape), default=0)
    patterns = config.get("rank_pattern")
    ranks = {"r": config.get("r"), **(patterns if isinstance(patterns, dict) else {})}
    if str(config.get("peft_type")).rpartition(".")[2] in _OF_RANK:
        for name, rank in ranks.items():
            if isinstance(rank, int) and rank > largest:
                raise Gemma4CompatError(
                    f"{name} in {where} is {rank}, and the longest side of a weight beside it is {largest}: "
                    "configuration and weights belong to two different adapters"
                )
    patterned.refuse_slow(config, [*modules, *map(module_of, shapes)], where)


def _folder(adapter: str | os.PathLike[str]) -> Path:
    path = arguments.path(adapter, "adapter")
    if files.exists(path, "folder"):
        return path
    if files.exists(path):
        raise Gemma4CompatError(f"{str(path)!r} is a file; give the folder that it is in")
    name = os.fspath(adapter)
    if "/" in name and folders.may_be_id(name):
        cached = folders.cached(name, CONFIG)
        if cached is not None:
            return cached.parent
        raise Gemma4CompatError(
            f"{name!r} is neither a folder nor an adapter in the cache of the hub; fetch it with: "
            f"hf download {name} {CONFIG} {WEIGHTS}"
        )
    raise Gemma4CompatError(f"the folder {name!r} does not exist; give the folder of a saved adapter")


def _no_config(folder: Path) -> Gemma4CompatError:
    if (folder / WEIGHTS).is_file() or (folder / PICKLE).is_file():
        name = WEIGHTS if (folder / WEIGHTS).is_file() else PICKLE
        return Gemma4CompatError(
            f"there is {name} in {str(folder)!r} but no {CONFIG}, without which PEFT cannot load it; copy it from "
            "where the adapter was saved"
        )
    inside = sorted(file.parent.name for file in folder.glob(f"*/{CONFIG}"))
    if inside:
        return Gemma4CompatError(
            f"{str(folder)!r} is not a saved adapter, but holds some: {', '.join(inside)}. Give one of these folders"
        )
    model = ", but the folder of a model, which comes after the adapter" if (folder / "config.json").is_file() else ""
    return Gemma4CompatError(f"{str(folder)!r} is not a saved adapter{model}: there is no {CONFIG} in it")


def _no_weights(folder: Path) -> Gemma4CompatError:
    if (folder / PICKLE).is_file():
        return Gemma4CompatError(
            f"{str(folder / PICKLE)!r} is a pickle, which runs code when it is read, so it is not read. If you trust "
            "it, load the adapter with PEFT and save_pretrained() it: that writes safetensors"
        )
    index = folder / f"{WEIGHTS}.index.json"
    if index.is_file():
        return Gemma4CompatError(
            f"{str(index)!r} says that the weights are in several files, which PEFT neither writes nor loads; join "
            f"them into {WEIGHTS}"
        )
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    there = f"; there is {', '.join(others)}, which PEFT does not look for" if others else ""
    return Gemma4CompatError(f"{str(folder)!r} is not a saved adapter: there is no {WEIGHTS} in it{there}")
