"""Google's QAT checkpoints load, on one device and with offloaded modules.

Symptom: ``RuntimeError: You set `ignore_mismatched_sizes` to `False` `` on transformers 5.23, for
``embed_tokens_per_layer.embedding_scale`` of ``google/gemma-4-E2B-it-qat-mobile-transformers`` and similar
checkpoints. On every release ``RuntimeError: expected a floating-point or complex dtype, but got dtype=torch.uint8``
from ``from_pretrained`` with a map that offloads a layer to disk.

Cause: ``replace_with_quant_layers`` prepares one scale for each row of an embedding. For the per-layer embeddings the
checkpoints have one scale per row and layer; transformers 5.23 compares the shapes, while earlier releases took what
the file holds. And ``_init_weights`` draws random numbers for linear layers whose weights are on the meta device.
Layers on disk stay there, but their weights are integers.

Fix: After the layers were replaced, the scales get the shapes in the checkpoint's files, and the packed weights are
marked as initialized. A weight that the checkpoint lacks is still reported as missing. If the config of a text-only
model has the ``quantization_config`` of a multimodal checkpoint, its patterns find the modules by their names in the
multimodal one.

Remove when: transformers prepares scales of the shape that the checkpoint has, and initializes no packed weights.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.checkpoint.header import header
from gemma4_compat._gemma4.quantization import qat
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F56", severity="crash", affected=">=5.11", acts_on="QAT checkpoints", requires="accelerate")

_SCALE = "embedding_scale"


@PATCH.replaces("transformers.quantizers.quantizer_gemma", "GemmaQuantizer._process_model_before_weight_loading")
def process_model_before_weight_loading(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = model.dtype  # scales are float32 in any model
    named = qat.below_multimodal_names(model, self.quantization_config)
    result = original(self, named, *args, **kwargs)
    qat.take_head(model, named)
    qat.note_dtype(model, dtype)
    layers = qat.packed(model)
    for module in layers.values():
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.is_floating_point():
                parameter._is_hf_initialized = True
    embeddings = {name: module for name, module in layers.items() if qat.is_embedding(module)}
    if embeddings:
        _shape_scales(embeddings, kwargs.get("checkpoint_files") or ())
    return result


def _shape_scales(embeddings: dict[str, Any], files: Iterable[str]) -> None:
    """Give the scales of embeddings the shapes that they have in the files.

    In a text model loaded from a multimodal checkpoint the names have other prefixes, so only their ends are compared.
    """
    import torch

    shapes = {
        ".".join(key.split(".")[-2:]): entry.shape
        for file in files
        if str(file).endswith(".safetensors")
        for key, entry in header(Path(file)).items()
        if key.endswith(f".{_SCALE}")
    }
    for name, module in embeddings.items():
        scale = module.embedding_scale
        shape = shapes.get(f"{name.rpartition('.')[2]}.{_SCALE}", scale.shape)
        rows, groups = shape[0], shape[-1]
        if tuple(shape) != tuple(scale.shape) and rows == scale.shape[0] and module.embedding_dim % groups == 0:
            empty = torch.empty(tuple(shape), dtype=scale.dtype, device=scale.device)
            module.embedding_scale = torch.nn.Parameter(empty, requires_grad=False)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    checkpoint = workspace.qat()
    reference = tiny.load(checkpoint, device=workspace.main)
    placement = tiny.device_map(reference, "layers", main=workspace.main, offloaded="disk")
    model = tiny.load(checkpoint, device_map=placement, offload_folder=workspace.folder / "qat-offload")
    found = workspace.difference(workspace.outputs(reference), model)
    return Outcome.of_parity(found, "layers of a QAT checkpoint loaded to disk")
