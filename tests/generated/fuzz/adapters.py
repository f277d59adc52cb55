"""Saved adapters: a configuration and a file of weights that fit a tiny Gemma 4, or do not."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.generated.fuzz import safetensors, values
from tests.generated.fuzz.case import File

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LAYERS = "base_model.model.model.layers"
_LINEAR = {
    "q_proj": (16, 16),
    "v_proj": (8, 16),
    "down_proj": (16, 32),
}  # (out, in), as in tests/generated/fuzz/checkpoints.py


def _lora(rank: int, layers: int = 2) -> dict[str, tuple[int, int]]:
    shapes = {}
    for layer in range(layers):
        for name, (rows, columns) in _LINEAR.items():
            block = "mlp" if name == "down_proj" else "self_attn"
            stem = f"{_LAYERS}.{layer}.{block}.{name}"
            shapes |= {f"{stem}.lora_A.weight": (rank, columns), f"{stem}.lora_B.weight": (rows, rank)}
    return shapes


_PLAIN = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "google/gemma-4-E2B-it",
    "r": 2,
    "lora_alpha": 4,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "modules_to_save": None,
    "inference_mode": True,
}
#: Configurations that PEFT reads, each with one more setting that is matched against names or used as a size.
CONFIGS: tuple[dict[str, Any], ...] = (
    _PLAIN,
    _PLAIN | {"rank_pattern": {"q_proj": 2, r"layers\.0\..*": 4}, "alpha_pattern": {"q_proj": 8}},
    _PLAIN | {"target_modules": r".*\.(q_proj|v_proj|down_proj)", "exclude_modules": r".*vision.*"},
    _PLAIN | {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
    _PLAIN | {"target_parameters": ["mlp.experts.gate_up_proj"], "modules_to_save": ["lm_head"]},
    _PLAIN | {"trainable_token_indices": {"embed_tokens": [1, 2]}, "peft_version": "0.21.2", "auto_mapping": {"a": 1}},
    _PLAIN | {"use_dora": True, "use_rslora": True, "init_lora_weights": "pissa", "loftq_config": {}},
    {"peft_type": "IA3", "target_modules": ["q_proj"], "feedforward_modules": ["down_proj"]},
    {"peft_type": "LOKR", "r": 2, "alpha": 2, "target_modules": ["q_proj"], "rank_pattern": {}},
    {"peft_type": "OFT", "r": 0, "oft_block_size": 4, "target_modules": ["q_proj"]},
    {"peft_type": "ADALORA", "r": 2, "target_r": 2, "init_r": 2, "total_step": 1, "target_modules": ["q_proj"]},
    {"peft_type": "TRAINABLE_TOKENS", "token_indices": [1, 2], "target_modules": ["embed_tokens"]},
    {"lora_parameters": {"rank": 8}},
)
HEADERS = (
    safetensors.entries(_lora(2)),
    safetensors.entries(_lora(2), "BF16"),
    safetensors.entries({f"base_model.model.model.{name}": (2, 2) for name in ("norm.weight", "embed_tokens.weight")}),
    safetensors.entries(
        {f"base_model.model.{'a' * 30}!.lora_A.weight": (2, 4), f"base_model.model.{'a' * 30}!.lora_B.weight": (4, 2)}
    ),
    safetensors.entries({f"{_LAYERS}.0.self_attn.q_proj.ia3_l": (16, 1), f"{_LAYERS}.0.mlp.down_proj.ia3_l": (1, 32)}),
    safetensors.entries({}),
)
_SPECIAL = (
    File(b"/dev/zero", kind="link"),
    File(b"gone", kind="link"),
    File(kind="folder"),
    File(kind="fifo"),
    File(b"", hole=3 << 30),
    File(b'{"peft_type": "LORA"}' + b" " * 3_000_000),
    File('{"peft_type": "LORA"}'.encode("utf-16")),
    File(values.as_json(_PLAIN | {"r": 10**7})),
    File(values.as_json(_PLAIN | {"rank_pattern": {"(a+)+$": 4}, "target_modules": "(a+)+$"})),
    File(values.as_json(_PLAIN | {"rank_pattern": {f"layers.{number}": 2 for number in range(3000)}})),
    File(values.as_json(_PLAIN | {"target_modules": [f"layer{number}" for number in range(50_000)]})),
)

configs = values.mostly(
    values.bytes_of(st.builds(values.as_json, values.changed(CONFIGS))).map(File), st.sampled_from(_SPECIAL)
)
weights = safetensors.files(HEADERS)
_usual_config = st.sampled_from([File(values.as_json(config)) for config in CONFIGS[:6]])
_usual_weights = st.sampled_from([safetensors.written(header) for header in HEADERS])


def _files(config: File, stored: File, more: dict[str, File]) -> dict[str, File]:
    return {CONFIG: config, WEIGHTS: stored} | more


_more = (
    st.just({}) | st.just({}) | st.just({"adapter_model.bin": File(b"\x80\x04cposix\nsystem\n(S'touch canary'\ntR.")})
)
#: Folders of adapters: mostly one of the two files is hostile, sometimes both.
folders = st.one_of(
    st.builds(_files, configs, _usual_weights, _more),
    st.builds(_files, _usual_config, weights, _more),
    st.builds(_files, configs, weights, _more),
)
