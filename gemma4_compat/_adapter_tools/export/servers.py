"""Adapters for vLLM and SGLang: PEFT's files with the modules that their classes have.

Sources: ``vllm/lora/{peft_helper,lora_model,model_manager,utils}.py`` and ``vllm/model_executor/models/{gemma4,
gemma4_mm,gemma4_unified}.py`` of vLLM 0.33.0; ``sglang/srt/lora/{lora,lora_config,mem_pool,utils}.py`` and
``sglang/srt/models/gemma4_mm.py`` of SGLang 0.5.23.

Both take keys of ``Gemma4ForConditionalGeneration``, whichever class they serve. Both join ``q_proj``, ``k_proj`` and
``v_proj`` into one layer. If keys are used as values, its third part has no weights of its own, and both apply an
adapter on ``k_proj`` only to the keys; so ``v_proj`` gets the same adapter here. Every release of both understands a
single scale for all modules: SGLang reads neither ``alpha_pattern`` nor ``use_rslora``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gemma4_compat._adapter_tools.base import Base, layer_of
from gemma4_compat._adapter_tools.export.pieces import Piece, Written, number, refuse, zeros
from gemma4_compat._adapter_tools.export.plain import Module, Plain, instead
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters.translation import PREFIX

VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"
#: Ranks that vLLM can be started with.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
_EMBEDDINGS = ("embed_tokens", "embed_tokens_per_layer", "lm_head")
_PATCHES = "vision_embedder."
_SGLANG_ATTENTION = [f"self_attn.{name}" for name in (*_ATTENTION, "o_proj")]
_SGLANG_MLP = [f"mlp.{name}" for name in (*_MLP, "down_proj")]
_SGLANG_FAILS = (
    "SGLang 0.5.23 stops at startup with --enable-lora and a Gemma 4: its get_hidden_dim asks the configuration for "
    "hidden_size, head_dim and intermediate_size, which only text_config has. The written files will load once that "
    "is fixed; until then, merge"
)


def vllm(plain: Plain, base: Base, read: Callable[[Any], Any], name: str) -> Written:
    """For vLLM: everything except embeddings, the head and the 12B's patch embedder."""
    _refuse_variants(plain, "vLLM")
    on_embeddings = [one for one in plain.modules if one.name in _EMBEDDINGS or one.kind == "embedding"]
    refuse("vLLM", on_embeddings, "its Gemma 4 supports no adapters on embeddings or the head")
    on_patches = [one for one in plain.modules if one.name.startswith(_PATCHES)]
    refuse("vLLM", on_patches, "its vision_embedder takes no adapter")
    largest = next((rank for rank in _RANKS if rank >= plain.rank), None)
    if largest is None:
        raise Gemma4CompatError(
            f"vLLM supports ranks up to {_RANKS[-1]}, this adapter has {plain.rank}. {instead('vLLM')}"
        )
    layers = _Layers(plain, base, read)
    pieces = [*layers.linears(every=False), *layers.experts()]
    towers = any(one.name.startswith(_TOWERS) for one in plain.modules)
    options = f"--enable-lora --max-lora-rank {largest}" + " --enable-tower-connector-lora" * towers
    notes = ["without --enable-tower-connector-lora vLLM ignores the adapter's vision and audio weights"] * towers
    return Written(
        pieces,
        _config(plain, layers.targets, name),
        f"vllm serve {name} {options} --lora-modules my-adapter=OUT",
        tuple(layers.added),
        tuple(notes),
    )


def sglang(plain: Plain, base: Base, read: Callable[[Any], Any], name: str) -> Written:
    """For SGLang: the linears of the decoder layers; of a joined layer, always all parts."""
    _refuse_variants(plain, "SGLang")
    in_towers = [one for one in plain.modules if one.name.startswith((*_TOWERS, _PATCHES))]
    refuse(
        "SGLang",
        in_towers,
        "it would apply adapters on vision and audio layers to the text layers with the same numbers",
    )
    allowed = [*_SGLANG_ATTENTION, *([] if base.has_experts else _SGLANG_MLP)]
    others = [one for one in plain.modules if one.parameter or (layer_of(one.name) or (0, ""))[1] not in allowed]
    shown = ", ".join(name.rpartition(".")[2] for name in allowed)
    refuse("SGLang", others, f"there this model supports adapters only on {shown}")
    layers = _Layers(plain, base, read)
    pieces = list(layers.linears(every=True))
    return Written(
        pieces,
        _config(plain, layers.targets, name),
        f"python -m sglang.launch_server --model-path {name} --enable-lora --lora-paths my-adapter=OUT",
        tuple(layers.added),
        warning=_SGLANG_FAILS,
    )


def _refuse_variants(plain: Plain, reader: str) -> None:
    for found, what in ((plain.dora, "it is DoRA (use_dora)"), (plain.invocation, "it is an activated LoRA")):
        if found:
            raise Gemma4CompatError(f"{reader} cannot use this adapter: {what}. {instead(reader)}")


def _config(plain: Plain, targets: set[str], name: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "r": plain.rank,
        "lora_alpha": number(plain.scale * plain.rank),
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


@dataclass
class _Layers:
    """The modules of an adapter, plus those that a joined layer lacks.

    Attributes:
        added: modules the adapter has no weights for.
        targets: last parts of the names of what was written.
    """

    plain: Plain
    base: Base
    read: Callable[[Any], Any]

    def __post_init__(self) -> None:
        self.added: list[str] = []
        self.targets: set[str] = set()

    def linears(self, *, every: bool) -> Iterator[Piece]:
        """The linears; with ``every``, all parts of each joined layer."""
        there = {one.name: one for one in self.plain.modules if one.kind == "linear"}
        for name, module in there.items():
            yield from self._pair(module)
            layer, part = layer_of(name) or (0, "")
            value = name.replace("k_proj", "v_proj")
            if part == "self_attn.k_proj" and self.base.value_is_key(layer):
                self.added.append(value)
                yield from self._pair(replace(module, name=value))
        if not every:
            return
        done = {*there, *self.added}
        dtype = next(iter(there.values())).a.dtype
        for layer in self.base.layers():
            for parent, parts in (("self_attn", _ATTENTION), ("mlp", _MLP)):
                names = [f"layers.{layer}.{parent}.{part}" for part in parts]
                if done & set(names):
                    for name in names:
                        if name not in done:
                            yield from self._zeros(name, self.base.shape(name), dtype)

    def experts(self) -> Iterator[Piece]:
        """The matrices of each expert separately, as in vLLM's Gemma 4 (``is_3d_moe_weight`` is False)."""
        found = {(one.path, one.parameter): one for one in self.plain.modules if one.kind == "experts"}
        for path in dict.fromkeys(path for path, _ in found):
            up, down = found.get((path, "gate_up_proj")), found.get((path, "down_proj"))
            known = up or down
            assert known is not None
            parameters = self.base.modules[known.path]
            inside = parameters.gate_up_proj.shape[1] // 2, parameters.gate_up_proj.shape[2]
            shapes = {"gate_proj": inside, "up_proj": inside, "down_proj": inside[::-1]}
            for expert in range(known.experts):
                for part in ("gate_proj", "up_proj", "down_proj"):
                    name = f"{known.name}.{expert}.{part}"
                    module = down if part == "down_proj" else up
                    if module is None:
                        yield from self._zeros(name, shapes[part], known.a.dtype)
                    else:
                        yield from self._expert(module, name, expert, part, shapes[part])

    def _expert(self, module: Module, name: str, expert: int, part: str, shape: tuple[int, int]) -> Iterator[Piece]:
        first = shape[0] if part == "up_proj" else 0
        self.targets.add(part)
        a, b = self._names(name)
        rank = self.plain.rank
        yield Piece(a, module.a.dtype, (rank, shape[1]), lambda: self.plain.read_a(module, self.read)[expert])
        yield Piece(
            b,
            module.b.dtype,
            (shape[0], rank),
            lambda: self.plain.read_b(module, self.read)[expert, first : first + shape[0]],
        )

    def _pair(self, module: Module) -> Iterator[Piece]:
        self.targets.add(module.name.rpartition(".")[2])
        a, b = self._names(module.name)
        wide, tall = self.plain.shapes(module)
        yield Piece(a, module.a.dtype, wide, lambda: self.plain.read_a(module, self.read))
        yield Piece(b, module.b.dtype, tall, lambda: self.plain.read_b(module, self.read))

    def _zeros(self, name: str, shape: tuple[int, int], dtype: str) -> Iterator[Piece]:
        self.added.append(name)
        self.targets.add(name.rpartition(".")[2])
        a, b = self._names(name)
        yield zeros(a, dtype, (self.plain.rank, shape[1]))
        yield zeros(b, dtype, (shape[0], self.plain.rank))

    def _names(self, name: str) -> tuple[str, str]:
        inside = name if name.startswith(_TOWERS) else f"language_model.{name}"
        stem = f"{PREFIX}model.{inside}"
        return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"
