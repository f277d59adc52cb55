"""Where each part of a Gemma 4 should go in the memory there is: ``gemma4_compat.plan_device_map`` and ``plan``.

Needs a configuration, no weights and no accelerator: the model's own class is built on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gemma4_compat._engine.text import parse_size
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import build
from gemma4_compat._planner import blueprint, code, layout
from gemma4_compat._planner.blueprint import Blueprint
from gemma4_compat._planner.cost import Load
from gemma4_compat._planner.layout import Layout, Use
from gemma4_compat._quantization import config, expert_storage


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A device map that fits, and what it will use.

    Attributes:
        model: what was asked for, as ``from_pretrained`` takes it.
        model_class: the class in ``transformers`` whose modules the map names.
        device_map: for ``from_pretrained``; the first accelerator in it computes what is offloaded.
        quantization: "4bit", "4bit-double", "8bit", or None.
        quantize_offloaded: whether offloaded modules must be loaded inside ``gemma4_compat.quantize_offloaded()``.
        experts: how the experts are stored, as ``quantization`` says; None: in bf16, or there are none.
        use: expected bytes by accelerator (peaks ``loading``, ``prefill``, ``decode``; what they hold).
        cpu: bytes in host memory.
        disk: bytes on disk.
        paged: decoder layers that are streamed: copied to the accelerator while the ones before them compute.
        context: tokens of a sequence it was made for; ``batch``, ``vision`` and ``audio`` likewise.
        longest_context: the longest that fits this map, at most what the model was made for.
        assumed: what was taken for granted; empty for a checkpoint.
        code: Python that loads the model.
    """

    model: str
    model_class: str
    device_map: dict[str, int | str]
    quantization: str | None
    quantize_offloaded: bool
    experts: str | None
    use: dict[int | str, Use]
    cpu: int
    disk: int
    paged: tuple[str, ...]
    context: int
    batch: int
    vision: bool
    audio: bool
    longest_context: int
    assumed: str
    code: str = field(repr=False)

    def as_data(self) -> dict[str, Any]:
        """Everything, as plain data: bytes are integers, the map's keys in order."""
        names = ("weights", "pages", "adapter", "kv", "loading", "prefill", "decode", "peak", "budget")
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "use"}
        data["paged"] = list(self.paged)
        data["use"] = {str(device): {name: getattr(use, name) for name in names} for device, use in self.use.items()}
        return data


def plan_device_map(
    model: Any,
    vram: int | str | Sequence[int | str] | Mapping[int | str, int | str],
    *,
    context: int = 8192,
    batch: int = 1,
    prompt: int | None = None,
    quantize: str | None = "4bit",
    quantize_experts: bool = False,
    adapter: str | Path | None = None,
    vision: bool = False,
    audio: bool = False,
    cpu: int | str | None = None,
    disk: int | str | None = None,
    attention: str = "sdpa",
    balanced: bool = False,
) -> Plan:
    """A device map for ``model`` that stays inside ``vram`` while loading, in the prefill and while decoding.

    What leaves the accelerator first costs the least: the per-layer embeddings, the towers, then as many decoder
    layers as must, which are streamed. Nothing is loaded and no accelerator is needed.

    >>> plan = gemma4_compat.plan_device_map("E4B", "4GiB", context=2048)
    >>> plan.device_map["model.language_model.embed_tokens_per_layer"]
    'cpu'

    Args:
        model: a folder with a ``config.json``, the id of a cached model, a variant ("E2B", "E4B", "12B", "26B-A4B",
            "31B"), a Gemma 4 configuration, or a model (on meta is enough).
        vram: what PyTorch may allocate on the accelerator: bytes or a size ("8GiB"); one for each of several; or a
            mapping of the map's values to sizes. Leave out what the CUDA context and the display take.
        context: tokens of a sequence, prompt and answer together.
        batch: sequences at a time.
        prompt: tokens of the prompt; default: all of the context, the worst case.
        quantize: "4bit" (nf4), "4bit-double" (nested), "8bit" or None.
        quantize_experts: experts are quantized to 4 bits, too; otherwise they stay in bf16, as upstream keeps them.
        adapter: folder of a PEFT adapter that will be loaded onto it.
        vision: images will be given, one a sequence.
        audio: audio will be given, 30 s a sequence.
        cpu: host memory for what leaves the accelerators; default: as much as it takes.
        disk: the same for the disk.
        attention: "sdpa" or "eager".
        balanced: over several accelerators, about the same on each; otherwise the first are filled.

    Raises:
        Gemma4CompatError: it cannot fit (the message says what would), or an argument cannot be understood.
    """
    built, name, assumed = build.on_meta(model)
    quantization = _quantization(built, quantize, quantize_experts)
    stored = _stored_experts(built, name)
    cut = _blueprint(built, quantization, adapter, experts=quantize_experts or stored)
    budgets = _budgets(vram)
    load = Load(context=context, batch=batch, prompt=prompt, vision=vision, audio=audio, attention=attention)
    placed = layout.layout(
        cut,
        budgets,
        load,
        cpu=None if cpu is None else parse_size(cpu),
        disk=None if disk is None else parse_size(disk),
        quantize_offloaded=quantization is not None,
        balanced=balanced,
    )
    limit = int(built.config.get_text_config().max_position_embeddings)
    found = _plan(name, cut, quantization, placed, load)
    return replace(
        found,
        longest_context=layout.longest_context(
            cut, budgets, load, limit=limit, placed=placed, quantize_offloaded=quantization is not None
        ),
        assumed=assumed,
        code=code.loading_code(
            found,
            skip=config.default_skip_modules(built),
            adapter=adapter,
            quantize_experts=found.experts is not None and not stored,
            attention=attention,
        ),
    )


def _plan(name: str, cut: Blueprint, quantization: str | None, placed: Layout, load: Load) -> Plan:
    """What the layout of a model says; the caller adds the longest context and the code."""
    return Plan(
        model=name,
        model_class=cut.model_class,
        device_map=placed.device_map,
        quantization=quantization,
        quantize_offloaded=quantization is not None and placed.offloads,
        experts=quantization if any(block.experts for block in cut.blocks) else None,
        use=placed.use,
        cpu=placed.cpu,
        disk=placed.disk,
        paged=placed.paged,
        context=load.context,
        batch=load.batch,
        vision=load.vision,
        audio=load.audio,
        longest_context=0,
        assumed="",
        code="",
    )


def _quantization(model: Any, quantize: str | None, quantize_experts: bool) -> str | None:
    """How the checkpoint says its weights are stored, or else ``quantize``."""
    quantization = None if quantize == "none" else quantize
    settings = config.stored_settings(model.config)
    if settings is not None:
        quantization = config.name_of(settings)
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


def _budgets(vram: Any) -> dict[int | str, int]:
    if isinstance(vram, Mapping):
        return {device: parse_size(size) for device, size in vram.items()}
    sizes = [vram] if isinstance(vram, (int, str)) else list(vram)
    return {index: parse_size(size) for index, size in enumerate(sizes)}
