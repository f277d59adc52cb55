"""The base of an adapter, without weights: its modules, how they are stored, and what readers of adapters ask."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gemma4_compat._gemma4.adapters import clipped, translation
from gemma4_compat._gemma4.models import build as models
from gemma4_compat._gemma4.quantization import config, qat

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_QUANTIZATIONS = {"4bit": "4-bit ", "4bit-double": "4-bit ", "8bit": "8-bit "}


@dataclass(frozen=True, kw_only=True)
class Base:
    """A Gemma 4 on the meta device.

    Attributes:
        name: as ``from_pretrained`` takes it.
        model: the model.
        modules: its modules by path, as they are before an adapter is injected.
        paths: the same paths, by the part of them that all classes share.
        assumed: what was assumed about its configuration.
        quantization: how its linears are stored: "4bit", "4bit-double", "8bit", another method's name, or None.
        quantized: the paths of the linears that are stored so, as far as known.
    """

    name: str
    model: Any
    modules: Mapping[str, Any]
    paths: Mapping[str, str]
    assumed: str
    quantization: str | None = None
    quantized: frozenset[str] = frozenset()

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
        return any(name.endswith(".experts") for name in self.paths)

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
        return f"{attention}.k_proj" in self.paths and f"{attention}.v_proj" not in self.paths

    def shape(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a linear in a decoder layer, by its name in :attr:`paths`. For shared keys and values:
        those of a layer of the same kind.
        """
        if name not in self.paths and (place := layer_of(name)) is not None:
            kinds = self.text.layer_types
            alike = [index for index in self.layers() if kinds[index] == kinds[place[0]] and not self.shares(index)]
            options = [f"layers.{index}.self_attn.{part}" for index in alike for part in ("k_proj", "v_proj")]
            name = next(option for option in options if option in self.paths)
        rows, columns = self.modules[self.paths[name]].weight.shape
        return rows, columns

    def kind(self, path: str) -> str:
        """What a module is, for a reader: "4-bit linear", "embedding", ..."""
        module = self.modules[path]
        names = {base.__name__ for base in type(module).__mro__}
        if "Linear" in names:
            parent = self.modules.get(path.rpartition(".")[0])
            wrapped = "clipped " if parent is not None and clipped.is_wrapper(parent) else ""
            bits = (
                f"{module.num_bits}-bit " if qat.is_linear(module) else _QUANTIZATIONS.get(self.quantization or "", "")
            )
            stored = bits if path in self.quantized else ""
            return f"{wrapped}{stored}linear"
        if "Embedding" in names:
            return "embedding"
        if qat.is_embedding(module):
            return f"{module.num_bits}-bit embedding"
        if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            return "expert parameter"
        return type(module).__name__


def build(given: Any) -> Base:
    """The base of a folder, a cached id, a variant, a configuration or a model.

    Raises:
        Gemma4CompatError: it is unknown.
    """
    model, name, assumed = models.on_meta(getattr(given, "config", given))
    modules = dict(model.named_modules())
    paths: dict[str, str] = {}
    for path in modules:
        if shared := ".".join(translation.shared_part(path)):
            paths.setdefault(shared, path)
    return Base(name=name, model=model, modules=modules, paths=paths, assumed=assumed)


def layer_of(name: str) -> tuple[int, str] | None:
    """The decoder layer of a module, and the module's name in it; None for a module outside the decoder layers."""
    match = _LAYER.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def quantized(base: Base, requested: str | None, notes: list[str]) -> Base:
    """The base with how its linears are stored: as its configuration says, or else as ``requested``.

    Raises:
        Gemma4CompatError: the quantization is unknown.
    """
    model, settings = base.model, config.stored_settings(base.model.config)
    if settings is None:
        if requested is None:
            return base
        config.check(requested, or_none=True)
        names = config.linear_names(model, config.default_skip_modules(model))
        return replace(base, quantization=requested, quantized=names)
    if qat.is_method(settings):
        notes.append(
            "the base is one of Google's QAT checkpoints: its layers have 2 to 8 bits and round their activations. "
            "An adapter cannot be merged into them, only into the model that dequantize() gives"
        )
        packed = frozenset(qat.packed(qat.converted(model)))
        return replace(base, modules=dict(model.named_modules()), quantization=qat.METHOD, quantized=packed)
    if (name := config.name_of(settings)) is None:
        method = str(settings.get("quant_method"))
        notes.append(f"the base is quantized with {method}, which this command cannot look into")
        return replace(base, quantization=method)
    names = config.linear_names(model, settings.get("llm_int8_skip_modules") or ["lm_head"])
    return replace(base, quantization=name, quantized=names - config.tied_linears(model))
