"""Where each part of a Gemma 4 should go in the memory there is: ``gemma4_compat.plan_device_map`` and ``plan``.

Needs a configuration, no weights and no accelerator: the model's own class is built on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import variants
from gemma4_compat._planner import layout, memory
from gemma4_compat._planner.layout import Layout, Use
from gemma4_compat._planner.memory import Blueprint, Load
from gemma4_compat._quantization import experts as _quantized_experts

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}

_CLASSES = {
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
}


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
        paged: decoder layers that are copied to the accelerator while the ones before them compute.
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

    What leaves the accelerator first costs the least: the per-layer embedding table, the towers, then as many decoder
    layers as must, which are paged. Nothing is loaded and no accelerator is needed.

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
        audio: sound will be given, 30 s a sequence.
        cpu: host memory for what leaves the accelerators; default: as much as it takes.
        disk: the same for the disk.
        attention: "sdpa" or "eager".
        balanced: over several accelerators, about the same on each; otherwise the first are filled.

    Raises:
        Gemma4CompatError: it cannot fit (the message says what would), or an argument cannot be understood.
    """
    quantize = None if quantize in (None, "none") else quantize
    built, name, assumed = on_meta(model)
    quantize = prequantized(built.config, quantize)
    if quantize_experts and quantize not in ("4bit", "4bit-double"):
        raise Gemma4CompatError(
            f"quantize_experts quantizes to 4 bits, and quantize is {quantize!r}; use quantize='4bit' or '4bit-double'"
        )
    stored = _stored_experts(built, name)
    skip = skip_modules(built)
    quantized = memory.linear_names(built, skip) if quantize else None
    sizes = None if adapter is None else memory.adapter_sizes(adapter)
    blueprint = memory.describe(built, quantize, quantized, adapter=sizes, experts=quantize_experts or stored)
    experts = quantize if any(block.experts for block in blueprint.blocks) else None
    budgets = _budgets(vram)
    load = Load(context=context, batch=batch, prompt=prompt, vision=vision, audio=audio, attention=attention)
    offloaded = quantize is not None
    placed = layout.layout(
        blueprint,
        budgets,
        load,
        cpu=None if cpu is None else parse_size(cpu),
        disk=None if disk is None else parse_size(disk),
        quantize_offloaded=offloaded,
        balanced=balanced,
    )
    text_config = built.config.get_text_config()
    limit = int(text_config.max_position_embeddings)
    longest = layout.longest_context(
        blueprint, budgets, load, limit=limit, placed=placed, quantize_offloaded=offloaded
    )
    away = [device for device in placed.device_map.values() if device not in placed.use]
    inside = offloaded and bool(away)
    return Plan(
        model=name,
        model_class=blueprint.model_class,
        device_map=placed.device_map,
        quantization=quantize,
        quantize_offloaded=inside,
        experts=experts,
        use=placed.use,
        cpu=placed.cpu,
        disk=placed.disk,
        paged=placed.paged,
        context=context,
        batch=batch,
        vision=vision,
        audio=audio,
        longest_context=longest,
        assumed=assumed,
        code=_code(
            name,
            blueprint,
            placed,
            quantize,
            skip,
            adapter,
            bool(away),
            [*(["quantize_experts"] if experts and not stored else []), *(["quantize_offloaded"] if inside else [])],
            attention,
        ),
    )


def skip_modules(model: Any) -> list[str]:
    """``llm_int8_skip_modules`` for this model: the head, which shares the embedding's weight, and routers, which
    decide from small differences.
    """
    routed = any(path.endswith(".router.proj") for path, _ in model.named_modules())
    return ["lm_head", "router.proj"] if routed else ["lm_head"]


def parse_size(size: int | str) -> int:
    """Bytes of a size: a number of bytes, or text such as "8GiB", "8GB", "500MB".

    Raises:
        Gemma4CompatError: it is none.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size), re.IGNORECASE)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or (unit == 1 and "." in found[1]):
        raise Gemma4CompatError(
            f"{size!r} is no size; write it as 8GiB (binary), 8GB (decimal), 500MB, or in bytes as 8589934592"
        )
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


# ---------------------------------------------------------------------------------------------------------- the model


def on_meta(model: Any) -> tuple[Any, str, str]:
    """The model on meta, what ``from_pretrained`` takes for it, and what was assumed."""
    import torch
    import transformers

    if isinstance(model, torch.nn.Module):
        return model, str(getattr(model, "name_or_path", "")) or "MODEL", ""
    assumed = ""
    if isinstance(model, transformers.PretrainedConfig):
        config, name = model, str(model.name_or_path or "MODEL")
    else:
        config, name, assumed = _configuration(str(model))
    wanted = _CLASSES.get(config.model_type)
    if wanted is None:
        raise Gemma4CompatError(
            f"{str(model)!r} is a {config.model_type} model, and no Gemma 4; known are {', '.join(sorted(_CLASSES))}"
        )
    named = (config.architectures or [wanted])[0]
    if named.startswith("Gemma4") and hasattr(transformers, named):
        wanted = named
    with torch.device("meta"):
        return getattr(transformers, wanted)._from_config(config, dtype=torch.bfloat16), name, assumed


def _configuration(model: str) -> tuple[Any, str, str]:
    from transformers import AutoConfig

    variant = variants.find(model)
    local = Path(model).is_dir()
    if variant is not None and not local and "/" not in model:
        return variants.config(variant), f"google/gemma-4-{variant}-it", variants.ASSUMED
    if local and not (Path(model) / "config.json").is_file():
        raise Gemma4CompatError(f"there is no config.json in the folder {model!r}; give the folder of a checkpoint")
    try:
        # What is cached is enough, and a plan downloads nothing.
        return AutoConfig.from_pretrained(model, local_files_only=True), model, ""
    except (OSError, ValueError) as error:
        if variant is not None and not local:
            return variants.config(variant), model, f"{model} is not in the cache: {variants.ASSUMED}"
        if local:
            raise Gemma4CompatError(f"the configuration in {model!r} cannot be read: {_line(error)}") from error
        raise Gemma4CompatError(
            f"{model!r} is no folder, no variant ({', '.join(variants.NAMES)}) and no model in the cache of the hub; "
            f"give one of these, or fetch its configuration with: hf download {model} config.json"
        ) from error


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def prequantized(config: Any, quantize: str | None) -> str | None:
    """How the checkpoint says its weights are stored, or else ``quantize``."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return quantize
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    if settings.get("load_in_8bit"):
        return "8bit"
    if settings.get("load_in_4bit"):
        return "4bit-double" if settings.get("bnb_4bit_use_double_quant") else "4bit"
    raise Gemma4CompatError(
        f"the checkpoint is quantized with {settings.get('quant_method')!r}; plans know bitsandbytes and bf16. "
        "Give the checkpoint it was made from"
    )


def _stored_experts(model: Any, name: str) -> bool:
    """Whether the checkpoint in the folder ``name`` has its experts in 4 bits."""
    if getattr(model.config, "quantization_config", None) is None or not Path(name).is_dir():
        return False
    return bool(_quantized_experts.in_checkpoint(Path(name).glob("*.safetensors")))


def _budgets(vram: Any) -> dict[int | str, int]:
    if isinstance(vram, Mapping):
        return {device: parse_size(size) for device, size in vram.items()}
    sizes = [vram] if isinstance(vram, (int, str)) else list(vram)
    return {index: parse_size(size) for index, size in enumerate(sizes)}


# ----------------------------------------------------------------------------------------------------------- the code


def _code(
    name: str,
    blueprint: Blueprint,
    placed: Layout,
    quantize: str | None,
    skip: Sequence[str],
    adapter: str | Path | None,
    split: bool,
    inside: Sequence[str],
    attention: str,
) -> str:
    imports = f"BitsAndBytesConfig, {blueprint.model_class}" if quantize else blueprint.model_class
    lines = ["import gemma4_compat  # before the others", "", "import torch"]
    lines += ["from peft import PeftModel"] if adapter is not None else []
    lines += [f"from transformers import {imports}", "", "device_map = {"]
    lines += [f"    {entry}," for entry in _entries(placed.device_map)]
    lines += ["}"]
    if quantize:
        lines += ["quantization_config = BitsAndBytesConfig("]
        if quantize == "8bit":
            lines += ["    load_in_8bit=True,"]
        else:
            lines += ["    load_in_4bit=True,", '    bnb_4bit_quant_type="nf4",']
            lines += ["    bnb_4bit_use_double_quant=True,"] if quantize == "4bit-double" else []
            lines += ["    bnb_4bit_compute_dtype=torch.bfloat16,"]
        lines += ["    llm_int8_enable_fp32_cpu_offload=True,"] if split else []
        lines += [f"    llm_int8_skip_modules={_listed(skip)},", ")"]
    arguments = ["dtype=torch.bfloat16", "device_map=device_map"]
    arguments += ["quantization_config=quantization_config"] if quantize else []
    arguments += ['attn_implementation="eager"'] if attention == "eager" else []
    arguments += ['offload_folder="offload"'] if placed.disk else []
    call = [f"model = {blueprint.model_class}.from_pretrained(", f"    {_quoted(name)},"]
    call += [f"    {argument}," for argument in arguments] + [")"]
    if inside:
        contexts = ", ".join(f"gemma4_compat.{context}()" for context in inside)
        lines += [f"with {contexts}:", *(f"    {line}" for line in call)]
    else:
        lines += call
    lines += [f"model = PeftModel.from_pretrained(model, {_quoted(str(adapter))})"] if adapter is not None else []
    return "\n".join([*lines, "model.eval()"])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _listed(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


def _entries(device_map: Mapping[str, int | str]) -> list[str]:
    """The map's items as Python, one line for all numbered modules that go to one device."""
    lines: list[str] = []
    for prefix, numbers, device in grouped(device_map):
        place = _quoted(device) if isinstance(device, str) else str(device)
        if numbers is None:
            lines.append(f"{_quoted(prefix)}: {place}")
            continue
        spans = [f"range({first}, {last + 1})" if last > first else str(first) for first, last in runs(numbers)]
        if len(spans) == 1 and len(numbers) > 1:
            text = spans[0]
        else:
            parts = [f"*{span}" if span.startswith("range") else span for span in spans]
            text = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        lines.append(f'**{{f"{prefix}.{{i}}": {place} for i in {text}}}')
    return lines


def grouped(device_map: Mapping[str, int | str]) -> list[tuple[str, list[int] | None, int | str]]:
    """The map's items, numbered modules of one device together: (path before the number, numbers, device)."""
    groups: dict[tuple[str, int | str], list[int] | None] = {}
    for name, device in device_map.items():
        prefix, _, last = name.rpartition(".")
        if last.isdigit():
            numbers = groups.setdefault((prefix, device), [])
            assert numbers is not None  # a module is not both a list and an entry
            numbers.append(int(last))
        else:
            groups[name, device] = None
    return [(prefix, numbers and sorted(numbers), device) for (prefix, device), numbers in groups.items()]


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted numbers as (first, last) of consecutive ones: [0, 1, 2, 5] gives [(0, 2), (5, 5)]."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
