"""Adapters for llama.cpp: one GGUF file.

Sources: ``convert_lora_to_gguf.py``, ``src/llama-adapter.cpp``, ``src/llama-graph.cpp`` and ``src/models/gemma4.cpp``
of the llama.cpp in llama-cpp-python 0.3.36; the names of tensors are those of ``gguf`` 0.19.0, ``MODEL_ARCH.GEMMA4``;
the format is ``docs/gguf.md`` of ggml, version 3. Tensors are in float32, as the converter writes them.

llama.cpp multiplies an expert's output by ``per_expert_scale`` before it adds the adapter's output, transformers
afterwards. So ``lora_b`` of the experts' ``down_proj`` is multiplied by that scale here, which needs the weights of
the base. llama.cpp supports no adapters on the per-layer embeddings and their projection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gemma4_compat._adapter_tools.base import Base, layer_of
from gemma4_compat._adapter_tools.export.pieces import Piece, Written, refuse
from gemma4_compat._adapter_tools.export.plain import Module, Plain, instead
from gemma4_compat._engine.io import files
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._gemma4.checkpoint.shards import Entry

RELEASE = "llama.cpp in llama-cpp-python 0.3.36"
FILE = "adapter.gguf"
_OF_LAYERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "router.proj": "ffn_gate_inp",
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
}
_UNTIED = {"embed_tokens": "token_embd", "lm_head": "output"}
_ALIGNMENT = 32
_TYPES = {"u32": 4, "f32": 6, "string": 8, "array": 9}
_F32 = 0


def write(plain: Plain, base: Base, read: Callable[[Entry], Any], name: str) -> Written:
    """For llama.cpp: its text model supports adapters, its multimodal projector does not."""
    if plain.dora:
        raise Gemma4CompatError(f"llama.cpp cannot use this adapter: it is DoRA (use_dora). {instead('llama.cpp')}")
    if base.ties_head:
        both = [one for one in plain.modules if one.name in _UNTIED]
        refuse("llama.cpp", both, "embedding and head are one tensor there")
    nowhere = [one for one in plain.modules if tensor_name(one) is None]
    refuse("llama.cpp", nowhere, "it supports adapters only on the linears and experts of decoder layers")
    scales = _expert_scales(plain, base)
    pieces = []
    for module in plain.modules:
        stem = f"{tensor_name(module)}.weight"
        a, b = plain.shapes(module)
        turned = module.kind == "embedding"
        pieces.append(Piece(f"{stem}.lora_a", "float32", a[::-1] if turned else a, _a(plain, module, read, turned)))
        pieces.append(Piece(f"{stem}.lora_b", "float32", b, _b(plain, module, read, scales.get(module.where))))
    return Written(pieces, None, f"llama-server -m MODEL.gguf --lora OUT/{FILE}")


def tensor_name(module: Module) -> str | None:
    """The name of the base's tensor in GGUF, without ``.weight``; None if llama.cpp supports no adapter there."""
    layer = layer_of(module.name)
    if layer is None:
        return _UNTIED.get(module.name)
    inside = f"{layer[1]}.{module.parameter}" if module.parameter else layer[1]
    return f"blk.{layer[0]}.{_OF_LAYERS[inside]}" if inside in _OF_LAYERS else None


def _a(plain: Plain, module: Module, read: Callable[[Entry], Any], turned: bool) -> Callable[[], Any]:
    def make() -> Any:
        tensor = plain.read_a(module, read).float()
        return tensor.T if turned else tensor

    return make


def _b(plain: Plain, module: Module, read: Callable[[Entry], Any], scale: Entry | None) -> Callable[[], Any]:
    def make() -> Any:
        tensor = plain.read_b(module, read).float()
        return tensor if scale is None else tensor * shards.read(scale).float()[:, None, None]

    return make


def _expert_scales(plain: Plain, base: Base) -> dict[str, Entry]:
    """``per_expert_scale`` of the layers with an adapter on the experts' ``down_proj``, by that parameter's path."""
    wanted = [module for module in plain.modules if module.parameter == "down_proj"]
    if not wanted:
        return {}
    folder = Path(base.name)
    if not files.exists(folder, "folder"):
        raise Gemma4CompatError(
            "llama.cpp scales the outputs of experts before it adds the adapter's, so exporting an adapter on their "
            "down_proj needs the base's per_expert_scale; give the folder of the base with its weights (--base)"
        )
    stored = shards.checkpoint(folder)
    by_end = {key.partition("layers.")[2]: entry for key, entry in stored.items() if key.endswith(".per_expert_scale")}
    found = {}
    for module in wanted:
        end = module.name.removeprefix("layers.").replace(".experts", ".router.per_expert_scale")
        if end not in by_end:
            raise Gemma4CompatError(f"the weights in {str(folder)!r} have no per_expert_scale for {module.path!r}")
        found[module.where] = by_end[end]
    return found


def save(folder: Path, written: Written, plain: Plain) -> None:
    """Write the file.

    Raises:
        Gemma4CompatError: the disk has no room for it.
    """
    head = _head(written.pieces, plain)
    size = len(head) + sum(_aligned(_nbytes(piece)) for piece in written.pieces)
    try:
        with (folder / FILE).open("wb") as stream:
            stream.write(head)
            for piece in written.pieces:
                stream.write(shards.as_bytes(piece.make()))
                stream.write(b"\0" * (_aligned(_nbytes(piece)) - _nbytes(piece)))
    except OSError as error:
        raise shards.unwritable(error, folder / FILE, size) from error


def _head(pieces: Sequence[Piece], plain: Plain) -> bytes:
    settings: dict[str, tuple[str, Any]] = {
        "general.architecture": ("string", "gemma4"),
        "general.type": ("string", "adapter"),
        "general.file_type": ("u32", 0),
        "adapter.type": ("string", "lora"),
        "adapter.lora.alpha": ("f32", plain.scale * plain.rank),
    }
    if plain.invocation:
        settings["adapter.alora.invocation_tokens"] = ("array", plain.invocation)
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(pieces), len(settings))]
    for key, (kind, value) in settings.items():
        parts += [_text(key), struct.pack("<I", _TYPES[kind]), _value(kind, value)]
    offset = 0
    for piece in pieces:
        extents = piece.shape[::-1]  # the fastest-varying first
        parts += [_text(piece.name), struct.pack(f"<I{len(extents)}Q", len(extents), *extents)]
        parts.append(struct.pack("<IQ", _F32, offset))
        offset += _aligned(_nbytes(piece))
    head = b"".join(parts)
    return head + b"\0" * (_aligned(len(head)) - len(head))


def _value(kind: str, value: Any) -> bytes:
    if kind == "string":
        return _text(value)
    if kind == "array":
        return struct.pack(f"<IQ{len(value)}I", _TYPES["u32"], len(value), *value)
    return struct.pack("<I" if kind == "u32" else "<f", value)


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _nbytes(piece: Piece) -> int:
    return shards.nbytes_of(piece.dtype, piece.shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
