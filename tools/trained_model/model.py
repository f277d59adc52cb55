"""The model, its tokenizer and the files beside its weights."""

from __future__ import annotations

from typing import Any

#: Special tokens by their numbers; the byte ``b`` is token ``BYTES + b``.
SPECIAL = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<|turn>",
    "<turn|>",
    "<|image>",
    "<|image|>",
    "<image|>",
    "<|audio>",
    "<|audio|>",
    "<audio|>",
    "<|video|>",
)
BYTES, VOCABULARY = 16, 288
PAD, EOS, BOS, TURN, END, IMAGE, AUDIO = (
    SPECIAL.index(name) for name in ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|image|>", "<|audio|>")
)
#: Bounds of clipped linears. Random inputs would seldom reach those of a released model; these matter.
_BOUND = 1.5
_LAYER_SCALAR = 0.5
TEMPLATE = """\
<bos>{% for turn in messages %}<|turn>{{ turn['role'] }}
{% set parts = [{'type': 'text', 'text': turn['content']}] if turn['content'] is string else turn['content'] %}\
{% for part in parts %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|{{ part['type'] }}|>{% endif %}\
{% endfor %}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}"""


def config() -> Any:
    """An E2B's configuration in small: per-layer embeddings, 3 of 6 layers share keys and values and are twice as
    wide, sliding and full attention, towers with clipped linears.
    """
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    text = {
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size": 128,
        "hidden_size_per_layer_input": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": 64,
        "max_position_embeddings": 2048,
        "final_logit_softcapping": 30.0,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "patch_size": 8,
        "position_embedding_size": 16,
        "pooling_kernel_size": 3,
        "use_clipped_linears": True,
    }
    audio = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [128, 16],
        "output_proj_dims": 64,
        "use_clipped_linears": True,
    }
    return gemma4.Gemma4Config(
        text_config=gemma4.Gemma4TextConfig(**text),
        vision_config=gemma4.Gemma4VisionConfig(**vision),
        audio_config=gemma4.Gemma4AudioConfig(**audio),
        image_token_id=IMAGE,
        audio_token_id=AUDIO,
        video_token_id=SPECIAL.index("<|video|>"),
        boi_token_id=SPECIAL.index("<|image>"),
        eoi_token_id=SPECIAL.index("<image|>"),
        boa_token_id=SPECIAL.index("<|audio>"),
        eoa_token_index=SPECIAL.index("<audio|>"),
        tie_word_embeddings=True,
    )


def new(seed: int) -> Any:
    """An untrained model in float32."""
    import torch
    from transformers import Gemma4ForConditionalGeneration

    torch.manual_seed(seed)
    model = Gemma4ForConditionalGeneration(config())
    with torch.no_grad():
        for name, value in model.named_buffers():
            # Not what a new model has: a defect that loses them shows.
            if name.endswith(("input_min", "output_min")):
                value.fill_(-_BOUND)
            elif name.endswith(("input_max", "output_max")):
                value.fill_(_BOUND)
            elif name.endswith("layer_scalar"):
                value.fill_(_LAYER_SCALAR)
        for name, value in model.named_parameters():
            if name.endswith("q_norm.weight"):  # the models do not scale scores: at 1, attention is too sharp to learn
                value.fill_(value.numel() ** -0.5)
        model.model.vision_tower.patch_embedder.position_embedding_table.normal_(0.0, 0.1)
    return model


def tokenizer() -> Any:
    """A token a byte, with the names of Gemma 4's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {name: number for number, name in enumerate(SPECIAL)}
    vocabulary |= {sign: BYTES + byte for byte, sign in bytes_to_unicode().items()}
    tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        extra_special_tokens={
            "image_token": "<|image|>",
            "audio_token": "<|audio|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "sot_token": "<|turn>",
            "eot_token": "<turn|>",
        },
    )
    made.chat_template = TEMPLATE
    return made
