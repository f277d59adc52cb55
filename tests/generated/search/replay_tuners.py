"""Every tuner of PEFT, and each other thing that its configurations can train, on a tiny Gemma 4."""

from __future__ import annotations

import dataclasses
from typing import Any

TARGETS = ["q_proj", "up_proj"]
NORMS = ["input_layernorm", "pre_feedforward_layernorm"]
#: Configurations of PEFT by a name of ours: their class, and its arguments besides the targets.
TUNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4}),
    "dora": ("LoraConfig", {"r": 4, "use_dora": True}),
    "lora-bias": ("LoraConfig", {"r": 4, "lora_bias": True}),
    "lora-dropout": ("LoraConfig", {"r": 4, "lora_dropout": 0.5}),
    "lora-head": ("LoraConfig", {"r": 4, "modules_to_save": ["lm_head"]}),
    "lora-norms": ("LoraConfig", {"r": 4, "modules_to_save": ["input_layernorm"]}),
    "lora-tokens": ("LoraConfig", {"r": 4, "trainable_token_indices": {"embed_tokens": [3, 7, 11]}}),
    "lora-embedding": ("LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "lora-experts": ("LoraConfig", {"r": 4, "target_modules": [], "target_parameters": ["experts.down_proj"]}),
    "alora": ("LoraConfig", {"r": 4, "alora_invocation_tokens": [5]}),
    "adalora": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 10}),
    "beft": ("BeftConfig", {}),
    "boft": ("BOFTConfig", {"boft_block_size": 4}),
    "c3a": ("C3AConfig", {"block_size": 16}),
    "deft": ("DeftConfig", {}),
    "delora": ("DeloraConfig", {}),
    "fourierft": ("FourierFTConfig", {"n_frequency": 20}),
    "frod": ("FrodConfig", {}),
    "glora": ("GloraConfig", {}),
    "gralora": ("GraloraConfig", {}),
    "hira": ("HiraConfig", {}),
    "hra": ("HRAConfig", {}),
    "ia3": ("IA3Config", {"feedforward_modules": ["up_proj"]}),
    "lily": ("LilyConfig", {}),
    "ln": ("LNTuningConfig", {"target_modules": NORMS}),
    "loha": ("LoHaConfig", {}),
    "lokr": ("LoKrConfig", {}),
    "miss": ("MissConfig", {}),
    "oft": ("OFTConfig", {"r": 0, "oft_block_size": 32}),
    "osf": ("OSFConfig", {}),
    "peanut": ("PeanutConfig", {}),
    "poly": ("PolyConfig", {"n_tasks": 2}),
    "psoft": ("PsoftConfig", {}),
    "pvera": ("PveraConfig", {}),
    "randlora": ("RandLoraConfig", {"r": 8}),
    "road": ("RoadConfig", {"group_size": 32}),
    "shira": ("ShiraConfig", {}),
    "supertuning": ("SupertuningConfig", {}),
    "tinylora": ("TinyLoraConfig", {}),
    "tokens": ("TrainableTokensConfig", {"token_indices": [3, 5, 7], "target_modules": ["embed_tokens"]}),
    "unilora": ("UniLoraConfig", {}),
    "vblora": ("VBLoRAConfig", {"num_vectors": 8, "vector_length": 8, "r": 4, "topk": 2}),
    "vera": ("VeraConfig", {}),
    "waveft": ("WaveFTConfig", {"n_frequency": 20}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "cartridge": ("CartridgeConfig", {"num_virtual_tokens": 3}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 32}),
    "cpt": ("CPTConfig", {"cpt_token_ids": [3, 4], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 1]}),
}


def config(tuner: str) -> Any:
    """PEFT's configuration of it.

    Raises:
        AttributeError: the installed PEFT has no such tuner.
    """
    import peft

    name, given = TUNERS[tuner]
    kind = getattr(peft, name)
    fields = {field.name for field in dataclasses.fields(kind)}
    options = {"target_modules": TARGETS} if "target_modules" in fields else {}
    return kind(**{**options, "task_type": "CAUSAL_LM", **given})


def drawn(model: Any, seed: int) -> None:
    """Have the weights that train differ from what they begin with, which often changes nothing."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_((0.2 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))
    model.eval()
