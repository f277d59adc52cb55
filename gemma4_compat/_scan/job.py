"""What a saved adapter is and what it would do on a base: ``gemma4_compat.scan_adapter`` and ``scan``.

Reads headers and configurations; no weights. Without a base nothing upstream is imported. With one, its class is built
on the meta device and PEFT itself says which keys and shapes the adapter must have there.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gemma4_compat._adapters import clipped as _clipped
from gemma4_compat._adapters import saved as _saved_adapter
from gemma4_compat._adapters import translation
from gemma4_compat._adapters.saved import SavedAdapter
from gemma4_compat._errors import Gemma4CompatError, Gemma4CompatWarning

#: Parts of the model that keys are counted by.
TOWERS = ("text", "vision", "audio", "embeddings", "bridges", "other")

#: PEFT's types, those of prompts first; one that is missing here is asked of the installed PEFT.
_PROMPT_NAMES = "PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING CPT CARTRIDGE ADAPTION_PROMPT"
_NAMES = """
    LORA ADALORA ADAMSS BOFT IA3 BEFT LILY LOHA LOKR OFT POLY LN_TUNING VERA FROD PVERA FOURIERFT GLORA XLORA HRA
    VBLORA UNILORA MISS BONE RANDLORA ROAD TRAINABLE_TOKENS HIRA SHIRA C3A WAVEFT OSF DELORA GRALORA TINYLORA PSOFT
    PEANUT SHADOW SUPERTUNING DEFT
"""
_PROMPTS = frozenset(_PROMPT_NAMES.split())
_TYPES = _PROMPTS | frozenset(_NAMES.split())
#: Settings worth telling, where they are not at these, PEFT's defaults.
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
_BITS = {"4bit": "4-bit ", "4bit-double": "4-bit ", "8bit": "8-bit "}
_HALF = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.|$)")


@dataclass(frozen=True)
class Problem:
    """Something that keeps the adapter from doing on this base what it was trained to do.

    Attributes:
        id: what it is, for programs. Of the file: "empty", "flat", "half". Of file and configuration: "rank". Of file
            and base: "unmatched", "shape", "quantized", "missing", "untargeted", "renamed", "refused".
        message: what it is, with an example and the remedy.
        keys: the keys of the file it is about; for "missing" the ones that the file should have.
    """

    id: str
    message: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hit:
    """Modules of one tower of the base that the file has weights for, of one kind.

    Attributes:
        tower: see :data:`TOWERS`.
        kind: "linear", "4-bit linear", "8-bit linear", one of these after "clipped " (the linear inside a clipped
            wrapper), "embedding", "expert parameter" (weights of all experts in one), or the name of a class; after
            "full weight of " where the file replaces the weight instead of adding to it.
        modules: how many.
    """

    tower: str
    kind: str
    modules: int


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What :func:`scan_adapter` found.

    Attributes:
        adapter: its folder.
        base: what it was held against, as ``from_pretrained`` takes it; None without a base.
        model_class: the base's class in ``transformers``.
        quantization: how the base's linears are stored: "4bit", "4bit-double", "8bit", another method's name, or None.
        problems: empty for an adapter that loads completely.
        notes: other things to know.
        peft_type: such as "LORA".
        settings: what ``adapter_config.json`` says, as far as it is not PEFT's default.
        saved_from: the model class that the keys are of, as far as they tell.
        saved_by: tool and version, as far as the configuration tells.
        keys: how many by tower, of the base where there is one.
        dtypes: how many keys by type, as safetensors names it.
        nbytes: of all weights in the file.
        ranks: how many LoRA layers by rank.
        hits: what the keys land on; empty without a base.
        redirected: clipped wrappers that the targets name and whose inner linear is adapted instead.
        remapped: key in the file -> key in this base, of those that differ.
        dead: keys of layers that share the keys and values of another, which have nothing to adapt in this base.
    """

    adapter: str
    base: str | None
    model_class: str | None
    quantization: str | None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    peft_type: str
    settings: Mapping[str, Any]
    saved_from: str
    saved_by: str
    keys: Mapping[str, int]
    dtypes: Mapping[str, int]
    nbytes: int
    ranks: Mapping[int, int]
    hits: tuple[Hit, ...]
    redirected: tuple[str, ...]
    remapped: Mapping[str, str]
    dead: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def as_data(self) -> dict[str, Any]:
        """Everything, as plain data: the attributes by name, and ``ok``. Problems and hits are objects."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["problems"] = [
            {"id": item.id, "message": item.message, "keys": list(item.keys)} for item in self.problems
        ]
        data["hits"] = [{"tower": item.tower, "kind": item.kind, "modules": item.modules} for item in self.hits]
        data["ranks"] = {str(rank): count for rank, count in self.ranks.items()}
        for name in ("notes", "redirected", "dead"):
            data[name] = list(data[name])
        return {"ok": self.ok, **data}


def scan_adapter(
    adapter: str | os.PathLike[str], base: Any = None, *, quantize: str | None = None, renames: bool = True
) -> Scan:
    """What a saved adapter is, and what it would do on ``base``.

    >>> gemma4_compat.scan_adapter("my-adapter", "E2B").keys
    {'text': 490, 'vision': 224, 'audio': 72}

    Args:
        adapter: its folder, or the id of a cached one.
        base: as ``plan_device_map`` takes a model: a folder with a ``config.json``, the id of a cached model, a
            variant ("E2B", ...), or a configuration; of a model its configuration counts. None: tell what the files
            say by themselves.
        quantize: how the base will be quantized, where its own configuration does not say: "4bit", "4bit-double" or
            "8bit".
        renames: whether keys of another Gemma 4 class are renamed when the adapter is loaded here, which the patch
            ``peft-adapter-keys`` does.

    Raises:
        Gemma4CompatError: there is no such adapter or base, a file is damaged or a pickle, or the PEFT type unknown.
    """
    saved = _saved_adapter.read(adapter)
    peft_type = _peft_type(saved)
    if base is not None:
        return _Scanner(saved, peft_type, renames).against(base, None if quantize == "none" else quantize)
    if quantize not in (None, "none"):
        raise Gemma4CompatError(f"quantize={quantize!r} is about the base, and none was given; give the base too")
    return _Scanner(saved, peft_type, renames).alone()


def tower_of(path: str) -> str:
    """The tower of a module, by its path in any class."""
    parts = path.split(".")
    for name in parts:
        if name in ("embed_tokens", "embed_tokens_per_layer", "lm_head"):
            return "embeddings"
        if name in ("embed_vision", "embed_audio"):
            return "bridges"
        if name.startswith("vision_"):
            return "vision"
        if name.startswith("audio_"):
            return "audio"
    return "text" if {"language_model", "layers"} & set(parts) or path == "model.norm" else "other"


class _Scanner:
    def __init__(self, saved: SavedAdapter, peft_type: str, renames: bool) -> None:
        self.saved = saved
        self._renames = renames
        self.peft_type = peft_type
        self._rank, self._patterns = _configured_ranks(saved) if peft_type == "LORA" else (1, {})
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._whole: dict[str, tuple[int, ...]] = {}

    def alone(self) -> Scan:
        self._examine_file(ranks=True)
        named = self.saved.config.get("base_model_name_or_path")
        if named:
            self.notes.append(f"it was trained on {named}; give a base to see what it does there")
        places = {key: _saved_adapter.module_of(key) for key in self.saved.tensors}
        return self._scan(keys=_count(map(tower_of, places.values())))

    def against(self, base: Any, quantize: str | None) -> Scan:
        from gemma4_compat._models import build

        model, name, assumed = build.on_meta(getattr(base, "config", base))
        if assumed:
            self.notes.append(assumed)
        modules = dict(model.named_modules())
        quantization, quantized = self._quantization(model, quantize)
        found = translation.translate(self.saved.tensors, [path for path in modules if path])
        redirected: tuple[str, ...] = ()
        expected = None
        if self.peft_type not in _PROMPTS:
            redirected, expected = self._expected(model)
        else:
            self.notes.append(f"{self.peft_type} adapts no module, so its keys are not held against the base")
        found = _as_they_are(found, expected or {}, modules)
        hits: dict[str, str] = {}
        for key, (_, path) in found.modules.items():
            kind = _kind(path, modules, quantized, _BITS.get(quantization or "", ""))
            if found.names[key] not in (f"{translation.PREFIX}{path}.weight", f"{translation.PREFIX}{path}.bias"):
                hits[path] = kind
            else:
                hits.setdefault(path, f"full weight of {kind}")
        self._examine_file(ranks=expected is None)
        placed = self._compare(found, expected, quantized)
        if found.dead:
            self.notes.append(
                f"{len(found.dead)} keys adapt keys and values of layers that share those of another layer and have "
                "none to adapt in this base; nothing is lost without them"
            )
        return self._scan(
            base=name,
            model_class=type(model).__name__,
            quantization=quantization,
            keys=_count(map(tower_of, placed.values())),
            hits=tuple(
                Hit(tower, kind, count)
                for (tower, kind), count in sorted(
                    Counter((tower_of(path), kind) for path, kind in hits.items()).items(),
                    key=lambda item: (TOWERS.index(item[0][0]), item[0][1]),
                )
            ),
            redirected=redirected,
            remapped={key: name for key, name in found.names.items() if key != name},
            dead=found.dead,
        )

    def _scan(self, *, keys: Mapping[str, int], **fields: Any) -> Scan:
        tensors = self.saved.tensors
        nothing: dict[str, Any] = {"base": None, "model_class": None, "quantization": None}
        nothing |= {"hits": (), "redirected": (), "remapped": {}, "dead": ()}
        return Scan(
            adapter=str(self.saved.folder),
            problems=tuple(self.problems),
            notes=tuple(self.notes),
            peft_type=self.peft_type,
            settings=_settings(self.saved.config),
            saved_from=_saved_from(tensors),
            saved_by=_saved_by(self.saved.config),
            keys=keys,
            dtypes=dict(sorted(Counter(tensor.dtype for tensor in tensors.values()).items())),
            nbytes=sum(tensor.nbytes for tensor in tensors.values()),
            ranks=dict(sorted(Counter(self._ranks().values()).items())),
            **(nothing | fields),
        )

    # --------------------------------------------------------------------------------------------------- the file

    def _ranks(self) -> dict[str, int]:
        """The rank of each LoRA layer, by the stem of its keys; one over experts has the ranks of all in a row."""
        ranks = {}
        for key, tensor in self.saved.tensors.items():
            half = _HALF.match(key)
            if half and half[2] == "A" and len(tensor.shape) == 2:
                rank, wanted = tensor.shape[0], self._wanted_rank(half[1])
                of_experts = self._is_parameter(half[1]) and rank % wanted == 0
                ranks[half[1]] = wanted if of_experts else rank
        return ranks

    def _wanted_rank(self, stem: str) -> int:
        module = stem.removeprefix(translation.PREFIX).removesuffix(".base_layer")
        names = (module, module.removesuffix(".linear"))
        for pattern, rank in self._patterns.items():
            if any(pattern.match(name) for name in names):
                return rank
        return self._rank

    def _is_parameter(self, stem: str) -> bool:
        module = stem.removesuffix(".base_layer")
        targets = self.saved.config.get("target_parameters") or ()
        return any(f".{module}".endswith(f".{name.rpartition('.')[0]}") for name in targets)

    def _examine_file(self, *, ranks: bool) -> None:
        tensors = self.saved.tensors
        if not tensors:
            self._problem("empty", "the file has no weights at all: the adapter was saved wrongly", ())
        flat = [
            key for key, tensor in tensors.items() if _HALF.match(key) and (len(tensor.shape) < 2 or 0 in tensor.shape)
        ]
        self._problem(
            "flat",
            "{count} LoRA weights are empty or flat, such as {first}: they were saved in pieces (ZeRO-3 or FSDP). "
            "Gather the parameters before saving",
            flat,
        )
        if self.peft_type != "LORA":
            return
        halves: dict[str, dict[str, str]] = {}
        for key in tensors:
            if half := _HALF.match(key):
                halves.setdefault(half[1], {})[half[2]] = key
        self._problem(
            "half",
            "{count} LoRA layers have only one of A and B, such as {first}: the file is not complete",
            [key for parts in halves.values() if len(parts) == 1 for key in parts.values()],
        )
        if ranks:
            found = self._ranks()
            wrong = [halves[stem]["A"] for stem, rank in found.items() if rank != self._wanted_rank(stem)]
            wrong += [
                parts["B"]
                for parts in halves.values()
                if len(parts) == 2
                and len(tensors[parts["A"]].shape) == len(tensors[parts["B"]].shape) == 2
                and tensors[parts["A"]].shape[0] != tensors[parts["B"]].shape[1]
            ]
            shown = f" ({_shape(tensors[wrong[0]].shape)})" if wrong else ""
            self._problem(
                "rank",
                f"{{count}} LoRA weights have another rank than adapter_config.json says, such as {{first}}{shown}: "
                "configuration and weights are of two different adapters",
                wrong,
            )

    def _problem(self, id: str, message: str, keys: Iterable[str]) -> None:
        """Note a problem about ``keys``; without any there is none, unless it is about the adapter as a whole."""
        keys = tuple(keys)
        if keys or id in ("empty", "refused"):
            text = message.replace("{count}", str(len(keys))).replace("{first}", keys[0] if keys else "")
            self.problems.append(Problem(id, text, keys))

    # --------------------------------------------------------------------------------------------------- the base

    def _quantization(self, model: Any, asked: str | None) -> tuple[str | None, frozenset[str]]:
        """How the base's linears are stored, and which."""
        from gemma4_compat._quantization import config

        settings = config.stored_settings(model.config)
        if settings is None:
            if asked is None:
                return None, frozenset()
            config.check(asked, or_none=True)
            return asked, config.linear_names(model, config.default_skip_modules(model))
        quantization = config.name_of(settings)
        if quantization is None:
            method = str(settings.get("quant_method"))
            self.notes.append(f"the base is quantized with {method}, of which this knows no details")
            return method, frozenset()
        skip = settings.get("llm_int8_skip_modules") or ["lm_head"]
        return quantization, config.linear_names(model, skip)

    def _expected(self, model: Any) -> tuple[tuple[str, ...], dict[str, tuple[int, ...]] | None]:
        """The wrappers that the targets name, and the shapes PEFT wants by key; None where it refuses.

        PEFT makes the adapter on the meta device, from the same configuration as when it loads it.
        """
        import peft

        from gemma4_compat._adapters import fitting

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                config = _peft_config(self.saved, self.peft_type)
                redirected: tuple[str, ...] = ()
                if getattr(config, "target_modules", None):
                    redirected = tuple(_clipped.matched_wrappers(config, model))
                with fitting.loading(self.saved.folder, tuple(self.saved.tensors)):
                    adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
            except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
                reason = str(error).strip().splitlines()[0][:300]
                self._problem("refused", f"PEFT {peft.__version__} refuses it: {type(error).__name__}: {reason}", ())
                return (), None
            own = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        self.notes += [
            str(item.message)
            for item in caught
            if "keyword arguments" in str(item.message)  # settings this PEFT does not know and ignores
            or issubclass(item.category, Gemma4CompatWarning)
        ]
        shapes = {key: tuple(tensor.shape) for key, tensor in own.items()}
        # Weights of the base itself, which PEFT saves with a resized vocabulary and loads over the base's.
        whole = {key: tuple(tensor.shape) for key, tensor in adapted.state_dict().items()}
        self._whole = {key: shape for key, shape in whole.items() if key not in shapes}
        return redirected, shapes

    def _compare(
        self,
        found: translation.Translation,
        expected: Mapping[str, tuple[int, ...]] | None,
        quantized: frozenset[str],
    ) -> dict[str, str]:
        """Note what does not fit. Returns the module of each key: the base's, or as the key has it."""
        tensors = self.saved.tensors
        placed = {
            key: found.modules[key][1] if key in found.modules else _saved_adapter.module_of(key) for key in tensors
        }
        unmatched = list(found.unmatched)
        if expected is not None:
            known = expected.keys() | self._whole.keys()
            nowhere = [key for key, name in found.names.items() if name not in known and key not in found.modules]
            unmatched += nowhere
            self._compare_shapes(found, expected)
            self._problem(
                "quantized",
                "{count} keys replace a weight that is quantized in this base, such as {first}: PEFT cannot load them "
                "over it (KeyError or a size mismatch). Name the module in llm_int8_skip_modules",
                [
                    key
                    for key, name in found.names.items()
                    if key in found.modules
                    and found.modules[key][1] in quantized
                    and name == f"{translation.PREFIX}{found.modules[key][1]}.weight"
                ],
            )
            self._problem(
                "untargeted",
                "{count} keys are of modules that the targets in adapter_config.json leave out, such as {first}: PEFT "
                "drops their weights without an error",
                [key for key, name in found.names.items() if name not in known and key in found.modules],
            )
            self._compare_missing(found, expected, placed)
        some = "all keys are" if tensors and len(unmatched) == len(tensors) else "{count} keys are"
        self._problem(
            "unmatched",
            f"{some} of no module that this base has, such as {{first}}: the adapter was made for another model",
            unmatched,
        )
        if not self._renames:
            self._problem(
                "renamed",
                "{count} keys need another name in this base, such as {first}, and the patch that gives it to them is "
                "off: PEFT drops their weights with a warning. Leave the patch on (gemma4-compat explain "
                "peft-adapter-keys)",
                [key for key, name in found.names.items() if key != name],
            )
        self.problems.sort(key=lambda item: item.id not in ("empty", "refused", "unmatched"))
        return placed

    def _compare_shapes(self, found: translation.Translation, expected: Mapping[str, tuple[int, ...]]) -> None:
        if self.peft_type == "ADALORA" and self.saved.config.get("rank_pattern"):
            return  # it resizes its layers to the weights
        ranks, shapes = [], []
        for key, name in found.names.items():
            wanted = expected.get(name, self._whole.get(name))
            shape = self.saved.tensors[key].shape
            if wanted is None or wanted == shape:
                continue
            half = _HALF.match(name)
            inner = (1 if half[2] == "A" else 0) if half else None
            if inner is not None and len(shape) == len(wanted) == 2 and shape[inner] == wanted[inner]:
                ranks.append(key)
            else:
                shapes.append(key)
        for id, keys, reason in (
            ("rank", ranks, "another rank than adapter_config.json says: it is of another adapter"),
            ("shape", shapes, "another shape than this base needs: the adapter was made for another model"),
        ):
            if keys:
                name = found.names[keys[0]]
                wanted = expected.get(name, self._whole.get(name, ()))
                example = f"{keys[0]} is {_shape(self.saved.tensors[keys[0]].shape)} instead of {_shape(wanted)}"
                self._problem(id, f"{{count}} weights have {reason}. {example}", keys)

    def _compare_missing(
        self,
        found: translation.Translation,
        expected: Mapping[str, tuple[int, ...]],
        placed: Mapping[str, str],
    ) -> None:
        missing = [name for name in expected if name not in set(found.names.values())]
        if not missing or not self.saved.tensors:
            return
        # A name such as q_proj also reaches towers that the model had not when the adapter was trained.
        there = {tower_of(path) for path in placed.values()}
        lost = [name for name in missing if tower_of(_saved_adapter.module_of(name)) in there]
        new = Counter(tower_of(_saved_adapter.module_of(name)) for name in missing if name not in lost)
        self._problem(
            "missing",
            "the file lacks {count} weights that its own targets ask for in this base, such as {first}: these layers "
            "keep their first values, an adapter that does nothing or noise",
            lost,
        )
        for tower, count in new.items():
            self.notes.append(
                f"the targets also reach {tower}, for which the file has nothing ({count} weights): these layers keep "
                "their first values, which for LoRA change no answer"
            )


def _as_they_are(
    found: translation.Translation, expected: Collection[str], modules: Collection[str]
) -> translation.Translation:
    """``found``, with the keys that PEFT itself asks for as they are."""
    same = [key for key in found.unmatched if key in expected]
    owners = {key: _saved_adapter.module_of(key) for key in same}
    return replace(
        found,
        names={**found.names, **dict(zip(same, same))},
        unmatched=tuple(key for key in found.unmatched if key not in expected),
        modules={**found.modules, **{key: (path, path) for key, path in owners.items() if path in modules}},
    )


def _peft_config(saved: SavedAdapter, peft_type: str) -> Any:
    import peft

    if peft_type not in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING:
        raise ValueError(f"it has no {peft_type}; a newer PEFT may")
    config = peft.PeftConfig.from_pretrained(str(saved.folder))
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = False  # some are computed from the base's weights, which are not there
    return config


def _kind(path: str, modules: Mapping[str, Any], quantized: frozenset[str], prefix: str) -> str:
    module = modules[path]
    names = {base.__name__ for base in type(module).__mro__}
    if "Linear" in names:
        parent = modules.get(path.rpartition(".")[0])
        clipped = "clipped " if parent is not None and _clipped.is_wrapper(parent) else ""
        return f"{clipped}{prefix if path in quantized else ''}linear"
    if "Embedding" in names:
        return "embedding"
    if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
        return "expert parameter"
    return type(module).__name__


def _peft_type(saved: SavedAdapter) -> str:
    name = saved.config.get("peft_type")
    if name is None:
        made = "; it looks like one of mlx-lm, which PEFT cannot load" if "lora_parameters" in saved.config else ""
        raise Gemma4CompatError(
            f"adapter_config.json in {str(saved.folder)!r} names no peft_type, so it is not PEFT's{made}"
        )
    if not isinstance(name, str) or (name not in _TYPES and name not in _installed_types()):
        raise Gemma4CompatError(
            f"the peft_type {name!r} in {str(saved.folder / _saved_adapter.CONFIG)!r} is unknown, also to the PEFT "
            "that is installed; a newer one may have it: pip install -U peft"
        )
    return name


def _configured_ranks(saved: SavedAdapter) -> tuple[int, dict[re.Pattern[str], int]]:
    """``r`` and ``rank_pattern``, matched as PEFT does: the first pattern that fits the end of a module's name."""
    file = str(saved.folder / _saved_adapter.CONFIG)
    rank, patterns = saved.config.get("r", 8), saved.config.get("rank_pattern") or {}
    ranks = [rank, *patterns.values()] if isinstance(patterns, dict) else [None]
    if not all(type(value) is int and value > 0 for value in ranks):
        raise Gemma4CompatError(
            f"r and rank_pattern in {file!r} are {rank!r} and {patterns!r}; they must be a positive number, and "
            "positive numbers by pattern"
        )
    try:
        return rank, {re.compile(rf"(.*\.)?({pattern})$"): value for pattern, value in patterns.items()}
    except re.error as error:
        raise Gemma4CompatError(f"a rank_pattern in {file!r} is no regular expression: {error}") from error


def _installed_types() -> set[str]:
    try:
        from peft import PeftType
    except ModuleNotFoundError:
        return set()
    return {item.value for item in PeftType}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = {}
    for name, default in _SETTINGS.items():
        value = config.get(name, default)
        if value != default and value not in ([], {}):
            settings[name] = sorted(value) if name == "target_modules" and isinstance(value, list) else value
    return settings


def _saved_from(keys: Iterable[str]) -> str:
    """The class whose names the keys are, by where the decoder layers are."""
    for key in keys:
        path = key.removeprefix(translation.PREFIX)
        if tower_of(path) in ("vision", "audio", "bridges"):
            names = {"model": "Gemma4ForConditionalGeneration"}
            return names.get(path.partition(".")[0], "Gemma4Model")
        for start, name in (
            ("model.language_model.layers.", "Gemma4ForConditionalGeneration"),
            ("model.layers.", "Gemma4ForCausalLM"),
            ("language_model.model.layers.", "a multimodal class of the old layout (language_model.model)"),
            ("language_model.layers.", "Gemma4Model"),
            ("layers.", "Gemma4TextModel"),
        ):
            if path.startswith(start):
                return name
    return "unknown"


def _saved_by(config: Mapping[str, Any]) -> str:
    mapping = config.get("auto_mapping")
    tool = "Unsloth, " if isinstance(mapping, Mapping) and mapping.get("unsloth_fixed") else ""
    version = config.get("peft_version")
    return f"{tool}PEFT {version}" if version else f"{tool}PEFT"


def _shape(shape: Iterable[int]) -> str:
    return json.dumps(list(shape))


def _count(towers: Iterable[str]) -> dict[str, int]:
    counts = Counter(towers)
    return {tower: counts[tower] for tower in TOWERS if counts[tower]}
