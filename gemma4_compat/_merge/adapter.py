"""Open a saved adapter for a merge: translate its keys to the base model, and sort them by what they change."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma4_compat._adapters import matching, saved
from gemma4_compat._adapters import translation as translations
from gemma4_compat._adapters.saved import CONFIG, PICKLE, WEIGHTS
from gemma4_compat._checkpoint import shards
from gemma4_compat._checkpoint.shards import Entry
from gemma4_compat._errors import Gemma4CompatError, Gemma4CompatWarning
from gemma4_compat._merge import folders

#: PEFT types with independent layers, which can be built and merged one at a time.
TYPES = (
    "BOFT",
    "FOURIERFT",
    "HRA",
    "IA3",
    "LN_TUNING",
    "LOHA",
    "LOKR",
    "LORA",
    "MISS",
    "OFT",
    "TRAINABLE_TOKENS",
)
_PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT")
_TOKENS = "trainable_tokens_delta"


@dataclass
class Adapter:
    """A saved adapter and what it changes in one base model.

    Attributes:
        folder: of an adapter that PEFT loads onto this model unchanged: the given one, or the folder for a translated
            copy, which :func:`write_copy` writes.
        config: PEFT's configuration of it.
        entries: the tensors by the key PEFT uses for this model (without an adapter name).
        modules: path of a module -> keys of the adapter's weights there.
        replaced: parameter or buffer of the model -> key of the value it gets (modules_to_save, trained biases).
        unused: keys in the file for modules that this model never uses.
        absent: modules that the configuration targets and the file has no weights for.
        translated: whether the file has other keys.
        copied: whether PEFT needs a copy in ``folder``.
    """

    folder: Path
    config: Any
    entries: Mapping[str, Entry]
    modules: dict[str, list[str]] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    translated: bool = False
    copied: bool = False

    @property
    def nbytes_to_copy(self) -> int:
        """Bytes of the weights that :func:`write_copy` writes."""
        return sum(entry.nbytes for entry in self.entries.values()) if self.copied else 0


def open_adapter(folder: Path, model: Any, scratch: Path, *, allow_pickle: bool = False) -> Adapter:
    """Read the description of an adapter; its weights stay on disk.

    Args:
        folder: with ``adapter_config.json`` and weights.
        model: the base model on meta.
        scratch: an empty folder, for a copy where the file's keys must be translated.
        allow_pickle: read ``adapter_model.bin`` (tensors only).

    Raises:
        Gemma4CompatError: it cannot be merged into this model; the message says why and what to do.
    """
    config = _config(folder)
    if (folder / WEIGHTS).is_file():
        source, entries = folder, shards.entries(folder / WEIGHTS)
    else:
        source, entries = scratch, _unpickled(folder, scratch, config, allow_pickle)
    if not entries:
        raise Gemma4CompatError(f"the adapter in {str(folder)!r} has no weights: {WEIGHTS} is empty")
    adapter = Adapter(source, config, entries)
    modules = {name for name, _ in model.named_modules() if name}
    saved.refuse_unbounded(folder, vars(config), {key: entry.shape for key, entry in entries.items()}, modules)
    translation = translations.translate(entries, modules)
    if not translation.names:
        raise Gemma4CompatError(
            f"not one of the {len(entries)} keys of the adapter in {str(folder)!r} belongs to {type(model).__name__} "
            f"(the first is {next(iter(entries))!r}). It was made for another model; give the base it was trained on"
        )
    if translation.unmatched:
        raise Gemma4CompatError(
            f"{len(translation.unmatched)} keys of the adapter in {str(folder)!r} belong to no module of "
            f"{type(model).__name__}, {translation.unmatched[0]!r} among them; without them the merged model would "
            "not give the adapter's outputs. Give the base it was trained on"
        )
    adapter.unused = tuple(translation.unused)
    adapter.entries = {new: entries[old] for old, new in translation.names.items()}
    _sort(adapter, model)
    names_in_file = {here: there for there, here in translation.modules.values()}
    _refuse_untargeted(adapter, model, names_in_file)
    if not translation.is_identity:
        adapter.translated = any(old != new for old, new in translation.names.items())
        _rename(adapter, names_in_file, scratch)
    elif source == scratch:
        _save_config(adapter.config, scratch)
    if not adapter.translated:
        adapter.absent = _absent(adapter, model)
    if adapter.absent:
        warnings.warn(
            f"the adapter's configuration targets {len(adapter.absent)} modules that its file has no weights for, "
            f"{adapter.absent[0]} among them; they stay as they are in the base.",
            Gemma4CompatWarning,
            stacklevel=3,
        )
    return adapter


def _config(folder: Path) -> Any:
    import peft

    file = folder / CONFIG
    if not file.is_file():
        raise Gemma4CompatError(
            f"{str(folder)!r} is not a saved adapter: there is no {CONFIG} in it. "
            "Give the folder save_pretrained wrote"
        )
    kind = saved.configuration(file).get("peft_type")
    kind = "MISS" if kind == "BONE" and not hasattr(peft.PeftType, "BONE") else kind
    if kind in _PROMPTS:
        raise Gemma4CompatError(f"{kind} changes the prompt, not the weights: there is nothing to merge")
    if not isinstance(kind, str) or kind not in peft.PeftType.__members__:
        raise Gemma4CompatError(
            f"the adapter in {str(folder)!r} has the type {kind!r}, which peft {peft.__version__} does not know. "
            "Install the release it was made with"
        )
    if kind not in TYPES:
        raise Gemma4CompatError(
            f"adapters of type {kind} are not merged module by module, because their layers share state or their type "
            f"is not covered by a test ({', '.join(TYPES)} are). Merge it in memory: load the base in bf16, "
            "PeftModel.from_pretrained, merge_and_unload, save_pretrained"
        )
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise Gemma4CompatError(f"{str(file)!r} is not understood by peft {peft.__version__}: {error}") from error
    if getattr(config, "layer_replication", None):
        raise Gemma4CompatError(
            "the adapter replicates layers (layer_replication): the result is another architecture"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise Gemma4CompatError(
            "an activated LoRA (alora_invocation_tokens) depends on the prompt: it cannot be merged"
        )
    return config


def _unpickled(folder: Path, scratch: Path, config: Any, allow_pickle: bool) -> dict[str, Entry]:
    import torch
    from safetensors.torch import save_file

    file = folder / PICKLE
    if not file.is_file():
        raise Gemma4CompatError(f"there are no weights in {str(folder)!r}: neither {WEIGHTS} nor {PICKLE}")
    if not allow_pickle:
        raise Gemma4CompatError(
            f"the adapter in {str(folder)!r} is a pickle ({PICKLE}), and pickles can run code when they are read. "
            "Convert it where you trust it (PeftModel.save_pretrained writes safetensors), or pass --allow-pickle "
            "(allow_pickle=True), which admits tensors and nothing else"
        )
    folders.refuse_without_room(scratch.parent, file.stat().st_size)
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise Gemma4CompatError(f"{str(file)!r} cannot be read as tensors alone: {_line(error)}") from error
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise Gemma4CompatError(f"{str(file)!r} does not hold tensors by name")
    save_file({key: value.clone().contiguous() for key, value in weights.items()}, scratch / WEIGHTS)
    return shards.entries(scratch / WEIGHTS)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


def _sort(adapter: Adapter, model: Any) -> None:
    """Sort the keys: adapter weights of a module, or a tensor of the model itself."""
    modules = {name for name, _ in model.named_modules()}
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for key in adapter.entries:
        path = key.removeprefix(translations.PREFIX)
        plain = path.replace(".base_layer.", ".").replace(".modules_to_save.", ".").replace(".original_module.", ".")
        if plain in own:
            adapter.replaced[plain] = key
            continue
        module = path.rpartition(".")[0]
        while module and module not in modules:
            module = module.rpartition(".")[0]
        if not module:
            raise Gemma4CompatError(
                f"the adapter's {key!r} belongs to no module: {adapter.config.peft_type.value} keeps state that its "
                "layers share, which cannot be merged module by module. Merge it in memory with PEFT"
            )
        adapter.modules.setdefault(module, []).append(key)


def _rename(adapter: Adapter, names_in_file: Mapping[str, str], scratch: Path) -> None:
    """Give the adapter a configuration that targets exactly these modules by their names in this model.

    ``names_in_file``: module of this model -> its name in the file, which the configuration's patterns refer to.
    """
    before = {path: names_in_file.get(path, path) for path in adapter.modules}
    config = adapter.config = copy.deepcopy(adapter.config)
    for attribute in ("rank_pattern", "alpha_pattern"):
        if patterns := getattr(config, attribute, None):
            exact = {
                re.escape(path): patterns[found]
                for path, old in before.items()
                if (found := matching.pattern_for(patterns, old)) is not None
            }
            setattr(config, attribute, exact)
    if getattr(config, "feedforward_modules", None):
        config.feedforward_modules = {
            path for path, old in before.items() if matching.names_module(config.feedforward_modules, old)
        }
    plain = [path for path, keys in adapter.modules.items() if kind_of(keys, config, path) == "target"]
    if plain:
        config.target_modules = sorted(plain)
        for attribute in ("exclude_modules", "layers_to_transform", "layers_pattern"):
            if hasattr(config, attribute):
                setattr(config, attribute, None)
    adapter.folder, adapter.copied = scratch / "translated", True


def write_copy(adapter: Adapter) -> None:
    """Write the adapter with the keys of this model, where PEFT would not understand the given files."""
    if not adapter.copied:
        return
    adapter.folder.mkdir()
    outputs = [shards.Output(key, entry.dtype, entry.shape) for key, entry in adapter.entries.items()]
    values = {key: lambda e=entry: shards.pieces(e) for key, entry in adapter.entries.items()}
    shards.write(adapter.folder, [outputs], values)
    (adapter.folder / "model.safetensors").rename(adapter.folder / WEIGHTS)
    _save_config(adapter.config, adapter.folder)


def _save_config(config: Any, folder: Path) -> None:
    config.save_pretrained(str(folder))


def kind_of(keys: Collection[str], config: Any, path: str) -> str:
    """How PEFT put weights on a module: as a "target", on single "tokens", or on named "parameters" of it."""
    if any(key.endswith(_TOKENS) for key in keys):
        return "tokens"
    owners = (name.rpartition(".")[0] for name in getattr(config, "target_parameters", None) or ())
    return "parameters" if any(path == owner or path.endswith(f".{owner}") for owner in owners) else "target"


def _refuse_untargeted(adapter: Adapter, model: Any, names_in_file: Mapping[str, str]) -> None:
    """Raise ``Gemma4CompatError`` where PEFT would drop weights of the file, because the configuration targets other
    modules: the merged model would have them, and the adapter-loaded one would not.
    """
    config = _resolved(adapter.config, model)
    if config is None:
        return
    names: dict[str, set[str]] = {}
    for path, keys in adapter.modules.items():
        if kind_of(keys, config, path) == "target":
            both = {path, names_in_file.get(path, path)}
            names[path] = both | {name.removesuffix(f".{translations.INNER}") for name in both}
    targeted = matching.targeted(config, {name for alike in names.values() for name in alike})
    lost = [path for path, alike in names.items() if not alike & targeted]
    if not lost:
        return
    given = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    limits = [f"{name} {shown}" for name in given[1:] if (shown := getattr(adapter.config, name, None)) is not None]
    raise Gemma4CompatError(
        f"the adapter's file has weights for {len(lost)} modules that its configuration leaves out, {lost[0]!r} among "
        f"them ({'; '.join(limits) or 'target_modules'}): PEFT drops these weights. {CONFIG} and {WEIGHTS} are not of "
        "the same adapter; get both again"
    )


def _resolved(config: Any, model: Any) -> Any:
    """A copy of ``config`` with target modules as PEFT has them for this model; None without any."""
    from peft.tuners import tuners_utils

    if not getattr(config, "target_modules", None):
        return None
    resolve = getattr(tuners_utils, "_maybe_include_all_linear_layers", None)
    # The clipped linears of the towers become their inner ones here.
    return copy.deepcopy(config) if resolve is None else resolve(copy.deepcopy(config), model)


def _absent(adapter: Adapter, model: Any) -> tuple[str, ...]:
    """Modules that PEFT would put an adapter on, and that the file has no weights for."""
    from peft.tuners import tuners_utils

    config = _resolved(adapter.config, model)
    if config is None:
        return ()
    kinds = {type(module) for name, module in model.named_modules() if name in adapter.modules}
    return tuple(
        name
        for name, module in model.named_modules()
        if type(module) in kinds
        and name not in adapter.modules
        and f"{name}.weight" not in adapter.replaced
        and tuners_utils.check_target_module_exists(config, name)
    )
