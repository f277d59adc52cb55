"""Open a saved adapter for a merge: translate its keys to the base model and sort them by what they change."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters import matching, saved
from gemma4_compat._gemma4.adapters import translation as translations
from gemma4_compat._gemma4.adapters.saved import CONFIG, PICKLE, WEIGHTS
from gemma4_compat._gemma4.checkpoint import folders, shards
from gemma4_compat._gemma4.checkpoint.shards import Entry

#: PEFT types whose layers can be built and merged one at a time.
TYPES = (
    "ADALORA",
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
    "RANDLORA",
    "TRAINABLE_TOKENS",
    "VERA",
)
#: Types whose layers share random projections -> the names of these projections.
_PROJECTIONS = {"RANDLORA": ("randlora_A", "randlora_B"), "VERA": ("vera_A", "vera_B")}
_PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT")
_TOKENS = "trainable_tokens_delta"


@dataclass
class Adapter:
    """A saved adapter and what it changes in one base model.

    Attributes:
        folder: of an adapter that PEFT can load onto this model: the given one, or the folder for a translated copy,
            which :func:`write_copy` writes.
        config: its PEFT configuration.
        entries: the tensors by the key PEFT uses for this model (without an adapter name).
        modules: path of a module -> keys of the adapter's weights there.
        replaced: parameter or buffer of the model -> key of its new value (modules_to_save, trained biases).
        unused: keys in the file for modules that this model never uses.
        absent: modules that the configuration targets but the file has no weights for.
        translated: whether the file uses other key names.
        copied: whether PEFT needs a copy in ``folder``.
        shared: keys of the projections that all layers share.
        widest: rows and columns of the largest weight, which set the size of such projections; None for other types.
        name: of the adapter in PEFT.
        weight: factor for its change.
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
    shared: tuple[str, ...] = ()
    widest: tuple[int, int] | None = None
    name: str = "default"
    weight: float = 1.0

    @property
    def nbytes_to_copy(self) -> int:
        """Bytes of the weights that :func:`write_copy` writes."""
        return sum(entry.nbytes for entry in self.entries.values()) if self.copied else 0


def open_adapter(folder: Path, model: Any, scratch: Path, *, allow_pickle: bool = False) -> Adapter:
    """Read the description of an adapter; its weights stay on disk.

    Args:
        folder: with ``adapter_config.json`` and weights.
        model: the base model on meta.
        scratch: an empty folder, for a copy if the file's keys must be translated.
        allow_pickle: read ``adapter_model.bin`` (tensors only).

    Raises:
        Gemma4CompatError: the adapter cannot be merged into this model; the message says why and what to do.
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
    apart = _drop_tied(adapter, model)
    _find_projections(adapter, model)
    names_in_file = {here: there for there, here in translation.modules.values()}
    _refuse_untargeted(adapter, model, names_in_file, apart)
    if not translation.is_identity:
        adapter.translated = any(old != new for old, new in translation.names.items())
        _rename(adapter, names_in_file, scratch)
    elif source == scratch:
        adapter.config.save_pretrained(str(scratch))
    if not adapter.translated:
        adapter.absent = _absent(adapter, model)
    if adapter.absent:
        notice.warn_user(
            f"the adapter's configuration targets {len(adapter.absent)} modules that its file has no weights for, "
            f"{adapter.absent[0]} among them; they stay as they are in the base.",
        )
    return adapter


def refuse_conflicts(adapters: Sequence[Adapter], base: Mapping[str, Entry]) -> None:
    """Refuse adapters without a weighted sum: all but LoRAs on modules, unless there is only one, with the weight 1.

    Copies of the base's own tensors, which PEFT saves beside a LoRA on an embedding, are dropped.

    Args:
        adapters: opened, with their weights.
        base: name of a parameter -> its tensor on disk.

    Raises:
        Gemma4CompatError: an adapter cannot be weighted or added to another.
    """
    if len(adapters) == 1 and adapters[0].weight == 1:
        return
    alone = "Merge that adapter first, by itself with the weight 1, and then the others into the result"
    for adapter in adapters:
        where = repr(str(adapter.folder))
        kind = adapter.config.peft_type.value
        if kind != "LORA":
            raise Gemma4CompatError(f"the adapter in {where} is of type {kind}: weights are for LoRA. {alone}")
        if getattr(adapter.config, "use_dora", False):
            raise Gemma4CompatError(f"the adapter in {where} is a DoRA, whose change depends on the others'. {alone}")
        for name, key in list(adapter.replaced.items()):
            entry = adapter.entries[key]
            same = name in base and base[name].shape == entry.shape
            if not same or not shards.read(base[name]).float().equal(shards.read(entry).float()):
                raise Gemma4CompatError(
                    f"the adapter in {where} replaces {name} as a whole (modules_to_save, or a trained bias), which "
                    f"cannot be weighted or added to another adapter's. {alone}"
                )
            del adapter.replaced[name]
        for path, keys in adapter.modules.items():
            if (how := kind_of(keys, adapter.config, path)) != "target":
                raise Gemma4CompatError(
                    f"the adapter in {where} trains single {how} of {path}: no weight applies. {alone}"
                )


def _config(folder: Path) -> Any:
    import peft

    file = folder / CONFIG
    if not file.is_file():
        raise Gemma4CompatError(
            f"{str(folder)!r} is not a saved adapter: there is no {CONFIG} in it. "
            "Give the folder that save_pretrained wrote"
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
            f"adapters of type {kind} are not merged module by module: no test covers this type "
            f"({', '.join(TYPES)} are). Merge it in memory: load the base in bf16, PeftModel.from_pretrained, "
            "merge_and_unload, save_pretrained"
        )
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise Gemma4CompatError(f"peft {peft.__version__} does not understand {str(file)!r}: {error}") from error
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
            "(allow_pickle=True), which admits only tensors"
        )
    folders.refuse_without_room(scratch.parent, file.stat().st_size)
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise Gemma4CompatError(f"{str(file)!r} cannot be read as plain tensors: {_line(error)}") from error
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise Gemma4CompatError(f"{str(file)!r} does not map names to tensors")
    save_file({key: value.clone().contiguous() for key, value in weights.items()}, scratch / WEIGHTS)
    return shards.entries(scratch / WEIGHTS)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


def _sort(adapter: Adapter, model: Any) -> None:
    """Sort the keys: adapter weights of a module, or a tensor of the model itself."""
    modules = {name for name, _ in model.named_modules()}
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    projections = _PROJECTIONS.get(adapter.config.peft_type.value, ())
    for key in adapter.entries:
        path = key.removeprefix(translations.PREFIX)
        if key.rpartition(".")[2] in projections:  # RandLora saves them again with every layer
            continue
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


def _drop_tied(adapter: Adapter, model: Any) -> tuple[str, ...]:
    """Drop the head's LoRA if it is the embedding's: with ``ensure_weight_tying``, PEFT saves it for both.

    Returns:
        Modules with their own LoRA that ``target_modules`` leaves out: on a 16-bit base, PEFT casts, trains and loads
            the two separately.
    """
    if not getattr(adapter.config, "ensure_weight_tying", False):
        return ()
    apart = []
    tied = model._tied_weights_keys
    for target, source in tied.items() if isinstance(tied, dict) else ():
        head, embedding = target.rpartition(".")[0], source.rpartition(".")[0]
        if head not in adapter.modules or embedding not in adapter.modules:
            continue
        both = [
            {part: shards.read(adapter.entries[key]) for key in adapter.modules[path] for part in key.split(".")}
            for path in (head, embedding)
        ]
        pairs = (("lora_A", "lora_embedding_B"), ("lora_B", "lora_embedding_A"))
        if all(a in both[0] and b in both[1] and both[0][a].equal(both[1][b].T) for a, b in pairs):
            del adapter.modules[head]
            adapter.replaced.pop(target, None)
        else:
            apart.append(head)
    return tuple(apart)


def _find_projections(adapter: Adapter, model: Any) -> None:
    """Find the projections that all layers of a VeRA or RandLora share, in the file; otherwise their size in PEFT."""
    names = _PROJECTIONS.get(adapter.config.peft_type.value)
    if names is None:
        return
    keys = [f"base_model.{name}" for name in names]
    if found := [key for key in keys if key in adapter.entries]:
        if len(found) != len(keys):
            raise Gemma4CompatError(f"the adapter's file has only {found[0]!r} of {names}; get it again")
        first, second = (adapter.entries[key].shape for key in keys)
        # Without save_projection PEFT makes new ones and ignores those in the file.
        adapter.shared = tuple(keys) if adapter.config.save_projection else ()
        adapter.widest = second[0], first[-1]
        return
    if adapter.config.save_projection:
        raise Gemma4CompatError(
            f"the adapter's file lacks {keys[0]!r}, which its configuration says was saved (save_projection); get the "
            "file again"
        )
    config = _resolved(adapter.config, model)
    linears = {name: module.weight.shape for name, module in model.named_modules() if _is_linear(module)}
    shapes = [linears[name] for name in matching.targeted(config, linears)] if config is not None else []
    if not shapes:
        raise Gemma4CompatError(
            "the adapter's projections were not saved (save_projection is false), and its configuration names no "
            "linear of this model, so their size is unknown. Save it again with save_projection"
        )
    adapter.widest = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)


def _is_linear(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear)


def _rename(adapter: Adapter, names_in_file: Mapping[str, str], scratch: Path) -> None:
    """Give the adapter a configuration that targets exactly these modules by their names in this model.

    ``names_in_file``: module of this model -> its name in the file, which the configuration's patterns refer to.
    """
    before = {path: names_in_file.get(path, path) for path in adapter.modules}
    config = adapter.config = copy.deepcopy(adapter.config)
    if config.peft_type.value == "ADALORA" and config.rank_pattern:  # the kept ranks, by parameter name
        kept = {name.rpartition(".lora_E")[0]: ranks for name, ranks in config.rank_pattern.items()}
        config.rank_pattern = {f"{path}.lora_E": kept[old] for path, old in before.items() if old in kept}
    for attribute in ("rank_pattern", "alpha_pattern"):
        if config.peft_type.value == "ADALORA":
            break
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
    """Write the adapter with the keys of this model, if PEFT would not understand the given files."""
    if not adapter.copied:
        return
    adapter.folder.mkdir()
    outputs = [shards.Output(key, entry.dtype, entry.shape) for key, entry in adapter.entries.items()]
    values = {key: lambda e=entry: shards.pieces(e) for key, entry in adapter.entries.items()}
    shards.write_file(adapter.folder / WEIGHTS, outputs, values)
    adapter.config.save_pretrained(str(adapter.folder))


def kind_of(keys: Collection[str], config: Any, path: str) -> str:
    """How PEFT put weights on a module: as a "target", on single "tokens", or on named "parameters" of it."""
    if any(key.endswith(_TOKENS) for key in keys):
        return "tokens"
    owners = (name.rpartition(".")[0] for name in getattr(config, "target_parameters", None) or ())
    return "parameters" if any(path == owner or path.endswith(f".{owner}") for owner in owners) else "target"


def _refuse_untargeted(
    adapter: Adapter, model: Any, names_in_file: Mapping[str, str], allowed: Collection[str]
) -> None:
    """Raise ``Gemma4CompatError`` if PEFT would drop weights of the file because the configuration targets other
    modules: the merged model would have them, the adapter-loaded one would not.
    """
    config = _resolved(adapter.config, model)
    if config is None:
        return
    names: dict[str, set[str]] = {}
    for path, keys in adapter.modules.items():
        if kind_of(keys, config, path) == "target" and path not in allowed:
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
        f"them ({'; '.join(limits) or 'target_modules'}): PEFT drops these weights. {CONFIG} and {WEIGHTS} do not "
        "belong to the same adapter; get both again"
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
    """Modules that PEFT would put an adapter on but the file has no weights for."""
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
