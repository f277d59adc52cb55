"""The types of JSON files, as far as this package or loops in the libraries depend on them.

Imports msgspec, so import it only where a file is read. Other fields are allowed and kept. Bounds are far above every
real file, and low enough that later steps take only seconds.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

#: 64-bit file sizes; a tensor has no more elements.
_Size = Annotated[int, Meta(ge=0, le=2**62)]
#: A dimension of a weight. The largest in Gemma 4 are the 262,144 tokens of the vocabulary.
_Width = Annotated[int, Meta(ge=0, le=2**31)]
_Positive = Annotated[int, Meta(ge=1, le=2**31)]
#: Layers of one model: Gemma 4 has at most 60, the deepest released models about 130.
_Layers = Annotated[int, Meta(ge=0, le=200)]
#: A name of a tensor or a module; real ones have at most 150 characters.
Name = Annotated[str, Meta(max_length=1000)]
#: Names of modules. A Gemma 4 with one module per expert has 12,000.
_Names = Annotated[list[Name], Meta(max_length=20_000)]
#: A regular expression. Unsloth writes the longest ones, of 600 characters.
_Pattern = Annotated[str, Meta(max_length=10_000)]
#: Entries by pattern. The 31B has 620 linears with full names, including towers.
_ByPattern = Annotated[dict[_Pattern, Any], Meta(max_length=1000)]
#: A name, a path or a version.
_Word = Annotated[str, Meta(max_length=5000)]
_Numbers = Annotated[list[int], Meta(max_length=300_000)]


class AdapterConfig(Struct):
    """``adapter_config.json`` of any PEFT type: the fields that the types share, and those of LoRA."""

    auto_mapping: dict[str, Any] | None = None
    base_model_name_or_path: _Word | None = None
    peft_version: _Word | None = None
    r: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    lora_alpha: float | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    lora_bias: bool | None = None
    fan_in_fan_out: bool | None = None
    bias: str | bool | None = None
    rank_pattern: _ByPattern | None = None
    alpha_pattern: _ByPattern | None = None
    target_modules: _Names | _Pattern | None = None
    exclude_modules: _Names | _Pattern | None = None
    feedforward_modules: _Names | _Pattern | None = None
    target_parameters: _Names | None = None
    modules_to_save: _Names | None = None
    layers_to_transform: _Numbers | int | None = None
    layers_pattern: Annotated[list[_Pattern], Meta(max_length=100)] | _Pattern | None = None
    trainable_token_indices: _Numbers | dict[str, _Numbers] | None = None
    layer_replication: Annotated[list[list[int]], Meta(max_length=1000)] | None = None


class _Part(Struct):
    """The fields that the configurations of the text model and of the towers share."""

    hidden_size: _Positive | None = None
    intermediate_size: _Positive | None = None
    num_hidden_layers: _Layers | None = None
    num_attention_heads: _Positive | None = None
    num_key_value_heads: _Positive | None = None
    num_global_key_value_heads: _Width | None = None
    head_dim: _Positive | None = None
    global_head_dim: _Width | None = None
    max_position_embeddings: _Width | None = None
    vocab_size: _Positive | None = None
    vocab_size_per_layer_input: _Width | None = None
    hidden_size_per_layer_input: _Width | None = None
    num_kv_shared_layers: _Layers | None = None
    num_experts: _Width | None = None
    top_k_experts: _Width | None = None
    moe_intermediate_size: _Width | None = None
    sliding_window: _Width | None = None
    position_embedding_size: _Width | None = None
    pooling_kernel_size: _Positive | None = None
    patch_size: _Positive | None = None
    conv_kernel_size: _Width | None = None
    output_proj_dims: _Width | None = None
    subsampling_conv_channels: Annotated[list[_Width], Meta(max_length=100)] | None = None
    layer_types: Annotated[list[str], Meta(max_length=200)] | None = None
    rope_parameters: dict[str, Any] | None = None
    num_labels: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    tie_word_embeddings: bool | None = None


class ModelConfig(_Part):
    """``config.json`` of a model."""

    model_type: _Word | None = None
    architectures: Annotated[list[_Word], Meta(max_length=100)] | None = None
    text_config: _Part | None = None
    vision_config: _Part | None = None
    audio_config: _Part | None = None
    quantization_config: dict[str, Any] | None = None
    id2label: dict[str, Any] | None = None
    label2id: dict[str, Any] | None = None


class ShardIndex(Struct):
    """``model.safetensors.index.json``: tensor -> file."""

    weight_map: dict[Name, Annotated[str, Meta(min_length=1, max_length=255)]]


class Tensor(Struct):
    """An entry of a safetensors header. The header also has ``__metadata__``, whose values are strings."""

    dtype: Annotated[str, Meta(max_length=100)] | UnsetType = UNSET
    shape: Annotated[list[_Size], Meta(max_length=64)] | str | UnsetType = UNSET
    data_offsets: tuple[_Size, _Size] | str | UnsetType = UNSET
