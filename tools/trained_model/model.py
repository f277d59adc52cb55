"""The model, its tokenizer and the files beside its weights."""

from __future__ import annotations

from typing import Any

from gemma4_compat._gemma4.models import variants
from tools.trained_model import kinds

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
#: What buffers of a new model hold, by the end of their names.
_BUFFERS = {
    **dict.fromkeys(("input_min", "output_min"), -_BOUND),
    **dict.fromkeys(("input_max", "output_max"), _BOUND),
    "layer_scalar": 0.5,
    "std_bias": 0.25,
    "std_scale": 0.5,
}
TEMPLATE = """\
<bos>{% for turn in messages %}<|turn>{{ turn['role'] }}
{% set parts = [{'type': 'text', 'text': turn['content']}] if turn['content'] is string else turn['content'] %}\
{% for part in parts %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|{{ part['type'] }}|>{% endif %}\
{% endfor %}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}"""


def config(kind: str) -> Any:
    """The configuration of a kind (one of :data:`kinds.NAMES`) in small.

    Raises:
        Gemma4CompatError: the installed transformers has no such model.
    """
    text = kinds.text(kind) | {
        "vocab_size": VOCABULARY,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
    }
    if text.get("hidden_size_per_layer_input"):
        text["vocab_size_per_layer_input"] = VOCABULARY
    if kind == variants.UNIFIED:
        classes, prefix = variants.unified_classes(), "Gemma4Unified"
    else:
        from transformers.models.gemma4 import configuration_gemma4 as classes

        prefix = "Gemma4"
    parts = {"text": text, "vision": kinds.vision(kind), "audio": kinds.audio(kind)}
    made = {
        f"{name}_config": None if given is None else getattr(classes, f"{prefix}{name.title()}Config")(**given)
        for name, given in parts.items()
    }
    return getattr(classes, f"{prefix}Config")(
        **made,
        image_token_id=IMAGE,
        audio_token_id=AUDIO,
        video_token_id=SPECIAL.index("<|video|>"),
        boi_token_id=SPECIAL.index("<|image>"),
        eoi_token_id=SPECIAL.index("<image|>"),
        boa_token_id=SPECIAL.index("<|audio>"),
        eoa_token_index=SPECIAL.index("<audio|>"),
        tie_word_embeddings=True,
    )


def new(seed: int, kind: str) -> Any:
    """An untrained model in float32."""
    import torch
    import transformers

    shape = config(kind)
    name = type(shape).__name__.replace("Config", "ForConditionalGeneration")
    torch.manual_seed(seed)
    model = getattr(transformers, name)(shape)
    with torch.no_grad():
        for name, value in model.named_buffers():
            # Not what a new model has: a defect that loses them shows.
            for end, filled in _BUFFERS.items():
                if name.endswith(end):
                    value.fill_(filled)
        for name, value in model.named_parameters():
            if name.endswith("q_norm.weight"):  # the models do not scale scores: at 1, attention is too sharp to learn
                value.fill_(value.numel() ** -0.5)
            elif name.endswith("router.proj.weight"):  # else all experts are nearly as likely at first
                value.normal_(0.0, 1.0)
        if kind != variants.UNIFIED:
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
