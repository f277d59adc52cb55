"""Models whose layers stay packed, also where compressed-tensors is not installed."""

from __future__ import annotations

import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny

needs_library = pytest.mark.skipif(
    find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed: nox -s quantizers"
)
#: Bits of a value, and columns that share a scale (0: all of a row).
FORMATS = [(4, 32), (4, 128), (4, 0), (8, 0)]


class Status(str):
    """Stands for a ``QuantizationStatus``."""

    __module__ = "compressed_tensors.quantization"


def plain(workspace: Any, **options: Any) -> Any:
    """The model with the same values in bf16."""
    return tiny.load(workspace.cached(workspace._packed, packed=False, **options))


def as_loaded(workspace: Any, scheme: dict[str, Any] | None = None, **options: Any) -> Any:
    """The model as compressed-tensors leaves it in ``from_pretrained``: packed tensors, a scheme, its hook."""
    import torch

    model, tensors = plain(workspace, **options), stored(workspace, **options)
    weights = {
        "num_bits": options.get("bits", 4),
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        **(scheme or {}),
    }
    activations = weights.pop("input_activations", None)
    for name, module in model.named_modules():
        if f"{name}.weight_packed" not in tensors:
            continue
        del module.weight
        for kind in ("weight_packed", "weight_scale", "weight_shape"):
            module.register_parameter(kind, torch.nn.Parameter(tensors[f"{name}.{kind}"], requires_grad=False))
        module.quantization_scheme = types.SimpleNamespace(
            weights=types.SimpleNamespace(**weights), input_activations=activations, output_activations=None
        )
        module.quantization_status = Status("compressed")
        module.forward = types.MethodType(torch.nn.Linear.forward, module)
    model.ct_decompress_hook = model.register_forward_pre_hook(_decompressed)
    return model


def _decompressed(model: Any, _inputs: Any) -> None:
    raise AssertionError("compressed-tensors would decompress the model")


def kept(workspace: Any, **options: Any) -> Any:
    """The model with packed layers."""
    from gemma4_compat._gemma4.quantization import packed_linear
    from gemma4_compat._kernels.match import dequantizing

    packed_linear.keep_packed(model := as_loaded(workspace, **options), dequantizing.unpacked)
    return model


def stored(workspace: Any, **options: Any) -> dict[str, Any]:
    """The tensors of the checkpoint."""
    from safetensors.torch import load_file

    return dict(load_file(folder(workspace, **options) / "model.safetensors"))


def folder(workspace: Any, **options: Any) -> Path:
    return Path(workspace.cached(workspace._packed, **options))


def nbytes(model: Any) -> int:
    """What the storages of a model's tensors take, without those on meta."""
    values = [value for value in [*model.parameters(), *model.buffers()] if not value.is_meta]
    found = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in values}
    return sum(found.values())


def reference(values: Any, scale: Any) -> Any:
    """Integers times their scales, in the dtype of the scales: the definition."""
    return (values.unflatten(1, (scale.shape[-1], -1)).to(scale.dtype) * scale[..., None]).flatten(1)
