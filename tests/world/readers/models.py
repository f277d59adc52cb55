"""The tiny checkpoints as the readers take them, and their logits: of transformers with PEFT, mlx-lm, llama.cpp."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._lab import tiny

#: A prompt that is longer than the sliding window of the tiny models, 8.
PROMPT = (2, 5, 17, 33, 80, 101, 9, 44, 7, 61, 3, 12)


def as_released(checkpoint: Path, folder: Path) -> Path:
    """A copy whose configuration has the fields of Google's, which mlx-lm reads; transformers 5.23 saves others."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    for settings in (text.pop("per_layer_config", None) or {}).values():
        for name, value in settings.items():
            text[{"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}[name]] = value
    text.setdefault("global_head_dim", text["head_dim"])
    config["vocab_size"] = text["vocab_size"]
    if "mm_embed_dim" in config.get("vision_config", {}):  # the 12B's
        vision = config["vision_config"]
        vision["model_patch_size"] = vision["patch_size"] * vision["pooling_kernel_size"]
        config["audio_config"]["output_proj_dims"] = config["audio_config"]["audio_embed_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def by_peft(checkpoint: Path, adapter: Path | None) -> Any:
    """Logits in float32, of shape (tokens, vocabulary)."""
    import torch
    from peft import PeftModel

    model = tiny.load(checkpoint).float()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).float()
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([PROMPT])).logits[0].float().numpy()


def by_mlx_lm(checkpoint: Path, adapter: Path | None) -> Any:
    """Likewise, of mlx-lm."""
    import mlx.core as mx
    import numpy
    from mlx_lm import utils
    from mlx_lm.tuner.utils import load_adapters

    mx.set_default_device(mx.cpu)
    model, _ = utils.load_model(checkpoint)
    model.set_dtype(mx.float32)
    if adapter is not None:
        model = load_adapters(model, str(adapter))
    model.eval()
    return numpy.array(model(mx.array([PROMPT])).astype(mx.float32))[0]


def by_mlx_vlm(checkpoint: Path, adapter: Path | None) -> Any:
    """Likewise, of mlx-vlm."""
    import mlx.core as mx
    import numpy
    from mlx_vlm import utils
    from mlx_vlm.trainer.peft import load_adapters

    mx.set_default_device(mx.cpu)
    model = utils.load_model(checkpoint)
    model.set_dtype(mx.float32)
    if adapter is not None:
        model = load_adapters(model, adapter)
    model.eval()
    return numpy.array(model(mx.array([PROMPT])).logits.astype(mx.float32))[0]


def by_llama_cpp(model: Path, adapter: Path | None) -> Any:
    """Likewise, of llama.cpp; ``model`` is a GGUF file. (``llama_cpp.Llama`` wants words in the vocabulary.)"""
    import llama_cpp
    import numpy

    llama_cpp.llama_backend_init()
    loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
    assert loaded, "llama.cpp does not read the base"
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_threads, options.n_threads_batch = 64, 1, 1
    options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(loaded, options)
    if adapter is not None:
        lora = llama_cpp.llama_adapter_lora_init(loaded, str(adapter / "adapter.gguf").encode())
        assert lora, "llama.cpp does not read the adapter"
        assert llama_cpp.llama_set_adapter_lora(context, lora, 1.0) == 0
    batch = llama_cpp.llama_batch_init(len(PROMPT), 0, 1)
    batch.n_tokens = len(PROMPT)
    for place, token in enumerate(PROMPT):
        batch.token[place], batch.pos[place], batch.logits[place] = token, place, True
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
    assert llama_cpp.llama_decode(context, batch) == 0
    width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
    rows = [llama_cpp.llama_get_logits_ith(context, place) for place in range(len(PROMPT))]
    logits = numpy.array([numpy.ctypeslib.as_array(row, (width,)) for row in rows])
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(loaded)
    return logits


def write_gguf(checkpoint: Path, file: Path) -> Path:
    """The language model of a checkpoint for llama.cpp, in float32, with a vocabulary of numbers.

    Keys and tensors are those that ``llama_model_gemma4`` asks for.
    """
    import gguf
    import numpy
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(checkpoint).get_text_config()
    layers = text.num_hidden_layers
    writer = gguf.GGUFWriter(file, "gemma4")
    _settings(writer, text)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, layers)
    for key, entry in shards.checkpoint(checkpoint).items():
        if not key.startswith("model.language_model."):
            continue
        value = shards.read(entry).float().numpy()
        name = "model." + key.removeprefix("model.language_model.").removesuffix(".weight")
        if name.endswith("router.scale"):
            found = name.replace("model.layers", "blk").replace("router.scale", "ffn_gate_inp.scale")
        elif name.endswith("per_expert_scale"):
            found = name.replace("model.layers", "blk").replace("router.per_expert_scale", "ffn_down_exps.scale")
        else:
            found = f"{names.get_name(name)}.weight"
        writer.add_tensor(found, numpy.atleast_1d(value))
    full = text.layer_types.index("full_attention")
    head = _of_layer(text, full, "head_dim")
    turned = int(head * text.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    factors = numpy.array([1.0] * turned + [1e30] * (head // 2 - turned), numpy.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return file


def _of_layer(text: Any, layer: int, name: str) -> int:
    """A setting of a layer: newer releases have it in ``per_layer_config``, others beside it under another name."""
    if hasattr(text, "per_layer_config"):
        return int(getattr(text.per_layer_config[layer], name))
    other = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}[name]
    full = text.layer_types[layer] == "full_attention"
    return int((getattr(text, other, None) if full else None) or getattr(text, name))


def _settings(writer: Any, text: Any) -> None:
    layers = range(text.num_hidden_layers)
    sliding = [kind == "sliding_attention" for kind in text.layer_types]
    full, slide = sliding.index(False), sliding.index(True)
    writer.add_block_count(len(layers))
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    first = len(layers) - text.num_kv_shared_layers
    wide = [2 if text.use_double_wide_mlp and layer >= first else 1 for layer in layers]
    writer.add_feed_forward_length([text.intermediate_size * times for times in wide])
    writer.add_head_count(text.num_attention_heads)
    writer.add_head_count_kv([_of_layer(text, layer, "num_key_value_heads") for layer in layers])
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    writer.add_sliding_window(text.sliding_window)
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(text.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(text.hidden_size_per_layer_input or 0)
    writer.add_final_logit_softcapping(text.final_logit_softcapping)
    heads = {"": _of_layer(text, full, "head_dim"), "_swa": _of_layer(text, slide, "head_dim")}
    for end, size in heads.items():
        for name in ("add_key_length", "add_value_length", "add_rope_dimension_count"):
            getattr(writer, name + end)(size)
    writer.add_rope_freq_base(text.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(text.rope_parameters["sliding_attention"]["rope_theta"])
    if text.num_experts:
        writer.add_expert_count(text.num_experts)
        writer.add_expert_used_count(text.top_k_experts)
        writer.add_expert_feed_forward_length(text.moe_intermediate_size)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(text.vocab_size)
