"""Bases: a tiny Gemma 4 as config.json and shards, and the functions that read it together with an adapter.

Nothing upstream is imported before an input is called or, for the weights, drawn.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.generated.fuzz import adapters, commands, options, safetensors, values
from tests.generated.fuzz.case import Case, File

TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 32,
    "num_kv_shared_layers": 0,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}
_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 8,
    "pooling_kernel_size": 3,
    "use_clipped_linears": True,
}
_WHOLE = {
    "model_type": "gemma4",
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": _VISION,
    "audio_config": None,
    "image_token_id": 30,
    "audio_token_id": 31,
    "dtype": "bfloat16",
}
_EXPERTS = {"enable_moe_block": True, "num_experts": 2, "moe_intermediate_size": 16, "top_k_experts": 1}
_BNB = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "llm_int8_skip_modules": ["lm_head"],
}
CONFIGS: tuple[dict[str, Any], ...] = (
    TEXT,
    _WHOLE,
    TEXT | _EXPERTS,
    TEXT | {"quantization_config": _BNB, "num_kv_shared_layers": 1},
    TEXT
    | {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
        "auto_map": {"AutoConfig": "a.B"},
    },
)
_SPECIAL = (
    File(b"/dev/zero", kind="link"),
    File(kind="fifo"),
    File(kind="folder"),
    File(b"", hole=3 << 30),
    File(values.as_json(TEXT | {"num_hidden_layers": 10**6})),
    File(
        values.as_json(
            {key: value for key, value in TEXT.items() if key != "layer_types"} | {"num_hidden_layers": 10**6}
        )
    ),
    File(values.as_json(TEXT | {"architectures": ["Gemma4ForCausalLM" * 10_000]})),
    File(values.as_json(_WHOLE | {"vision_config": _VISION | {"num_hidden_layers": 10**6}})),
    File(values.as_json(TEXT | _EXPERTS | {"num_experts": 10**9})),
)
configs = values.mostly(
    values.bytes_of(st.builds(values.as_json, values.changed(CONFIGS))).map(File), st.sampled_from(_SPECIAL), 30
)
_usual = st.sampled_from([File(values.as_json(config)) for config in CONFIGS[:3]])
configured = configs.map(lambda file: {"base/config.json": file})


# ---------------------------------------------------------------------------------------------------- shards and index

_SHAPES = {"model.embed_tokens.weight": (4, 2), "model.norm.weight": (2,), "lm_head.weight": (4, 2)}
_INDEX = {
    "metadata": {"total_size": 72},
    "weight_map": {
        "model.embed_tokens.weight": "a.safetensors",
        "model.norm.weight": "a.safetensors",
        "lm_head.weight": "b.safetensors",
    },
}
_SHARDS = (
    safetensors.entries({name: _SHAPES[name] for name in list(_SHAPES)[:2]}, "BF16"),
    safetensors.entries({"lm_head.weight": (4, 2)}, "F32"),
)
_OUTSIDE = (
    "../outside.safetensors",
    "/dev/zero",
    "sub/../../outside.safetensors",
    "a.safetensors/",
    "./a.safetensors",
    "sub",
    "link",
    "fifo",
)


def _index(index: File, first: File, second: File, name: str | None) -> dict[str, File]:
    if name is not None:
        weight_map = {**_INDEX["weight_map"], "lm_head.weight": name}  # type: ignore[dict-item]
        index = File(values.as_json({"weight_map": weight_map}))
    return {
        "base/model.safetensors.index.json": index,
        "base/a.safetensors": first,
        "base/b.safetensors": second,
        "base/link": File(b"../outside.safetensors", kind="link"),
        "base/fifo": File(kind="fifo"),
        "base/sub": File(kind="folder"),
        "outside.safetensors": safetensors.written(_SHARDS[1]),
    }


_written_index = values.bytes_of(st.builds(values.as_json, values.changed([_INDEX]))).map(File)
_plain_index = st.just(File(values.as_json(_INDEX)))
_shard = [st.just(safetensors.written(header)) for header in _SHARDS]
_no_name: st.SearchStrategy[str | None] = st.none()
indexed = st.one_of(
    st.builds(_index, values.mostly(_written_index, st.sampled_from(_SPECIAL[:4])), *_shard, _no_name),
    st.builds(_index, _plain_index, *_shard, st.sampled_from(_OUTSIDE) | values.text),
    st.builds(_index, _plain_index, safetensors.files(_SHARDS), _shard[1], _no_name),
)


# ------------------------------------------------------------------------------------------------- base and adapter


def _base_and_adapter(config: File, adapter: dict[str, File], given: dict[str, Any]) -> Case:
    return Case({"base/config.json": config, **{f"adapter/{name}": file for name, file in adapter.items()}}, given)


_usual_adapter = st.sampled_from(
    [
        {adapters.CONFIG: File(values.as_json(config)), adapters.WEIGHTS: safetensors.written(adapters.HEADERS[0])}
        for config in adapters.CONFIGS[:3]
    ]
)
_scan_options = st.fixed_dictionaries({"quantize": st.sampled_from([None, "4bit", "8bit", "none"]) | values.scalar})
scanned = st.one_of(
    st.builds(_base_and_adapter, _usual, adapters.folders, st.just({"quantize": None})),
    st.builds(_base_and_adapter, configs, _usual_adapter, _scan_options),
)
planned = st.one_of(
    st.builds(Case, configured, st.just({"vram": "8GiB"})),
    st.builds(lambda config, given: Case({"base/config.json": config}, given), _usual, options.plan),
    st.builds(_base_and_adapter, _usual, adapters.folders, st.just({"vram": ["1MiB", "8GiB"]})),
)


@functools.cache
def _weights(which: int) -> dict[str, tuple[int, ...]]:
    """The tensors of ``CONFIGS[which]``."""
    from gemma4_compat._gemma4.models import build

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[which]))
        model = build.on_meta(folder)[0]
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def _base(which: int, config: File | None, made: list[values.Change]) -> dict[str, File]:
    header = values.apply(safetensors.entries(_weights(which), "BF16"), made)
    return {
        "base/config.json": config or File(values.as_json(CONFIGS[which])),
        "base/model.safetensors": safetensors.written(header),
        "base/tokenizer_config.json": File(b"{}"),
    }


def _merge_case(base: dict[str, File], adapter: dict[str, File], given: dict[str, Any], out: str) -> Case:
    return Case(base | {f"adapter/{name}": file for name, file in adapter.items()}, given | {"out": out})


_CONFIGURED = [dict(check=0)]
_outs = st.sampled_from(
    ["merged", "merged", "merged", "a/b/c", "\x1b[31m", "x" * 300, "in/base/merged", "in/adapter", "in/base", "\0", ""]
)
_whole_bases = st.builds(_base, st.sampled_from([0, 1]), st.none(), st.just([]))
merged = st.one_of(
    st.builds(_merge_case, _whole_bases, adapters.folders, st.sampled_from(_CONFIGURED), st.just("merged")),
    st.builds(
        _merge_case,
        st.builds(_base, st.sampled_from([0, 1]), configs | st.none(), st.lists(values.changes, max_size=2)),
        _usual_adapter,
        st.sampled_from(_CONFIGURED),
        st.just("merged"),
    ),
    st.builds(_merge_case, _whole_bases, _usual_adapter, options.merge, _outs),
)


# ----------------------------------------------------------------------------------------------------------- the calls


def build_base(_case: Case, folder: Path, _out: Path) -> Any:
    """The base's class on the meta device."""
    from gemma4_compat._gemma4.models import build

    return build.on_meta(str(folder / "base"))[1]


def scan(case: Case, folder: Path, _out: Path) -> Any:
    """A scan of the adapter against the base."""
    import gemma4_compat

    found = gemma4_compat.scan_adapter(folder / "adapter", folder / "base", **case.options)
    commands.valid_json(found.as_data())
    return None


def plan(case: Case, folder: Path, _out: Path) -> Any:
    """A plan for the base."""
    import gemma4_compat

    given = dict(case.options)
    adapter = {"adapter": folder / "adapter"} if (folder / "adapter").exists() else {}
    found = gemma4_compat.plan_device_map(folder / "base", given.pop("vram"), **given, **adapter)
    commands.valid_json(found.as_data())
    return None


def merge(case: Case, folder: Path, out: Path) -> Any:
    """A merge without the check of outputs."""
    import gemma4_compat

    given = dict(case.options)
    target = given.pop("out")
    where = folder.parent / target if target.startswith("in/") else out / target
    found = gemma4_compat.merge_adapter(folder / "base", folder / "adapter", where, progress=False, **given)
    commands.valid_json(found.as_data())
    return None
