"""Verify a merged model: load the base with the adapter, then the merged model, and compare their outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemma4_compat._adapter_tools.merge import check, weights
from gemma4_compat._adapter_tools.merge.adapter import Adapter
from gemma4_compat._adapter_tools.merge.check import Parity
from gemma4_compat._adapter_tools.merge.tensors import MergedTensors
from gemma4_compat._adapter_tools.merge.weights import Start
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import device_maps

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


class Verifier:
    """Compares merged models with the base under the loaded adapters, which runs only once.

    Args:
        base: folder of the base.
        tensors: what was merged.
        start: which values of the base the merge started from.
        dtype: of the merged weights, a key of ``weights.DTYPES``.
        device_map: where the models run, from :func:`placement`.
        count: of prompts.
        tolerance: see :func:`check.compare`.
    """

    def __init__(
        self,
        base: Path,
        tensors: MergedTensors,
        start: Start,
        dtype: str,
        *,
        device_map: Any,
        count: int,
        tolerance: float | None,
    ) -> None:
        import torch
        import transformers

        self._class = getattr(transformers, type(tensors.model).__name__)
        self._options = {"dtype": getattr(torch, weights.DTYPES[dtype]), "device_map": device_map}
        self._base, self._tensors, self._start, self._dtype = base, tensors, start, dtype
        self._adapted = [*tensors.modules, *dict.fromkeys(name.rpartition(".")[0] for name in tensors.replaced)]
        self._prompts, self._notes = check.prompts(base, tensors.model, count, self._adapted)
        self._tolerance = tolerance
        self._reference: check.Reference | None = None

    def merged(self, folder: Path) -> Parity:
        """How the outputs of the merged model in ``folder`` compare."""
        start = self._start
        is_dequantized = start.quantize is not None and not weights.is_exact_in_4bit(start, self._tensors.base)

        def load_base() -> Any:
            if is_dequantized:
                model = _dequantized_base(self._class, folder, self._tensors, self._options)
            else:
                model = _stored_base(self._class, self._base, start, self._options)
            return _with_adapters(model, self._tensors.adapters)

        title = _title(start, self._dtype, is_dequantized)
        self._reference = check.reference_outputs(load_base, self._prompts, self._adapted, title)
        return check.compare(
            lambda: self._class.from_pretrained(str(folder), **self._options).eval(),
            self._prompts,
            self._reference,
            tolerance=self._tolerance,
            notes=self._notes,
        )

    def quantized(self, folder: Path, how: Start) -> Parity:
        """How the outputs of the merged model in ``folder``, quantized as ``how`` says, compare.

        They may differ by a few times what the same quantization of the base changes under the loaded adapter. If the
        base was already quantized, that change is zero; then they may differ by the adapter's whole effect.
        """
        reference = self._reference
        assert reference is not None
        if self._start.quantize is None:
            noise = check.difference(
                lambda: _with_adapters(
                    _stored_base(self._class, self._base, how, self._options), self._tensors.adapters
                ),
                self._prompts,
                reference,
            )
            reference = dataclasses.replace(reference, noise=noise)
            options: dict[str, Any] = {
                "noise_of": f"the {how.quantize} base with the adapter loaded",
                "factors": check.OF_QUANTIZATION,
            }
        else:
            reference = dataclasses.replace(reference, noise=reference.effect)
            options = {"noise_of": "the adapter's whole effect, which is the bound", "factors": (1.0, 1.0)}
        return check.compare(
            lambda: _in_training(self._class.from_pretrained(str(folder), **self._options).eval()),
            self._prompts,
            reference,
            tolerance=self._tolerance,
            notes=self._notes,
            **options,
        )


def _title(start: Start, dtype: str, is_dequantized: bool) -> str:
    if start.quantize is None:
        return "the base with the adapter loaded"
    if is_dequantized:
        return (
            f"the base with its weights rounded as in {start.quantize}, with the adapter loaded, computed in {dtype}"
        )
    return f"the {start.quantize} base with the adapter loaded"


def _stored_base(model_class: Any, base: Path, start: Start, options: dict[str, Any]) -> Any:
    """The base as ``from_pretrained`` loads it, quantized if the merge dequantized it."""
    from gemma4_compat._gemma4.quantization import opt_in

    if start.quantize is not None and not start.stored:
        options = options | {"quantization_config": weights.quantization_config(start, options["dtype"])}
    with opt_in.OFFLOADED.enabled():
        return model_class.from_pretrained(str(base), **options)


def _dequantized_base(model_class: Any, merged: Path, tensors: MergedTensors, options: dict[str, Any]) -> Any:
    """The base with the dequantized weights that the merge started from."""
    base = tensors.base
    values = {base.keys[name]: base.read(name).to(options["dtype"]) for name in base.disk}
    config = type(tensors.model.config).from_pretrained(str(merged))
    config.tie_word_embeddings = bool(tensors.sources)
    config.get_text_config().tie_word_embeddings = bool(tensors.sources)
    return model_class.from_pretrained(None, config=config, state_dict=values, **options)


def _with_adapters(model: Any, adapters: Sequence[Adapter]) -> Any:
    from peft import PeftModel

    first, *others = adapters
    loaded = PeftModel.from_pretrained(model, str(first.folder), adapter_name=first.name)
    for adapter in others:
        loaded.load_adapter(str(adapter.folder), adapter_name=adapter.name)
    if others:
        loaded.base_model.set_adapter([adapter.name for adapter in adapters])
    for adapter in adapters:
        if adapter.weight == 1:
            continue
        for module in loaded.modules():
            if hasattr(module, "set_scale"):
                module.set_scale(adapter.name, adapter.weight)
    return _in_training(loaded.eval())


def _in_training(model: Any) -> Any:
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            # The CPU kernel for inference rounds the scales of the weights; the kernel for training does not.
            module.training = True
    return model


def placement(model: Any, device_map: Any) -> Any:
    """``device_map`` as ``from_pretrained`` takes it; if None, a GPU or the CPU.

    Raises:
        Gemma4CompatError: it is not a device map, names a missing device, or leaves a part of the model out.
    """
    import torch

    if device_map is None:
        return {"": 0} if torch.cuda.is_available() else {"": "cpu"}
    if isinstance(device_map, str) and device_map in _AUTOMATIC:
        return device_map
    placed = device_map if isinstance(device_map, Mapping) else {"": device_map}
    for name, device in placed.items():
        if not isinstance(name, str) or isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
            raise Gemma4CompatError(
                f"device_map has the entry {name!r}: {device!r}; it must map names of modules to devices (0, "
                f"'cuda:0', 'cpu', 'disk'), or be one device, or one of {', '.join(_AUTOMATIC)}"
            )
        if torch.device(device).type == "meta" if isinstance(device, torch.device) else device == "meta":
            raise Gemma4CompatError(f"device_map places {name!r} on 'meta', where nothing can be computed")
    device_maps.check(model, placed)
    return dict(placed)
