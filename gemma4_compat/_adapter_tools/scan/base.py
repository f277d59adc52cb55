"""The base of a scan: its class on the meta device, and how its linears are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gemma4_compat._adapter_tools.scan.result import Findings
from gemma4_compat._adapters import clipped
from gemma4_compat._common import shadowed
from gemma4_compat._models import build as models
from gemma4_compat._quantization import config, qat

_QUANTIZATIONS = {"4bit": "4-bit ", "4bit-double": "4-bit ", "8bit": "8-bit "}


@dataclass(frozen=True, kw_only=True)
class Base:
    """A model without weights.

    Attributes:
        name: as ``from_pretrained`` takes it.
        model: the model on the meta device.
        modules: its modules by path, as they are before an adapter is injected.
        quantization: how its linears are stored: "4bit", "4bit-double", "8bit", another method's name, or None.
        quantized: the paths of the linears that are stored so, as far as known.
    """

    name: str
    model: Any
    modules: Mapping[str, Any]
    quantization: str | None
    quantized: frozenset[str]

    def kind(self, path: str) -> str:
        """What a module is, as :class:`Hit` names it."""
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


def build(base: Any, quantize: str | None, findings: Findings) -> Base:
    """The base on the meta device.

    Args:
        base: see ``scan_adapter``.
        quantize: how it will be quantized where its own configuration does not say.
        findings: where notes go.

    Raises:
        Gemma4CompatError: the base or the quantization is unknown.
    """
    shadowed.refuse("torch", "transformers", "peft")
    model, name, assumed = models.on_meta(getattr(base, "config", base))
    if assumed:
        findings.notes.append(assumed)
    quantization, quantized = _quantization(model, quantize, findings)
    modules = dict(model.named_modules())
    return Base(name=name, model=model, modules=modules, quantization=quantization, quantized=quantized)


def _quantization(model: Any, requested: str | None, findings: Findings) -> tuple[str | None, frozenset[str]]:
    """How the base's linears are stored, and which."""
    stored = getattr(model.config, "quantization_config", None)
    if stored is None:
        if requested is None:
            return None, frozenset()
        config.check(requested, or_none=True)
        return requested, config.linear_names(model, config.default_skip_modules(model))
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    if qat.is_method(settings):
        findings.notes.append(
            "the base is one of Google's QAT checkpoints: its layers have 2 to 8 bits and round their activations. "
            "An adapter cannot be merged into them, only into the model that dequantize() gives"
        )
        return qat.METHOD, frozenset(qat.packed(qat.converted(model)))
    if (name := config.name_of(settings)) is None:
        method = str(settings.get("quant_method"))
        findings.notes.append(f"the base is quantized with {method}, which this command cannot look into")
        return method, frozenset()
    skip = settings.get("llm_int8_skip_modules") or ["lm_head"]
    return name, config.linear_names(model, skip) - config.tied_linears(model)
