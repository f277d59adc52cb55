"""Where each part of a Gemma 4 should go in the memory there is: ``gemma4_compat.plan_device_map`` and ``plan``.

Needs a configuration, no weights and no accelerator: the model's own class is built on the meta device.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemma4_compat._engine import shadowed
from gemma4_compat._engine.text import parse_size, size_text
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import build
from gemma4_compat._planner import blueprint, code, layout, speed
from gemma4_compat._planner.blueprint import Blueprint
from gemma4_compat._planner.layout import Layout
from gemma4_compat._planner.memory import Load
from gemma4_compat._planner.result import Plan, Rate, Source
from gemma4_compat._planner.use import Use
from gemma4_compat._quantization import config, expert_storage, qat


def plan_device_map(
    model: Any,
    vram: float | str | Sequence[float | str] | Mapping[int | str, float | str],
    *,
    context: int = 8192,
    batch: int = 1,
    prompt: int | None = None,
    prefill_chunk: int | None = None,
    quantize: str | None = "4bit",
    quantize_experts: bool = False,
    adapter: str | Path | None = None,
    vision: bool = False,
    audio: bool = False,
    cpu: float | str | None = None,
    disk: float | str | None = None,
    attention: str = "sdpa",
    balanced: bool = False,
    fast: bool = True,
    bus: float | str | None = None,
    card: str | None = None,
) -> Plan:
    """A device map for ``model`` that stays inside ``vram`` while loading, in the prefill and while decoding.

    >>> plan = gemma4_compat.plan_device_map("E4B", "4GiB", context=2048)
    >>> plan.device_map["model.language_model.embed_tokens_per_layer"]
    'cpu'

    Needs torch and transformers, no weights and no accelerator. What leaves the accelerator first costs the
    least: the per-layer embeddings, the towers, the experts of as many decoder layers as must (a token reads those
    that it hits), then as many whole layers as must, which are streamed.

    Args:
        model: a folder with a ``config.json``, the id of a cached model, a variant ("E2B", "E4B", "12B", "26B-A4B",
            "31B"), a Gemma 4 configuration, or a model (on meta is enough).
        vram: what PyTorch may allocate on the accelerator: bytes or a size ("8GiB"); one for each of several; or a
            mapping of the map's values to sizes. Leave out what the CUDA context and the display take.
        context: tokens of a sequence, prompt and answer together.
        batch: sequences at a time.
        prompt: tokens of the prompt; default: all of the context, the worst case.
        prefill_chunk: tokens of the prompt that one forward takes in, for text prompts: long ones need less memory and
            some more time. The code sets ``prefill_chunk_size``. Default: all at once.
        quantize: "4bit" (nf4), "4bit-double" (nested), "8bit" or None.
        quantize_experts: experts are quantized to 4 bits, too; otherwise they stay in bf16, as upstream keeps them.
        adapter: the folder of a PEFT adapter that will be loaded onto the model.
        vision: inputs contain images, one a sequence.
        audio: inputs contain audio, 30 s a sequence.
        cpu: host memory for what is offloaded; default: as much as it takes.
        disk: disk space for what is offloaded; default: as much as it takes.
        attention: "sdpa" or "eager".
        balanced: over several accelerators, about the same on each; otherwise the first are filled.
        fast: decode with :func:`decode_fast` where it applies, and leave room for its static cache and graphs;
            otherwise ``slow_because`` says why not.
        bus: what a copy from pinned host memory reaches, in a second: bytes or a size ("12GiB"); the text of the plan
            says how many tokens a second that allows. Default: it says so for common buses.
        card: whose tokens a second are modelled: a name ("RTX 3060"; an unknown one is refused with those that are
            known), or figures ("28 SMs, 1.78 GHz, 360 GB/s", and its bus, ", 24GiB/s"). Default: some common cards.

    Returns:
        The map, what is expected to be used where, the longest context that fits, and the code that loads the model.

    Raises:
        Gemma4CompatError: it cannot fit (the message says what would), or an argument cannot be understood.
    """
    shadowed.refuse("torch", "transformers")
    given = budgets(vram)
    cards = {name: speed.CARDS[name] for name in speed.COMMON} if card is None else {card: speed.card(card)}
    if prefill_chunk is not None and (vision or audio):
        raise Gemma4CompatError(
            f"prefill_chunk is {prefill_chunk!r} for inputs with images or audio: releases of transformers differ in "
            "whether they split such a prompt. Leave prefill_chunk out"
        )
    built, name, assumed = build.on_meta(model)
    quantization = _quantization(built, quantize, quantize_experts)
    stored = _stored_experts(built, name)
    cut = _blueprint(built, quantization, adapter, experts=quantize_experts or stored)
    source = Source(
        model=name,
        model_class=cut.model_class,
        quantization=quantization,
        skip=tuple(config.default_skip_modules(built)),
        adapter=None if adapter is None else str(adapter),
        experts=quantization if any(block.experts for block in cut.blocks) else None,
        stored_experts=stored,
        assumed=assumed,
    )
    load = Load(
        context=context,
        batch=batch,
        prompt=prompt,
        prefill_chunk=prefill_chunk,
        vision=vision,
        audio=audio,
        attention=attention,
    )
    options: dict[str, Any] = {
        "cpu": None if cpu is None else parse_size(cpu),
        "disk": None if disk is None else parse_size(disk),
        "balanced": balanced,
    }
    placed, load, slow_because = _placed(cut, given, load, options, fast=fast)
    limit = int(built.config.get_text_config().max_position_embeddings)
    found_bus = 0 if bus is None else parse_size(bus.removesuffix("/s") if isinstance(bus, str) else bus)
    modelled, why_not = _modelled(cut, placed, load, found_bus, cards)
    return Plan(
        source=source,
        layout=placed,
        load=load,
        rate=Rate(slow_because=slow_because, bus=found_bus, modelled=modelled, not_modelled=why_not),
        longest_context=layout.longest_context(cut, given, load, limit=limit, placed=placed),
        chunked_prefill=_chunked_prefill(cut, placed, load),
        code=code.loading_code(source, placed, load),
    )


def _placed(
    cut: Blueprint, given: Mapping[int | str, int], load: Load, options: Mapping[str, Any], *, fast: bool
) -> tuple[Layout[Use], Load, str]:
    """The layout, the load it was made for, and why that is without fast decoding; empty where it is with it.

    Fast decoding is worth more than what leaves the accelerator for its cache and graphs.
    """
    slow_because = _slow_anywhere(cut, given) if fast else "it was not asked for"
    if not slow_because:
        wanted = replace(load, fast=True)
        try:
            placed = layout.layout(cut, given, wanted, **options)
        except Gemma4CompatError:  # if the rest does not fit either, the error below says so
            slow_because = "its static cache, the prefill into it and its graphs do not fit"
        else:
            slow_because = _slow_here(cut, placed)
            if not slow_because:
                return placed, wanted, ""
    return layout.layout(cut, given, load, **options), load, slow_because


def _modelled(
    cut: Blueprint, placed: Layout[Use], load: Load, given_bus: int, cards: Mapping[str, speed.Card]
) -> tuple[dict[str, float], str]:
    """Tokens a second by card, and why there are none; empty where there are."""
    if why := "no step is replayed" if not load.fast else speed.unknown(cut, batch=load.batch):
        return {}, why
    done = speed.work(cut, placed.device_map, context=load.context)
    found = {}
    for name, card in cards.items():
        bus = given_bus or card.bus
        if placed.brought and not bus:
            return {}, f"each token brings {size_text(placed.brought)}, and nothing says over which bus"
        streamed = placed.brought - placed.awaited
        found[name] = 1 / speed.with_bus(speed.seconds(done, card), streamed, placed.awaited, bus)
    return found, ""


def _chunked_prefill(cut: Blueprint, placed: Layout[Use], load: Load) -> int:
    """The peak of the prefill if the prompt came in chunks, where that is less and text alone is given; else 0."""
    chunked = replace(load, prefill_chunk=layout.PREFILL_CHUNK)
    if load.vision or load.audio or load.weights_only or chunked.prefill >= load.prefill:
        return 0
    peaks = (use.prefill for use in layout.placed_use(cut, placed, chunked).values())
    found, now = max(peaks), max(use.prefill for use in placed.use.values())
    return found if found < now else 0


def _slow_anywhere(cut: Blueprint, given: Mapping[int | str, int]) -> str:
    if not all(isinstance(device, int) or device.partition(":")[0] == "cuda" for device in given):
        return "graphs need CUDA"
    if cut.quantization == "8bit":
        return "bitsandbytes' 8-bit layers synchronize with the host in each step"
    return ""


def _slow_here(cut: Blueprint, placed: Layout[Use]) -> str:
    # A tower runs once a prompt, which is not replayed.
    towers = {block.name for block in cut.blocks if block.kind == "tower"}
    if any(device == "disk" for name, device in placed.device_map.items() if name not in towers):
        return "weights on disk are read by the host for every token"
    if len(placed.use) > 1:
        return "a graph is of one accelerator"
    return ""


def _quantization(model: Any, quantize: str | None, quantize_experts: bool) -> str | None:
    """How the checkpoint says its weights are stored, or else ``quantize``."""
    quantization = None if quantize == "none" else quantize
    settings = config.stored_settings(model.config)
    if settings is not None:
        quantization = config.name_of(settings)
        qat.refuse_plan(settings)
        if quantization is None:
            raise Gemma4CompatError(
                f"the checkpoint is quantized with {settings.get('quant_method')!r}; plans know bitsandbytes and "
                "bf16. Give the checkpoint it was made from"
            )
    if quantize_experts and quantization not in ("4bit", "4bit-double"):
        raise Gemma4CompatError(
            f"quantize_experts quantizes to 4 bits, and quantize is {quantization!r}; use quantize='4bit' or "
            "'4bit-double'"
        )
    return quantization


def _stored_experts(model: Any, name: str) -> bool:
    """Whether the checkpoint in the folder ``name`` has its experts in 4 bits."""
    if config.stored_settings(model.config) is None or not Path(name).is_dir():
        return False
    return bool(expert_storage.in_checkpoint(Path(name).glob("*.safetensors")))


def _blueprint(model: Any, quantization: str | None, adapter: str | Path | None, *, experts: bool) -> Blueprint:
    names = config.linear_names(model, config.default_skip_modules(model)) if quantization else None
    sizes = None if adapter is None else blueprint.adapter_sizes(adapter)
    return blueprint.describe(model, quantization, names, adapter=sizes, experts=experts)


def budgets(vram: Any) -> dict[int | str, int]:
    """Bytes by accelerator, of whatever :func:`plan_device_map` takes as ``vram``."""
    if isinstance(vram, Mapping):
        return {device: parse_size(size) for device, size in vram.items()}
    try:
        sizes: list[Any] = [vram] if isinstance(vram, (str, numbers.Real)) else list(vram)
    except TypeError as error:
        raise Gemma4CompatError(
            f"vram is {vram!r}; give a size ('8GiB', or bytes), one for each accelerator, or a mapping of them"
        ) from error
    return {index: parse_size(size) for index, size in enumerate(sizes)}
