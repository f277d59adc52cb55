"""The base model of an export, without weights: the facts that a reader's keys depend on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._adapters import translation
from gemma4_compat._common import files
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import build

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Base:
    """A Gemma 4 on the meta device.

    Attributes:
        name: as ``from_pretrained`` takes it.
        model: the model.
        modules: its modules without an adapter, by the part of their names that all classes share.
        paths: their full names, by the same part.
        assumed: what was assumed about its configuration.
    """

    name: str
    model: Any
    modules: Mapping[str, Any]
    paths: Mapping[str, str]
    assumed: str

    @property
    def text(self) -> Any:
        """The configuration of the text model."""
        return self.model.config.get_text_config()

    @property
    def is_text_only(self) -> bool:
        """Whether the checkpoint has only the language model."""
        return self.model.config is self.text

    @property
    def ties_head(self) -> bool:
        """Whether the head is the embedding."""
        return bool(self.text.tie_word_embeddings)

    @property
    def has_experts(self) -> bool:
        """Whether its layers have experts."""
        return any(name.endswith(".experts") for name in self.modules)

    def layers(self) -> range:
        """Indices of the decoder layers."""
        return range(self.text.num_hidden_layers)

    def shares(self, layer: int) -> bool:
        """Whether the layer takes keys and values from an earlier one."""
        shared = getattr(self.text, "num_kv_shared_layers", 0) or 0
        return bool(layer >= self.text.num_hidden_layers - shared)

    def value_is_key(self, layer: int) -> bool:
        """Whether the layer uses its keys, before they are normalized, as values (``attention_k_eq_v``)."""
        attention = f"layers.{layer}.self_attn"
        return f"{attention}.k_proj" in self.modules and f"{attention}.v_proj" not in self.modules

    def shape(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a linear in a decoder layer. For shared keys and values: those of a layer of the same
        kind.
        """
        found: Any = self.modules.get(name)
        match = _LAYER.fullmatch(name)
        if found is None and match is not None:
            layer = int(match[1])
            kinds = self.text.layer_types
            alike = [index for index in self.layers() if kinds[index] == kinds[layer] and not self.shares(index)]
            options = [f"layers.{index}.self_attn.{part}" for index in alike for part in ("k_proj", "v_proj")]
            found = next(self.modules[option] for option in options if option in self.modules)
        rows, columns = found.weight.shape
        return rows, columns


def layer_of(name: str) -> tuple[int, str] | None:
    """The decoder layer of a module, and the module's name in it; None for a module outside the decoder layers."""
    match = _LAYER.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def build_base(given: Any, trained_on: Any) -> Base:
    """The given base, or the one the adapter names.

    Args:
        given: a folder, a cached id, a variant or a configuration; None for the one the adapter names.
        trained_on: ``base_model_name_or_path``, which is untrusted: it is never followed as a path.

    Raises:
        Gemma4CompatError: no base was given or named, or it cannot be built.
    """
    model, name, assumed = build.on_meta(_named(trained_on) if given is None else getattr(given, "config", given))
    modules: dict[str, Any] = {}
    paths: dict[str, str] = {}
    for path, module in model.named_modules():
        shared = ".".join(translation.shared_part(path))
        if shared:
            modules.setdefault(shared, module)
            paths.setdefault(shared, path)
    return Base(name, model, modules, paths, assumed)


def _named(trained_on: Any) -> str:
    if not isinstance(trained_on, str) or not trained_on:
        raise Gemma4CompatError("the adapter does not say which base it was trained on; give it (--base)")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", trained_on) and not files.exists(
        Path(trained_on), "folder"
    ):
        return trained_on
    raise Gemma4CompatError(
        f"the adapter was trained on {trained_on!r}, which is not a hub id; give the base (--base): a folder, an id, "
        "or a variant such as E4B"
    )
