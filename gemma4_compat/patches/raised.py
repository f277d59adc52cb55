"""Errors that the reproductions raised in the measured stacks, without the shim: patch -> error texts.

Written by ``python tools/docs.py`` from docs/matrix; do not edit. ``gemma4-compat explain`` searches them.
"""

from __future__ import annotations

# fmt: off
RAISED: dict[str, tuple[str, ...]] = {
    "accelerate-hf-initialized": (
        "TypeError: Params4bit.__new__() got an unexpected keyword argument '_is_hf_initialized'",
    ),
    "accelerate-int8-offload": (
        "RuntimeError: Cannot access accelerator device when none is available.",
    ),
    "accelerate-load-tied": (
        "RuntimeError: Tensor on device meta is not on the expected device cpu!",
    ),
    "accelerate-move-offloaded": (
        "NotImplementedError: Cannot copy out of meta tensor; no data! (0 tensors moved)",
    ),
    "accelerate-nested-map": (
        "ValueError: position_embedding_table is on the meta device, we need a `value` to put in on cpu.",
    ),
    "accelerate-save-state-offloaded": (
        "RuntimeError: Function MmBackward0 returned an invalid gradient at index 1 - expected device meta but got cpu",
    ),
    "accelerate-skip-keys": (
        "KeyError: 3",
        "KeyError: 'sliding_attention'",
    ),
    "accelerate-split-buffers": (
        "ValueError: The device_map provided does not give any device for the following parameters: model.language_model.layers.3.layer_scalar",
    ),
    "accelerate-tied-devices": (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and second:0! (aten.embedding.default)",
    ),
    "accelerate-train-offloaded": (
        "NotImplementedError: Cannot copy out of meta tensor; no data!",
    ),
    "bitsandbytes-int8-load-state": (
        "RuntimeError: Loading a quantized checkpoint into non-quantized Linear8bitLt is not supported. Please call module.cuda() before module.load_state_dict()",
    ),
    "bitsandbytes-int8-meta-scales": (
        "AttributeError: `model.vision_tower.patch_embedder.input_proj.SCB` is neither a parameter, buffer, nor extra state.",
        "AttributeError: Linear8bitLt has no attribute `SCB`",
    ),
    "bitsandbytes-meta-quant-state": (
        "RuntimeError: Tensor.item() cannot be called on meta tensors",
    ),
    "peft-adalora-devices": (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and second:0! (aten.add_.Tensor)",
    ),
    "peft-adalora-unused": (
        "TypeError: unsupported operand type(s) for *: 'Parameter' and 'NoneType'",
    ),
    "peft-clippable-linear": (
        "ValueError: Target module Gemma4ClippableLinear( (linear): Linear(in_features=64, out_features=64, bias=False) ) is not supported. Currently, only the following modules are supported: `torch.nn.Linear`, `torch.nn.Embedding`, `torch.nn.Conv1d`, `torch.nn.Conv2d`, `torch.nn.Conv3d`, `transformers.pyto",
    ),
    "peft-hotswap-offloaded": (
        "RuntimeError: Tensor on device meta is not on the expected device cpu!",
    ),
    "peft-input-devices": (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and second:0! (aten.mm.default)",
    ),
    "peft-prefix-placement": (
        "AttributeError: 'Gemma4Config' object has no attribute 'num_hidden_layers'",
    ),
    "peft-qat-merge": (
        "RuntimeError: The size of tensor a (32) must match the size of tensor b (64) at non-singleton dimension 1",
    ),
    "peft-quantized-tuners": (
        "ValueError: Target module Gemma4ClippableLinear( (linear): Linear(in_features=64, out_features=64, bias=False) ) is not supported. Currently, only `torch.nn.Linear`, `torch.nn.Conv2d`, and `Conv1D` are supported.",
    ),
    "peft-save-offloaded": (
        "NotImplementedError: Cannot copy out of meta tensor; no data!",
    ),
    "peft-shared-devices": (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and second:0! (aten.bmm.default)",
    ),
    "peft-unilora-frod": (
        "NotImplementedError: Cannot copy out of meta tensor; no data!",
    ),
    "peft-virtual-tokens": (
        "RuntimeError: It seems like you tried to call `forward` from `inputs_embeds` without providing `input_ids`, and that the `inputs_embeds` you provided do not exactly match the embedding weights. Since Gemma4 needs to reverse the embedding to compute another embedding, make sure you provide exact `inp",
    ),
    "transformers-assistant-arguments": (
        "TypeError: SinglePositionMultiTokenCandidateGenerator.__init__() missing 2 required positional arguments: 'input_ids' and 'model_kwargs'",
    ),
    "transformers-assistant-sharing": (
        "ValueError: The set of layer types producing a cache is different than the set of layer types using them",
    ),
    "transformers-assisted-cache": (
        "ValueError: Cannot `crop` a `DynamicSlidingWindowLayer` after it has seen more tokens than itssliding window (otherwise some states are lost)",
    ),
    "transformers-audio-attention": (
        "ValueError: Gemma4AudioModel does not support an attention implementation through torch.nn.functional.scaled_dot_product_attention yet. Please request the support for this architecture: https://github.com/huggingface/transformers/issues/28005. If you believe this error is a bug, please open an issue",
    ),
    "transformers-audio-autocast": (
        "RuntimeError: value cannot be converted to type c10::Half without overflow",
    ),
    "transformers-audio-dtype": (
        "RuntimeError: masked_scatter: expected self and source to have same dtypes but gotFloat and BFloat16",
    ),
    "transformers-auto-map": (
        "RuntimeError: Tensor on device meta is not on the expected device cpu!",
        "ValueError: You are trying to offload the whole model to the disk. Please use the `disk_offload` function instead.",
    ),
    "transformers-config-reads": (
        "AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute and may vary across layers. Access it via the individual layer configs instead (e.g. config.per_layer_config[i].head_dim). To read the global config value from config.head_dim anyway, set `allow_global_per_layer_attribute_acc",
    ),
    "transformers-dequantized-adapter": (
        "AttributeError: 'Parameter' object has no attribute 'quant_state'",
    ),
    "transformers-embedding-devices": (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and second:0! (aten.eq.Tensor)",
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and second:0! (aten.where.self)",
    ),
    "transformers-embedding-search": (
        "RuntimeError: It seems like you tried to call `forward` from `inputs_embeds` without providing `input_ids`, and that the `inputs_embeds` you provided do not exactly match the embedding weights. Since Gemma4 needs to reverse the embedding to compute another embedding, make sure you provide exact `inp",
    ),
    "transformers-flash-attention": (
        "RuntimeError: FlashAttention forward only supports head dimension at most 256",
    ),
    "transformers-generate-embeddings": (
        "ValueError: You passed `inputs_embeds` to `.generate()`, but the model class Gemma4ForConditionalGeneration doesn't have its forwarding implemented. See the GPT2 implementation for an example (https://github.com/huggingface/transformers/pull/21405), and feel free to open a PR with it!",
    ),
    "transformers-given-per-layer": (
        "TypeError: Gemma4TextModel( (embed_tokens): Gemma4TextScaledWordEmbedding(256, 64, padding_idx=0) (layers): ModuleList( (0-1): 2 x Gemma4TextDecoderLayer( (self_attn): Gemma4TextAttention( (q_proj): Linear(in_features=64, out_features=64, bias=False) (q_norm): Gemma4RMSNorm() (k_norm): Gemma4RMSNorm",
        "TypeError: Gemma4TextModel( (embed_tokens): Gemma4TextScaledWordEmbedding(256, 64, padding_idx=0) (layers): ModuleList( (0-1): 2 x Gemma4TextDecoderLayer( (self_attn): Gemma4TextAttention( (q_norm): Gemma4RMSNorm() (k_norm): Gemma4RMSNorm() (v_norm): Gemma4RMSNorm() (k_proj): Linear(in_features=64, ",
    ),
    "transformers-map-boundaries": (
        "ValueError: weight is on the meta device, we need a `value` to put in on cpu.",
    ),
    "transformers-model-device": (
        "RuntimeError: Tensor.item() cannot be called on meta tensors",
    ),
    "transformers-offloaded-embedding": (
        "RuntimeError: Tensor on device meta is not on the expected device cpu!",
    ),
    "transformers-paged-cache": (
        "AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute and may vary across layers. Access it via the individual layer configs instead (e.g. config.per_layer_config[i].head_dim). To read the global config value from config.head_dim anyway, set `allow_global_per_layer_attribute_acc",
        "AttributeError: 'Gemma4Config' object has no attribute 'num_attention_heads'",
        "ValueError: num_key_value_heads or num_attention_heads could not be found in the config: Gemma4Config { \"architectures\": [ \"Gemma4ForConditionalGeneration\" ], \"audio_config\": { \"_name_or_path\": \"\", \"architectures\": null, \"attention_chunk_size\": 12, \"attention_context_left\": 13, \"attention_context_ri",
        "ValueError: num_key_value_heads or num_attention_heads could not be found in the config: Gemma4Config { \"architectures\": [ \"Gemma4ForConditionalGeneration\" ], \"audio_config\": { \"_name_or_path\": \"\", \"architectures\": null, \"attention_chunk_size\": 12, \"attention_context_left\": 13, \"attention_context_ri",
    ),
    "transformers-peft-release": (
        "ValueError: The version of PEFT you are using is not compatible, please use a version >= 0.22.0",
    ),
    "transformers-per-layer-devices": (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and second:0! (aten.add.Tensor)",
    ),
    "transformers-pipeline-device": (
        "RuntimeError: Expected one of cpu, cuda, ipu, xpu, mkldnn, opengl, opencl, ideep, hip, ve, fpga, maia, xla, lazy, vulkan, mps, meta, hpu, mtia, privateuseone device type at start of device string: disk",
    ),
    "transformers-qat-dequantize": (
        "NotImplementedError: QuantizationMethod.GEMMA has no implementation of `dequantize`, please raise an issue on GitHub.",
    ),
    "transformers-qat-loading": (
        "RuntimeError: You set `ignore_mismatched_sizes` to `False`, thus raising an error. For details look at the above report!",
        "RuntimeError: expected a floating-point or complex dtype, but got dtype=torch.uint8",
    ),
    "transformers-qat-saving": (
        "TypeError: 'bool' object is not callable",
    ),
    "transformers-quantized-audio": (
        "TypeError: torch.finfo() requires a floating point input type. Use torch.iinfo to handle 'torch.finfo'",
    ),
    "transformers-quantized-vision-unified": (
        "RuntimeError: mixed dtype (CPU): expect parameter to have scalar type of Float",
    ),
    "transformers-resave-quantized": (
        "NotImplementedError:",
    ),
    "transformers-resize-offloaded": (
        "ValueError: Trying to set a tensor of shape torch.Size([256, 64]) in \"weight\" (which has shape torch.Size([300, 64])), this looks incorrect.",
    ),
    "transformers-save-offloaded-unified": (
        "AttributeError: Gemma4UnifiedVisionEmbedder has no attribute `embedding_projection`",
    ),
    "transformers-shared-kv": (
        "KeyError: 3",
        "KeyError: 'sliding_attention'",
    ),
    "transformers-static-cache": (
        "IndexError: list index out of range",
    ),
    "transformers-static-chunks": (
        "RuntimeError: index_copy_(): Source/destination tensor must have same slice shapes. Destination slice shape: 1 1 32 at dimension 2 and source slice shape: 1 1 64 at dimension 0.",
        "AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute and may vary across layers. Access it via the individual layer configs instead (e.g. config.per_layer_config[i].head_dim). To read the global config value from config.head_dim anyway, set `allow_global_per_layer_attribute_acc",
    ),
    "transformers-tensor-parallel": (
        "RuntimeError: aten.where.self got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed operators!",
    ),
    "transformers-text-training": (
        "ValueError: `mm_token_type_ids` is required as a model input when training",
    ),
    "transformers-tied-head": (
        "AssertionError:",
    ),
    "transformers-tied-split": (
        "KeyError: 'lm_head.weight'",
    ),
    "transformers-unfed-towers": (
        "ValueError: Target module Gemma4ClippableLinear( (linear): Linear(in_features=64, out_features=64, bias=False) ) is not supported. Currently, only the following modules are supported: `torch.nn.Linear`, `torch.nn.Embedding`, `torch.nn.Conv1d`, `torch.nn.Conv2d`, `torch.nn.Conv3d`, `transformers.pyto",
    ),
    "transformers-vision-dtype": (
        "RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16",
    ),
    "transformers-vision-masks": (
        "IndexError: index 24 is out of bounds for dimension 1 with size 24",
    ),
}
