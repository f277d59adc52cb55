"""Verify a merged model: load the base with the adapter, then the merged model, and compare their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._merge import check
from gemma4_compat._merge import start as starts
from gemma4_compat._merge.check import Parity
from gemma4_compat._merge.start import Start
from gemma4_compat._merge.tensors import MergedTensors
from gemma4_compat._models import device_maps

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def verify(
    merged: Path,
    base: Path,
    tensors: MergedTensors,
    start: Start,
    dtype: str,
    *,
    device_map: Any,
    count: int,
    tolerance: float | None,
) -> Parity:
    """Compare the model in ``merged`` with the base with the adapter loaded.

    Args:
        merged: folder of the merged model.
        base: folder of the base.
        tensors: what was merged.
        start: how the base's weights were taken.
        dtype: of the merged weights, a key of ``start.DTYPES``.
        device_map: where the models run, of :func:`placement`.
        count: of prompts.
        tolerance: see :func:`check.compare`.
    """
    import torch
    import transformers

    model_class = getattr(transformers, type(tensors.model).__name__)
    options = {"dtype": getattr(torch, starts.DTYPES[dtype]), "device_map": device_map}
    adapter = tensors.adapter
    adapted = [*adapter.modules, *dict.fromkeys(name.rpartition(".")[0] for name in adapter.replaced)]
    prompts, notes = check.prompts(base, tensors.model, count, adapted)
    is_dequantized = start.quantize is not None and not starts.is_exact_in_4bit(start, tensors.base)

    def load_base() -> Any:
        if is_dequantized:
            model = _dequantized_base(model_class, merged, tensors, options)
        else:
            model = _stored_base(model_class, base, start, options)
        return _with_adapter(model, adapter.folder)

    def load_merged() -> Any:
        return model_class.from_pretrained(str(merged), **options).eval()

    reference = check.reference_outputs(load_base, prompts, adapted, _title(start, dtype, is_dequantized))
    return check.compare(load_merged, prompts, reference, tolerance=tolerance, notes=notes)


def _title(start: Start, dtype: str, is_dequantized: bool) -> str:
    if start.quantize is None:
        return "the base with the adapter loaded"
    if is_dequantized:
        return f"the base as {start.quantize} has its weights, with the adapter loaded, computed in {dtype}"
    return f"the {start.quantize} base with the adapter loaded"


def _stored_base(model_class: Any, base: Path, start: Start, options: dict[str, Any]) -> Any:
    """The base as ``from_pretrained`` loads it, quantized if the merge dequantized it."""
    from gemma4_compat._quantization import opt_in

    if start.quantize is not None and not start.stored:
        options = options | {"quantization_config": starts.quantization_config(start, options["dtype"])}
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


def _with_adapter(model: Any, adapter: Path) -> Any:
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(model, str(adapter)).eval()
    for module in loaded.modules():
        if type(module).__name__ == "Linear4bit":
            # The CPU kernel for inference rounds the scales of the weights; the kernel for training does not.
            module.training = True
    return loaded


def placement(model: Any, device_map: Any) -> Any:
    """``device_map`` as ``from_pretrained`` takes it: a GPU or the CPU if None.

    Raises:
        Gemma4CompatError: it is none, it names a device that is not here, or leaves a part of the model out.
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
                f"device_map has the entry {name!r}: {device!r}; it maps names of modules to devices (0, 'cuda:0', "
                f"'cpu', 'disk'), or is one device, or one of {', '.join(_AUTOMATIC)}"
            )
        if torch.device(device).type == "meta" if isinstance(device, torch.device) else device == "meta":
            raise Gemma4CompatError(f"device_map places {name!r} on 'meta', where nothing can be computed")
    device_maps.check(model, placed)
    return dict(placed)
