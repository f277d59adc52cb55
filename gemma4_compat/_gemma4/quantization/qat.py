"""transformers' layers for Google's quantization-aware-trained checkpoints (``quant_method: "gemma"``).

``QuantizedLinear`` and ``QuantizedEmbedding`` of ``transformers.integrations.gemma_quant`` hold integers of 2, 4 or 8
bits, packed, and dequantize them in each forward. A linear layer also rounds its inputs and outputs to 256
steps. Imports nothing upstream at module level.
"""

from __future__ import annotations

import sys
from typing import Any

from gemma4_compat._errors import Gemma4CompatError

METHOD = "gemma"
_MODULE = "transformers.integrations.gemma_quant"


def is_linear(module: Any) -> bool:
    """Whether this is one of these linear layers."""
    return _is(module, "QuantizedLinear")


def is_embedding(module: Any) -> bool:
    """Whether this is one of these embeddings."""
    return _is(module, "QuantizedEmbedding")


def _is(module: Any, name: str) -> bool:
    return type(module).__name__ == name and type(module).__module__ == _MODULE


def is_method(settings: Any) -> bool:
    """Whether a ``quantization_config``, an object or a dict, belongs to such a checkpoint."""
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method)) == METHOD


def refuse_plan(settings: Any) -> None:
    """Raise ``Gemma4CompatError`` for this quantization: the planner does not support it."""
    if is_method(settings):
        raise Gemma4CompatError(
            "the checkpoint is one of Google's QAT (quant_method 'gemma'); plans support bitsandbytes and bf16, but "
            "not the memory in which QAT layers dequantize. Load it with device_map='auto' and max_memory, or with "
            "your own map; to plan for other quantizations, call model.dequantize() and save the model first"
        )


def converted(model: Any) -> Any:
    """A model on meta, built from the configuration of such a checkpoint, with these layers in place of its own.

    Raises:
        Gemma4CompatError: the installed transformers does not have them.
    """
    import torch

    try:
        from transformers.quantizers.quantizer_gemma import GemmaQuantizer
        from transformers.utils.quantization_config import GemmaQuantizationConfig
    except ImportError as error:
        raise Gemma4CompatError(
            "this is one of Google's QAT checkpoints (quant_method 'gemma'); transformers reads them from 5.11 on"
        ) from error
    stored = model.config.quantization_config
    settings = GemmaQuantizationConfig.from_dict(stored) if isinstance(stored, dict) else stored
    with torch.device("meta"):
        GemmaQuantizer(settings, pre_quantized=True)._process_model_before_weight_loading(model)
    return model


def packed(model: Any) -> dict[str, Any]:
    """These layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if is_linear(module) or is_embedding(module)}


def below_multimodal_names(model: Any, settings: Any) -> Any:
    """``model``, or a stand-in that gives the modules of a text-only model their names in a multimodal one.

    The patterns of a multimodal checkpoint (``module_quant_configs``) name ``model.language_model.layers.0``, which a
    text-only model calls ``model.layers.0``. Replacing a module of the stand-in replaces the model's own, except for
    the head: see :func:`take_head`.
    """
    import torch

    patterns = list(settings.module_quant_configs or {})
    inside = any("language_model" in name for name, _ in model.named_modules())
    if (
        inside
        or settings.modules_to_not_convert is None
        or not any("language_model" in pattern for pattern in patterns)
    ):
        return model
    stand_in, outer = torch.nn.Module(), torch.nn.Module()
    outer.language_model = model.base_model
    stand_in.model = outer
    if model.get_output_embeddings() is not None:
        stand_in.lm_head = model.lm_head
    stand_in._keep_in_fp32_modules = model._keep_in_fp32_modules
    return stand_in


def take_head(model: Any, stand_in: Any) -> None:
    """Give the text-only model of :func:`below_multimodal_names` the layer that replaced its head."""
    if stand_in is not model:
        if hasattr(stand_in, "lm_head"):
            model.lm_head = stand_in.lm_head
        model._keys_to_ignore_on_load_unexpected = stand_in._keys_to_ignore_on_load_unexpected


def note_dtype(model: Any, dtype: Any) -> None:
    """Tell the linear layers of a model the dtype that it computes in."""
    for module in model.modules():
        if is_linear(module):
            module.gemma4_compat_dtype = dtype


def values(module: Any) -> Any:
    """The weight that one of their linear layers computes with, of shape ``(out, in)``.

    Its dtype is that of :func:`note_dtype`, or, without such a call, that of the scales: float32.
    """
    import torch

    with torch.no_grad():
        return module._dequantize_weights(getattr(module, "gemma4_compat_dtype", module.weight_scale.dtype))


def dequantized(model: Any, dtype: Any) -> Any:
    """Replace these layers by plain ones of ``dtype`` that hold the values they compute with; return the model.

    Activations are then no longer rounded. Other parameters stay as they are.
    """
    for name, module in packed(model).items():
        plain = _plain_linear(module, dtype) if is_linear(module) else _plain_embedding(model, name, module, dtype)
        plain.train(module.training)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)
    return model


def _plain_linear(module: Any, dtype: Any) -> Any:
    import torch

    plain = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
    with torch.no_grad():
        plain.weight = torch.nn.Parameter(module._dequantize_weights(dtype), requires_grad=False)
        if module.bias is not None:
            plain.bias = torch.nn.Parameter(module.bias.detach().to(dtype), requires_grad=False)
    return plain


def _plain_embedding(model: Any, name: str, module: Any, dtype: Any) -> Any:
    """An embedding of the class that the unquantized model has, which also scales rows."""
    import torch

    owner = model.get_submodule(name.rpartition(".")[0])
    kinds = vars(sys.modules[type(owner).__module__])
    (kind,) = (value for key, value in kinds.items() if key.endswith("TextScaledWordEmbedding"))
    with torch.no_grad():
        values = module._dequantize_weights(module.embedding_quantized, module.embedding_scale).to(dtype)
        with torch.device("meta"):
            plain = kind(module.num_embeddings, module.embedding_dim, owner.padding_idx, module.scalar_embed_scale)
        plain.weight = torch.nn.Parameter(values, requires_grad=False)
        plain.embed_scale = torch.tensor(module.scalar_embed_scale, device=values.device)
    return plain
