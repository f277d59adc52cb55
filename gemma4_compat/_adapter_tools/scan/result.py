"""What a scan finds: problems, notes, and the parts of the model that an adapter touches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Parts of the model that keys are counted by; the "embedders" are the multimodal ones (``embed_vision``, ...).
TOWERS = ("text", "vision", "audio", "embeddings", "embedders", "other")


@dataclass(frozen=True)
class Problem:
    """Something that keeps the adapter from doing on this base what it was trained to do.

    Attributes:
        id: what it is, for programs. About the file: "damaged", "empty", "flat", "half". About file and configuration:
            "rank". About file and base: "unmatched", "shape", "quantized", "missing", "untargeted", "renamed",
            "refused".
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
        base: what it was compared with, as ``from_pretrained`` takes it; None without a base.
        model_class: the base's class in ``transformers``.
        quantization: how the base's linears are stored: "4bit", "4bit-double", "8bit", another method's name, or None.
        problems: empty for an adapter that loads completely.
        notes: other things to know.
        peft_type: such as "LORA".
        settings: what ``adapter_config.json`` says, as far as it is not PEFT's default.
        saved_from: the model class that the keys belong to, as far as they tell.
        saved_by: tool and version, as far as the configuration tells.
        keys: how many by tower; with a base, by its towers.
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
        """Whether no problem was found."""
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


@dataclass
class Findings:
    """Problems and notes, in the order in which they are found."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, id: str, message: str, keys: Iterable[str]) -> None:
        """Add a problem about ``keys``. Without keys nothing is added, unless it is about the whole adapter."""
        keys = tuple(keys)
        if keys or id in ("empty", "refused"):
            text = message.replace("{count}", str(len(keys))).replace("{first}", keys[0] if keys else "")
            self.problems.append(Problem(id, text, keys))


def tower_of(path: str) -> str:
    """The tower of a module, by its path in any class."""
    parts = path.split(".")
    for name in parts:
        if name in ("embed_tokens", "embed_tokens_per_layer", "lm_head"):
            return "embeddings"
        if name in ("embed_vision", "embed_audio"):
            return "embedders"
        if name.startswith("vision_"):
            return "vision"
        if name.startswith("audio_"):
            return "audio"
    return "text" if {"language_model", "layers"} & set(parts) or path == "model.norm" else "other"


def count_by_tower(paths: Iterable[str]) -> dict[str, int]:
    """How many of these modules are in each tower, in the order of :data:`TOWERS`."""
    counts = Counter(map(tower_of, paths))
    return {tower: counts[tower] for tower in TOWERS if counts[tower]}
