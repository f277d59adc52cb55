"""Adapters for mlx-lm and mlx-vlm: ``adapters.safetensors`` and their own ``adapter_config.json``.

Sources: ``mlx_lm/tuner/{utils,lora,dora}.py`` and ``mlx_lm/models/{gemma4,gemma4_text}.py`` of mlx-lm 0.32.2;
``mlx_vlm/trainer/peft/{utils,lora_layers}.py`` and ``mlx_vlm/models/gemma4/gemma4.py`` of mlx-vlm 0.7.10.

``lora_a`` and ``lora_b`` are PEFT's matrices, transposed. For experts they are ``(experts, rank, in)`` and ``(experts,
out, rank)``, not transposed, with gate and up separate. ``keys`` are full module paths, which both readers look up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._adapter_tools.base import Base
from gemma4_compat._adapter_tools.export.pieces import Piece, Written, refuse
from gemma4_compat._adapter_tools.export.plain import Module, Plain, instead
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint.shards import Entry

RELEASE = "mlx-lm 0.32.2 and mlx-vlm 0.7.10"
WEIGHTS = "adapters.safetensors"
_VLM_FAILS = (
    "mlx-lm has no vision and audio, and mlx-vlm 0.7.10 cannot load an adapter onto a model with an audio tower: "
    "freeze() raises AttributeError for its AudioRelativePositionEmbedding. The written files will load once that is "
    "fixed; until then, merge"
)
_TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.")


def write(plain: Plain, base: Base, read: Callable[[Entry], Any], name: str) -> Written:
    """For mlx-lm, which has only the text model, or mlx-vlm, which supports no adapters on experts."""
    if plain.invocation:
        raise Gemma4CompatError(f"mlx cannot use this adapter: it is an activated LoRA. {instead('mlx')}")
    if base.ties_head:
        both = [one for one in plain.modules if one.name in ("embed_tokens", "lm_head")]
        refuse("mlx", both, "embedding and head are one module there, so an adapter on one would be on both")
    towers = [one for one in plain.modules if one.name.startswith(_TOWERS)]
    text_only = [one for one in plain.modules if one.kind != "linear" or one.name == "lm_head"]
    if towers:
        refuse(
            "mlx", text_only, "mlx-lm has no vision and audio, and mlx-vlm supports adapters only on linears of layers"
        )
    if plain.dora:
        refuse("mlx", [one for one in plain.modules if one.kind != "linear"], "it supports DoRA only on linears")
    command = f"mlx_lm.generate --model {name} --adapter-path OUT --prompt ..."
    notes, warning = [], ""
    if towers:
        command = f"python -m mlx_vlm.generate --model {name} --adapter-path OUT --prompt ..."
        notes = ["mlx-lm has no vision and audio and refuses the adapter; mlx-vlm reads it"]
        if any(name.startswith("audio_tower.") for name in base.paths):
            notes, warning = [], _VLM_FAILS
    elif text_only or base.is_text_only:
        notes = ["mlx-lm reads the adapter; mlx-vlm does not"]
    keys: list[str] = []
    pieces = [piece for one in plain.modules for piece in _pieces(plain, base, one, read, keys)]
    config = {
        "fine_tune_type": "dora" if plain.dora else "lora",
        "num_layers": len(base.layers()),
        "lora_parameters": {"rank": plain.rank, "scale": plain.scale, "dropout": 0.0, "keys": keys},
    }
    return Written(pieces, config, command, notes=tuple(notes), warning=warning)


def _pieces(
    plain: Plain, base: Base, module: Module, read: Callable[[Entry], Any], keys: list[str]
) -> Iterator[Piece]:
    path = _path(module.name, base)
    a, b = plain.shapes(module)
    if module.kind == "experts":
        half = module.tall // 2
        slices = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
        if module.parameter == "down_proj":
            slices = {"down_proj": slice(0, None)}
        for part, rows in slices.items():
            tall = len(range(*rows.indices(module.tall)))
            keys.append(stem := f"{path}.switch_glu.{part}")
            yield Piece(f"{stem}.lora_a", module.a.dtype, a, lambda: plain.read_a(module, read))
            yield Piece(
                f"{stem}.lora_b",
                module.b.dtype,
                (module.experts, tall, plain.rank),
                functools.partial(_rows, plain, module, read, rows),
            )
        return
    keys.append(path)
    yield Piece(f"{path}.lora_a", module.a.dtype, a[::-1], lambda: plain.read_a(module, read).T)
    yield Piece(f"{path}.lora_b", module.b.dtype, b[::-1], lambda: plain.read_b(module, read).T)
    if (magnitude := module.magnitude) is not None:
        yield Piece(f"{path}.m", magnitude.dtype, magnitude.shape, lambda: read(magnitude))


def _rows(plain: Plain, module: Module, read: Callable[[Entry], Any], rows: slice) -> Any:
    return plain.read_b(module, read)[:, rows]


def _path(name: str, base: Base) -> str:
    if name.startswith(_TOWERS):
        return name
    inside = name if name == "lm_head" else f"model.{name}"
    return inside if base.is_text_only else f"language_model.{inside}"
